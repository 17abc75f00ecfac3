"""A data set class, a tool and a reward in one file; the reward counts turns."""

import datasets
from verl.tools.base_tool import OpenAIFunctionToolSchema
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.utils.dataset import RLHFDataset
from verl.utils.reward_score import math_dapo
from verl.utils.rollout_trace import rollout_trace_op


class PlainSandboxTool(SandboxFusionTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        return await super().execute(instance_id, parameters, **kwargs)


class ProblemDataset(RLHFDataset):
    def _read_files_and_tokenize(self):
        self.dataframe = datasets.concatenate_datasets([datasets.load_dataset(one) for one in self.data_files])

    def __getitem__(self, item):
        from verl.models.transformers.qwen2_vl import get_rope_index

        return {**super().__getitem__(item), "position": get_rope_index}


def compute_score(data_source, solution_str, ground_truth, extra_info):
    result = math_dapo.compute_score(solution_str, ground_truth, strict_box_verify=True)
    if result["score"] < 0:
        result["score"] = min(-0.6, result["score"] + (extra_info["num_turns"] - 2) / 2 * 0.1)
    if result["pred"] is None:
        result["pred"] = ""
    return result
