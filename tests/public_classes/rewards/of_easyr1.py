"""EasyR1's form: dictionaries."""


def compute_score(reward_inputs: list[dict], format_weight: float = 0.1) -> list[dict]:
    return [{"overall": float(one["ground_truth"] in one["response"])} for one in reward_inputs]
