"""An answer and a ground truth alone, with options: the form of the published scorers."""

import re


def extract(solution_str, method):
    found = re.findall(r"#### (-?[0-9.,]+)" if method == "strict" else r"(-?[0-9.,]*[0-9])", solution_str)
    return found[-1].replace(",", "") if found else None


def compute_score(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    answer = extract(solution_str, method)
    if answer is None:
        return 0
    return score if answer == ground_truth else format_score
