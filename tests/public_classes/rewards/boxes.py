"""Overlap of rectangles; the gold one comes from extra_info."""

import json


def overlap(one, other):
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    common = max(width, 0) * max(height, 0)
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return common / (areas - common)


def compute_score(solution_str, ground_truth, extra_info=None):
    try:
        box = json.loads(solution_str[solution_str.index("[") : solution_str.rindex("]") + 1])
    except ValueError:
        return 0.0
    return overlap(box, extra_info["box"])
