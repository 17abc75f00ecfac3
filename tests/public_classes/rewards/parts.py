"""A dictionary with parts: numbers of numpy, texts, and a value that is not there."""

import numpy as np


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    parts = np.array([ground_truth in solution_str, "<think>" in solution_str], dtype=np.float32)
    return {
        "score": float(parts @ np.array([0.9, 0.1])),
        "accuracy": parts[0],
        "format": parts[1],
        "hint": None,
        "kind": "short" if len(solution_str) < 99 else "long",
    }
