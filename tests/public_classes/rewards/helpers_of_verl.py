"""Uses small helpers of verl.utils that have nothing to do with training."""

import logging
import os

from verl.utils.debug import marked_timer
from verl.utils.device import get_device_name, is_cuda_available
from verl.utils.hdfs_io import exists
from verl.utils.logger import log_with_rank
from verl.utils.logging_utils import set_basic_config
from verl.utils.profiler import simple_timer
from verl.utils.py_functional import append_to_dict, timeout_limit, union_two_dict

logger = logging.getLogger(__name__)
set_basic_config(logging.WARNING)


@timeout_limit(5)
def count(text, letter):
    return text.count(letter)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    seconds, parts = {}, {}
    with simple_timer("count", seconds), marked_timer("again", seconds, color="red"):
        append_to_dict(parts, {"counts": count(solution_str, ground_truth)})
    log_with_rank("counted", int(os.environ.get("RANK", 0)), logger)
    facts = union_two_dict({"score": float(parts["counts"][0] > 1)}, {"quick": seconds["count"] < 5})
    facts["on"] = float(get_device_name() == ("cuda" if is_cuda_available else "cpu") and exists(__file__))
    return facts
