"""A reward manager for verl: the score of each answer, less what a longer answer than its group's shortest costs."""

import asyncio
from collections import defaultdict

import torch
from verl import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager


@register("rank_in_group")
class RankRewardManager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", cost=0.1, **kwargs):
        self.tokenizer, self.num_examine = tokenizer, num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key, self.cost = reward_fn_key, cost
        self.batches = []

    def __call__(self, data: DataProto, return_dict: bool = False):
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra = defaultdict(list)
        self.batches.append(len(data))
        shortest: dict[str, int] = {}
        width = data.batch["prompts"].shape[-1]
        lengths = data.batch["attention_mask"][:, width:].sum(-1)
        for uid, length in zip(data.non_tensor_batch["uid"], lengths.tolist(), strict=True):
            shortest[uid] = min(length, shortest.get(uid, length))
        for i in range(len(data)):
            item = data[i]
            length = int(item.batch["attention_mask"][item.batch["prompts"].shape[-1] :].sum())
            text = self.tokenizer.decode(item.batch["responses"][:length], skip_special_tokens=True)
            score = self.compute_score(
                data_source=item.non_tensor_batch[self.reward_fn_key],
                solution_str=text,
                ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=item.non_tensor_batch.get("extra_info", {}),
            )
            score = asyncio.run(self.later(score))
            longer = length - shortest[item.non_tensor_batch["uid"]]
            reward_tensor[i, length - 1] = score - self.cost * longer
            extra["acc"].append(score)
            extra["longer"].append(longer)
        return {"reward_tensor": reward_tensor, "reward_extra_info": extra} if return_dict else reward_tensor

    async def later(self, score):
        return score


@register("naive")
class PlainRewardManager:
    """Registers a name that exists, has no base, and knows no ``return_dict``; it rewards two tokens of an answer."""

    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source"):
        pass

    def __call__(self, data):
        reward = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        reward[:, :2] = 0.25
        return reward


@register("failing")
class FailingRewardManager(PlainRewardManager):
    def __call__(self, data):
        raise KeyError(data.batch["not_there"])
