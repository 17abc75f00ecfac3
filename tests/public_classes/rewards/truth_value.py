"""A truth value."""


def is_right(data_source, solution_str, ground_truth, extra_info=None):
    return solution_str.lower().split("answer:")[-1].strip().startswith(str(ground_truth).lower())
