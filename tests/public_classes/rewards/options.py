"""Options of the command line, custom_reward_function.reward_kwargs."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, right, wrong=0.0, limit: int = 100):
    value = right if ground_truth in solution_str else wrong
    return value - (0.2 if len(solution_str) > limit else 0.0)
