"""A reward model: a classifier that gives an answer one number (verl's ``reward_model.enable``).

A *token* classifier (one label) is read at the last token, as verl does; a *sequence* classifier
(one label) as transformers pools it. Answers are passed in batches of similar length, right-padded
under a mask, so that neither the batch nor its order changes a number beyond rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.data.vocabulary import clock_arguments
from core.errors import InputError
from core.learner.models import (
    REWARD_MODEL,
    load_classifier,
    read_tokenizer,
    resolve_path,
    same_positions,
)
from core.rewards.grading import Answer, Failure, model_score
from reward_scores.score import Score, ScoreStatus

if TYPE_CHECKING:
    from core.config.schema import RewardModelConfig, RewardModelModelConfig


def load_scoring_tokenizer(config: RewardModelModelConfig) -> Any:
    """Return the reward model's tokenizer; None where the model reads the policy's token ids.

    Raises InputError.
    """
    if config.input_tokenizer is None:
        return None
    path = resolve_path(config.path, REWARD_MODEL, weights=False)
    tokenizer = read_tokenizer(path, REWARD_MODEL, trust_remote_code=config.trust_remote_code)
    if not tokenizer.chat_template:
        raise InputError(
            f"reward_model.model.path={config.path}: its tokenizer has no chat template; give it "
            f"one, or set "
            "reward_model.model.input_tokenizer=null where it reads the policy's own tokens"
        )
    return tokenizer


class RewardModel:
    """A classifier with its tokenizer, and how an answer is written for it.

    With ``reward_model.model.input_tokenizer`` (the policy's, whose text is put into the reward
    model's chat template) the answer is tokenised anew; with null the model reads the policy's
    token ids. More than ``max_length`` tokens are cut at the end, and the score's ``cut`` is True.
    Raises InputError.
    """

    def __init__(
        self,
        config: RewardModelConfig,
        device: torch.device | str = "cpu",
        template_date: str | None = None,  # data.chat_template_date
    ):
        self.config, self.device = config, torch.device(device)
        self.module, self.by_token = load_classifier(config.model)
        self.module.to(self.device)
        longest = same_positions(self.module.config)
        if longest is not None and config.max_length > longest:
            rule = (
                f"the model computes positions by the longest answer of a pass beyond "
                f"{longest} tokens"
            )
            raise InputError(
                f"reward_model.max_length={config.max_length}: {rule}; lower it to that"
            )
        self.any_pad = self.by_token or getattr(self.module.config, "pad_token_id", None) is None
        self.tokenizer = load_scoring_tokenizer(config.model)
        self.template_arguments = clock_arguments(template_date)

    def score(self, answers: Sequence[Answer]) -> list[Score | Failure]:
        """Return one score an answer; for an answer that the chat template refuses, its error
        alone."""
        ids, scores = [], [model_score(math.nan)] * len(answers)
        for at, answer in enumerate(answers):
            try:
                ids.append(self.encode(answer))
            except Exception as error:
                # A template is a program of the model's maker: it may fail in any way
                ids.append([])
                scores[at] = Failure(
                    ScoreStatus.CRASH, f"the reward model: {type(error).__name__}: {error}\n"
                )
        limit = self.config.max_length
        shown = [each[:limit] for each in ids]
        for rows in self._passes([len(each) for each in shown]):
            values = self._values([shown[at] for at in rows])
            for at, value in zip(rows, values.tolist(), strict=True):
                scores[at] = model_score(value, cut=len(ids[at]) > limit)
        return scores

    def encode(self, answer: Answer) -> list[int]:
        """Return the answer's token ids as the model reads it, not cut yet."""
        if self.tokenizer is None:
            return list(answer.token_ids)
        chat = [dict(message) for message in answer.messages]
        # A prefilled beginning, which the response goes on with
        if chat and chat[-1]["role"] == "assistant":
            chat[-1]["content"] += answer.response
        else:
            chat.append({"role": "assistant", "content": answer.response})
        options = {"add_generation_prompt": False, "tokenize": False, **self.template_arguments}
        text = self.tokenizer.apply_chat_template(chat, **options)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _passes(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the answers of each pass, longest first, within its bound of padded tokens; none
        empty."""
        order = sorted(
            (at for at, length in enumerate(lengths) if length), key=lambda at: -lengths[at]
        )
        budget = self.config.forward_max_token_len_per_gpu
        while order:
            rows = max(1, budget // lengths[order[0]])
            yield order[:rows]
            order = order[rows:]

    @torch.no_grad()
    def _values(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return the model's numbers, [B] float32."""
        model: Any = self.module.config
        # A pooling decoder finds the last token by the id: it must end no sequence
        if self.any_pad:
            last = {row[-1] for row in rows}
            model.pad_token_id = next(
                token for token in range(model.vocab_size) if token not in last
            )
        width, pad = len(rows[0]), model.pad_token_id
        ids_BT = torch.tensor(
            [[*row, *[pad] * (width - len(row))] for row in rows], device=self.device
        )
        lengths_B = torch.tensor([len(row) for row in rows], device=self.device)
        mask_BT = torch.arange(width, device=self.device) < lengths_B[:, None]
        logits = self.module(
            input_ids=ids_BT, attention_mask=mask_BT.long(), use_cache=False
        ).logits.float()
        if self.by_token:
            logits = logits[torch.arange(len(rows), device=self.device), lengths_B - 1]
        return logits[:, 0].cpu()
