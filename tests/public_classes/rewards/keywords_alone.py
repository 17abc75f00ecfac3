"""Arguments by keyword alone, and a helper of verl under another name of its argument."""

from verl.utils.reward_score.math_verify import compute_score as symbolic


def compute_score(*, data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return symbolic(model_output=solution_str, ground_truth=ground_truth)
