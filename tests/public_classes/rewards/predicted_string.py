"""Names of the published geometry scorer: predict_str."""

import re


def form_reward(predict_str):
    return float(re.fullmatch(r"(?s)<think>.*</think>.*<answer>.*</answer>.*", predict_str) is not None)


def compute_score(predict_str: str, ground_truth: str, form_weight: float = 0.1) -> float:
    answer = re.search(r"<answer>(.*?)</answer>", predict_str, re.DOTALL)
    right = float(answer is not None and answer[1].strip() == ground_truth)
    return (1 - form_weight) * right + form_weight * form_reward(predict_str)
