"""verl's own function, and half a point for what it does not know."""

from verl.utils.reward_score import default_compute_score


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    try:
        return default_compute_score(data_source, solution_str, ground_truth, extra_info)
    except NotImplementedError:
        return 0.5
