"""A fork's table of scorers: one of its own, and verl's."""

from verl.utils.import_utils import deprecated


def default_compute_score(data_source, solution_str, ground_truth, extra_info=None, sandbox_fusion_url=None):
    if data_source == "openai/gsm8k":
        from . import gsm8k

        result = gsm8k.compute_score(solution_str, ground_truth)
    elif data_source == "riddles":
        from . import riddles

        result = riddles.compute_score(solution_str, ground_truth)
    elif sandbox_fusion_url:
        from . import sandbox_fusion

        result = sandbox_fusion.compute_score(sandbox_fusion_url, None, None, solution_str, ground_truth)
    else:
        raise NotImplementedError(data_source)
    return float(result[0] if isinstance(result, tuple) else result)


@deprecated("verl.utils.reward_score.default_compute_score")
def _default_compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return default_compute_score(data_source, solution_str, ground_truth, extra_info)
