"""A number, by the documented signature."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    last = solution_str.strip().split()[-1].strip(".") if solution_str.strip() else ""
    return 1.0 if last == str(ground_truth) else 0.0
