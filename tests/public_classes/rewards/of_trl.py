"""TRL's form: lists of completions and columns."""


def length_reward(completions, **kwargs):
    return [-abs(20 - len(completion)) / 20 for completion in completions]
