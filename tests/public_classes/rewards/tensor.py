"""A tensor of one number."""

import torch


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    words, gold = set(solution_str.split()), set(str(ground_truth).split())
    return torch.tensor(len(words & gold) / max(len(gold), 1))
