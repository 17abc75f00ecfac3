"""Compares calls of tools that are written as JSON."""

import json
import re


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info=None):
    try:
        said = [json.loads(one) for one in re.findall(r"<tool_call>(.*?)</tool_call>", solution_str, re.DOTALL)]
    except json.JSONDecodeError:
        return {"score": -1.0, "form": 0}
    gold = json.loads(ground_truth)
    names = len({one.get("name") for one in said} & {one["name"] for one in gold}) / len(gold)
    return {"score": 3.0 if said == gold else names, "form": 1, "calls": len(said)}
