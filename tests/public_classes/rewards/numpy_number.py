"""A number of numpy: a distance that fades."""

import re

import numpy as np


def compute_score(data_source, solution_str, ground_truth, extra_info):
    numbers = re.findall(r"-?\d+\.?\d*", solution_str)
    if not numbers:
        return np.float32(0)
    return np.exp(-np.abs(np.float64(numbers[-1]) - np.float64(ground_truth)))
