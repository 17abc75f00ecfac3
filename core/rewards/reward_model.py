"""A reward model: a classifier that gives an answer one number (verl's ``reward_model.enable``).

A *token* classifier (one label) is read at the last token, as verl does; a *sequence* classifier
(one label) is pooled by transformers. Answers are passed in batches of similar length, right-padded
under a mask, so that neither the batch nor its order changes a number beyond rounding.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.config.schema import RewardModelConfig, RewardModelModelConfig
from core.data.vocabulary import clock_arguments
from core.errors import InputError
from core.learner.models import (
    compute_dtype,
    quiet,
    read_tokenizer,
    readable,
    resolve_path,
    same_positions,
)
from core.rewards.grading import Answer, Failure, model_score
from reward_scores.score import Score, ScoreStatus

PATH_KEY = "reward_model.model.path"
# The end of an architecture's name, and transformers' class that loads it
CLASSIFIERS = {
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
}


def load_scoring_tokenizer(config: RewardModelModelConfig) -> Any:
    """Return the reward model's tokenizer, or None if the model reads the policy's token ids.

    Raises InputError.
    """
    if config.input_tokenizer is None:
        return None
    path = resolve_path(config.path, PATH_KEY, weights=False)
    tokenizer = read_tokenizer(path, PATH_KEY, trust_remote_code=config.trust_remote_code)
    if not tokenizer.chat_template:
        raise InputError(
            f"reward_model.model.path={config.path}: its tokenizer has no chat template; give it "
            "one, or set reward_model.model.input_tokenizer=null where it reads the policy's own "
            "tokens"
        )
    return tokenizer


def load_classifier(model: RewardModelModelConfig) -> tuple[nn.Module, bool]:
    """Load a trained classifier with one label; return it and whether it labels tokens.

    The other kind labels sequences. Weights have the number format of the passes. Raises InputError
    for a folder that holds anything else.
    """
    import transformers

    path = resolve_path(model.path, PATH_KEY)
    options = {"trust_remote_code": model.trust_remote_code}
    with readable(path, PATH_KEY):
        config = transformers.AutoConfig.from_pretrained(path, **options)
    names = " ".join(config.architectures or ())
    kind = next((kind for end, kind in CLASSIFIERS.items() if end in names), None)
    if kind is None or config.num_labels != 1:
        raise InputError(
            f"{PATH_KEY}={model.path}: it has {names or 'no architecture'} with "
            f"{config.num_labels} labels; a reward model is a sequence or token classifier with "
            "one label"
        )
    dtype = compute_dtype(model.fsdp_config.dtype) or torch.float32
    with quiet():
        module = getattr(transformers, kind).from_pretrained(
            path, config=config, dtype=dtype, **options
        )
    return module.eval().requires_grad_(False), "TokenClassification" in kind


class RewardModel:
    """A classifier with its tokenizer.

    With ``reward_model.model.input_tokenizer`` (the policy's) the answer's text is put into the
    reward model's chat template and tokenised anew; with null the model reads the policy's token
    ids. Tokens beyond ``max_length`` are cut off, and the score's ``cut`` is True. Raises
    InputError.
    """

    def __init__(
        self,
        config: RewardModelConfig,
        device: torch.device | str = "cpu",
        template_date: str | None = None,  # data.chat_template_date
    ):
        self.config = config
        self.device = torch.device(device)
        self.module, self.by_token = load_classifier(config.model)
        self.module.to(self.device)
        longest = same_positions(self.module.config)
        if longest is not None and config.max_length > longest:
            raise InputError(
                f"reward_model.max_length={config.max_length}: the model computes positions by the "
                f"longest answer of a pass beyond {longest} tokens; lower it to that"
            )
        # True if no number depends on which token pads
        self.any_pad = self.by_token or getattr(self.module.config, "pad_token_id", None) is None
        self.tokenizer = load_scoring_tokenizer(config.model)
        self.template_arguments = clock_arguments(template_date)

    def score(self, answers: Sequence[Answer]) -> list[Score | Failure]:
        """Return one score an answer, or the error of an answer that the chat template refuses."""
        ids = []
        scores = [model_score(math.nan)] * len(answers)
        for i, answer in enumerate(answers):
            try:
                ids.append(self.encode(answer))
            except Exception as error:
                # A template is a program of the model's maker: it may fail in any way
                detail = f"the reward model: {type(error).__name__}: {error}\n"
                ids.append([])
                scores[i] = Failure(ScoreStatus.CRASH, detail)
        limit = self.config.max_length
        cut_ids = [sequence[:limit] for sequence in ids]
        for indices in self._passes([len(sequence) for sequence in cut_ids]):
            values = self._values([cut_ids[i] for i in indices])
            for i, value in zip(indices, values.tolist(), strict=True):
                scores[i] = model_score(value, cut=len(ids[i]) > limit)
        return scores

    def encode(self, answer: Answer) -> list[int]:
        """Return the answer's token ids as the model reads it, not cut yet."""
        if self.tokenizer is None:
            return list(answer.token_ids)
        chat = [dict(message) for message in answer.messages]
        # The response continues a prefilled beginning
        if chat and chat[-1]["role"] == "assistant":
            chat[-1]["content"] += answer.response
        else:
            chat.append({"role": "assistant", "content": answer.response})
        options = {"add_generation_prompt": False, "tokenize": False, **self.template_arguments}
        text = self.tokenizer.apply_chat_template(chat, **options)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _passes(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the indices of each pass, longest first, within its bound of padded tokens.

        Empty sequences are in no pass.
        """
        filled = [i for i, length in enumerate(lengths) if length]
        order = sorted(filled, key=lambda i: -lengths[i])
        budget = self.config.forward_max_token_len_per_gpu
        while order:
            count = max(1, budget // lengths[order[0]])
            yield order[:count]
            order = order[count:]

    @torch.no_grad()
    def _values(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return the model's numbers of sequences whose first is the longest, [B] float32."""
        model: Any = self.module.config
        if self.any_pad:
            # A pooling decoder finds the last token by the padding's id, which must end no sequence
            last_ids = {sequence[-1] for sequence in sequences}
            model.pad_token_id = next(i for i in range(model.vocab_size) if i not in last_ids)
        width = len(sequences[0])
        padded = [
            [*sequence, *[model.pad_token_id] * (width - len(sequence))] for sequence in sequences
        ]
        ids_BT = torch.tensor(padded, device=self.device)
        lengths_B = torch.tensor([len(sequence) for sequence in sequences], device=self.device)
        mask_BT = torch.arange(width, device=self.device) < lengths_B[:, None]
        output = self.module(input_ids=ids_BT, attention_mask=mask_BT.long(), use_cache=False)
        logits = output.logits.float()
        if self.by_token:
            logits = logits[torch.arange(len(sequences), device=self.device), lengths_B - 1]
        return logits[:, 0].cpu()
