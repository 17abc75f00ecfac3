"""What the two files beside this one import."""


def vowels(text):
    return sum(letter in "aeiou" for letter in text)
