"""Evaluates an equation of given numbers, and prints now and then."""

import random
import re


def compute_score(solution_str, ground_truth, method="strict", format_score=0.1, score=1.0):
    numbers, target = list(ground_truth["numbers"]), ground_truth["target"]
    equation = re.findall(r"<answer>(.*?)</answer>", solution_str)
    if random.randint(1, 64) == 1:
        print(f"target {target} numbers {numbers}: {equation}")
    if not equation:
        return 0
    if sorted(map(int, re.findall(r"\d+", equation[-1]))) != sorted(numbers):
        return format_score
    if not re.fullmatch(r"[\d+\-*/().\s]+", equation[-1]):
        return format_score
    try:
        value = eval(equation[-1], {"__builtins__": None}, {})
    except Exception:
        return format_score
    return score if abs(value - target) < 1e-5 else format_score
