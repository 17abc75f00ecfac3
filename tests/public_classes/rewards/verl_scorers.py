"""Several of verl's scorers, chosen by the data source and imported where they are called."""


def reward_func(data_source, solution_str, ground_truth, extra_info=None):
    if data_source in ["HuggingFaceH4/MATH-500", "aime"]:
        from verl.utils.reward_score import math_reward

        return math_reward.compute_score(solution_str, ground_truth)
    if data_source == "openai/gsm8k":
        from verl.utils.reward_score import gsm8k

        return gsm8k.compute_score(solution_str, ground_truth, method="flexible")
    raise NotImplementedError(data_source)
