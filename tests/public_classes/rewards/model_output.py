"""Names of the published symbolic scorer: model_output."""

from math_verify import parse, verify


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0) -> bool:
    gold = parse("\\boxed{" + ground_truth + "}", parsing_timeout=None)
    try:
        return verify(gold, parse(model_output, parsing_timeout=None), timeout_seconds=None)
    except TimeoutError:
        return timeout_score
