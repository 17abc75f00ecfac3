"""Overlap of words with any of several gold answers."""

import re
import string
from collections import Counter


def normalized(text):
    text = "".join(letter for letter in text.lower() if letter not in set(string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    said = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    if not said:
        return 0.0
    best = 0.0
    for gold in ground_truth["target"]:
        words, wanted = normalized(said[-1]), normalized(gold)
        common = sum((Counter(words) & Counter(wanted)).values())
        best = max(best, 2 * common / (len(words) + len(wanted)) if words and wanted else 0.0)
    return best
