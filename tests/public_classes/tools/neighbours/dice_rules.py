"""What the tool beside this file imports."""


def total(faces):
    return sum(faces)
