"""GRPO from scratch: the whole algorithm in one file, on torch and transformers alone, to be read
from top to bottom.

    python -m recipes.lab.prepare              once, a minute: makes the tiny base model
    python -m recipes.grpo.from_scratch        40 steps on the lab's hops task: minutes on a laptop
    python -m recipes.grpo.from_scratch --steps 80 --seed 2

GRPO (DeepSeekMath, arXiv:2402.03300) repeats one step: sample several answers to each of a few
prompts, reward them, compare each answer with the others to its prompt, and make the tokens of the
better ones more likely. No critic is trained: the mean reward of a prompt's answers is the
baseline.

The settings are those of `bash recipes/grpo/run_lab.sh`, and tests/recipes/test_from_scratch.py
holds that the same trajectories give the same losses, gradients and weights as the trainer. It
departs from the paper where the trainer does by default: no KL term, a loss averaged over tokens
rather than per answer, and a dual clip. This file is for reading and for checking the trainer
against. It is not for large models: comments marked "Trainer:" say what core/ray_trainer.py does
instead, and what that gains.

Names carry their axes: P prompts, G answers a prompt (a group), B = P * G sequences, T tokens of
prompt and answer, V vocabulary. Sequences of a group lie next to each other in B.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

# The task: the edges of a cycle in shuffled order; where do k hops from a letter lead?
from recipes.lab import hops

BASE_MODEL = Path("outputs/lab/base/current")
TRAIN_QUESTIONS, TEST_QUESTIONS = 10_240, 500
PROMPTS = 32  # P, a step
GROUP = 16  # G, answers to each prompt
MAX_NEW_TOKENS = 12
# Of sampling, and of the log-probs: the policy that is trained is the one that sampled
TEMPERATURE = 1.0
# Optimizer steps on each batch; from the second one on the ratio leaves 1 and clipping can act
UPDATES = 2
CLIP = 0.2
DUAL_CLIP = 3.0
LEARNING_RATE = 1e-4  # far above a large model's 1e-6: this one has 0.3 million parameters
BETAS, WEIGHT_DECAY, GRAD_CLIP = (0.9, 0.999), 0.01, 1.0
EVALUATE_EVERY = 5


# --- 1. sample ---


@torch.no_grad()
def sample(model: PreTrainedModel, prompts_BT: Tensor, eos: int, pad: int) -> tuple[Tensor, Tensor]:
    """Sample an answer to each prompt, token by token, until the end of the sequence or the length
    limit.

    Every hops prompt has the same number of tokens, so that a batch of prompts needs no padding.

    Trainer: each sample has its own seed, a hash of (run seed, prompt, index), so that an answer
    does not depend on what else is in the batch and a run repeats to the bit. A prompt is read once
    for its group, a finished answer makes room for another (core/engines), and answers are graded
    while others are still being written. vLLM takes over where there is a GPU.

    Shapes:
        prompts_BT  [B, length of a prompt] int64
        returns     ids_BT [B, T] int64, the prompt then the answer, padded on the right;
                    mask_BT [B, T] bool, True where the policy wrote the token, its end token
                    included
    """
    ids_BT, mask_BT = prompts_BT, torch.zeros_like(prompts_BT, dtype=torch.bool)
    running_B = torch.ones(len(prompts_BT), dtype=torch.bool)
    inputs_BT, cache = prompts_BT, None
    for _ in range(MAX_NEW_TOKENS):
        output = model(input_ids=inputs_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)
        probs_BV = (output.logits[:, -1] / TEMPERATURE).softmax(-1)
        token_B = torch.multinomial(probs_BV, num_samples=1)[:, 0].where(running_B, pad)
        ids_BT = torch.cat([ids_BT, token_B[:, None]], dim=1)
        mask_BT = torch.cat([mask_BT, running_B[:, None]], dim=1)
        running_B = running_B & (token_B != eos)
        if not running_B.any():
            break
        inputs_BT, cache = token_B[:, None], output.past_key_values
    return ids_BT, mask_BT


# --- 2. reward ---


def reward(answer: str, gold: str) -> float:
    """Return 1 where the text after the last ``#`` is the gold letter, and 0 elsewhere.

    Nothing rewards the path that an answer may write before the ``#``: training finds out that
    paths lead to rewards. Only what the policy wrote is graded, never the prompt.

    Trainer: graders are processes with a deadline. An answer that they fail to grade leaves its
    group's statistics and is counted; it is not a silent zero (core/rewards).
    """
    _, mark, letter = answer.rpartition("#")
    return float(bool(mark) and letter.strip() == gold)


# --- 3. advantages ---


def group_advantages(reward_B: Tensor, group_size: int) -> Tensor:
    """Return each answer's advantage over its group: ``A_i = (r_i - mean(r)) / (std(r) + 1e-6)``.

    DeepSeekMath, arXiv:2402.03300, section 4.1.2 (outcome supervision); std has Bessel's
    correction. Every token of an answer gets the answer's advantage. A group of equal rewards has
    advantage 0: nothing is learnt from prompts that are always or never solved.

    Trainer: sequences with advantage 0 are left out of the passes but counted in the mean, which
    saves their time and keeps the gradient. DAPO (recipes/dapo) draws prompts until enough groups
    are mixed. Other estimators are entries of one table (core/algorithm/advantages.py).
    """
    # Float64: rounding of a mean must not look like a difference
    reward_PG = reward_B.double().view(-1, group_size)
    centred_PG = reward_PG - reward_PG.mean(dim=1, keepdim=True)
    return (centred_PG / (reward_PG.std(dim=1, keepdim=True) + 1e-6)).flatten().to(reward_B.dtype)


# --- 4. loss ---


def log_probs(model: PreTrainedModel, ids_BT: Tensor) -> Tensor:
    """Return the log-prob of each token given those before it, [B, T].

    Entry [b, t] belongs to the token ``ids_BT[b, t]``, which the model predicts at position t - 1:
    the shift happens here and nowhere else. The first token has none and gets 0. Padding stands on
    the right, where causal attention hides it from every real token, so no attention mask is
    needed.

    Trainer: only the positions that the policy wrote go through the head, a chunk of tokens at a
    time, because a [B, T, V] tensor is the largest one of training with a real vocabulary
    (core/learner/log_probs.py); a prompt is computed once for its whole group
    (core/learner/packed_attention.py).
    """
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1] / TEMPERATURE
    logp_BT = logits_BTV.log_softmax(-1).gather(2, ids_BT[:, 1:, None])[..., 0]
    return F.pad(logp_BT, (1, 0))


def policy_loss(logp_BT: Tensor, old_logp_BT: Tensor, adv_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the clipped objective, as a loss averaged over the tokens that the policy wrote.

    With the ratio ``r = exp(logp - old_logp)`` of the policy to the one that sampled, a token's
    loss is

        max(-A r, -A clip(r, 1 - CLIP, 1 + CLIP))     PPO, arXiv:1707.06347, eq. 7; GRPO,
        arXiv:2402.03300, eq. 3
        at most -A DUAL_CLIP where A < 0              dual clip, arXiv:1912.09729: a bad token that
        became likely
                                                      must not outweigh the batch

    The mean is over all tokens of the optimizer step (DAPO, arXiv:2503.14476, eq. 12), so a long
    answer counts more than a short one; the paper averages per answer first.

    Trainer: each token's share of the mean is computed once an optimizer step, over all ranks.
    Micro-batches and GPUs then add up parts of one sum, and no memory setting can change the result
    (core/learner/batching.py).
    """
    # exp(20) is 5e8: nothing useful lies beyond
    ratio_BT = (logp_BT - old_logp_BT).clamp(-20, 20).exp()
    adv_B1 = adv_B[:, None]
    loss_BT = torch.maximum(-adv_B1 * ratio_BT, -adv_B1 * ratio_BT.clamp(1 - CLIP, 1 + CLIP))
    loss_BT = torch.where(adv_B1 < 0, torch.minimum(loss_BT, -adv_B1 * DUAL_CLIP), loss_BT)
    return loss_BT[mask_BT].mean()


# --- 5. update ---


def make_optimizer(model: PreTrainedModel) -> torch.optim.Optimizer:
    """Return the optimizer of all weights. The learning rate stays constant."""
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY
    )


def update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    ids_BT: Tensor,
    mask_BT: Tensor,
    adv_B: Tensor,
) -> list[float]:
    """Make UPDATES optimizer steps on the batch, each on its own share of the prompts, and return
    their losses.

    The old log-probs come from the learner and before any weight moves, so that the ratio of the
    first optimizer step is 1. Those that an engine reports differ by rounding, which in bf16 is
    enough to bias the ratio.

    Trainer: with one optimizer step a batch this pass is saved, since the update's own pass gives
    the same numbers. The engine's log-probs are kept, to report the difference and, on request, to
    correct it. A gradient that is not finite skips the step and is counted
    (core/learner/learner.py).
    """
    with torch.no_grad():
        old_logp_BT = log_probs(model, ids_BT)
    losses = []
    for some in torch.arange(len(ids_BT)).split(len(ids_BT) // UPDATES):
        loss = policy_loss(
            log_probs(model, ids_BT[some]), old_logp_BT[some], adv_B[some], mask_BT[some]
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- the loop ---


def rollout(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[hops.Hops],
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample ``group_size`` answers to each question and reward them. Returns ids_BT, mask_BT and
    reward_B."""
    prompts_PT = torch.tensor(tokenizer([question.prompt for question in questions])["input_ids"])
    prompts_BT = prompts_PT.repeat_interleave(group_size, dim=0)
    ids_BT, mask_BT = sample(model, prompts_BT, tokenizer.eos_token_id, tokenizer.pad_token_id)
    answers = [
        tokenizer.decode(ids[mask], skip_special_tokens=True)
        for ids, mask in zip(ids_BT, mask_BT, strict=True)
    ]
    golds = [question.answer for question in questions for _ in range(group_size)]
    return (
        ids_BT,
        mask_BT,
        torch.tensor([reward(*pair) for pair in zip(answers, golds, strict=True)]),
    )


def train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, steps: int, seed: int
) -> None:
    """Train the model for ``steps`` steps, printing the accuracy on questions that are never
    trained on.

    Trainer: collect, log-probs, advantages, update and sync are the same five lines in
    `RayPPOTrainer.fit`. Around them: which prompt comes next is a function of the seed and of a
    running number, so that a checkpoint holds one number in place of a data loader's state, and a
    run killed anywhere resumes to the same weights, to the bit. The next prompts may be answered
    while this update runs. Learner and engine are sharded over GPUs, and weights move between them
    in memory; here both are the same module.
    """
    torch.manual_seed(seed)
    questions = hops.splits(TRAIN_QUESTIONS, TEST_QUESTIONS, seed=1)
    draw, optimizer, started = random.Random(seed), make_optimizer(model), time.perf_counter()
    for step in range(steps + 1):
        if step % EVALUATE_EVERY == 0 or step == steps:
            accuracy = float(rollout(model, tokenizer, questions["test"], group_size=1)[2].mean())
            print(
                f"step {step:3d}  {time.perf_counter() - started:4.0f} s  test accuracy "
                f"{accuracy:.3f}",
                flush=True,
            )
        if step == steps:
            return
        ids_BT, mask_BT, reward_B = rollout(
            model, tokenizer, draw.sample(questions["train"], PROMPTS), GROUP
        )
        losses = update(model, optimizer, ids_BT, mask_BT, group_advantages(reward_B, GROUP))
        length, loss = float(mask_BT.sum(1).float().mean()), sum(losses) / len(losses)
        print(
            f"step {step + 1:3d}  reward {float(reward_B.mean()):.3f}  tokens {length:.1f}  "
            f"loss {loss:+.4f}"
        )


def main() -> None:
    """Load the lab's base model and train it."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.grpo.from_scratch", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--steps", type=int, default=40, help="The number of training steps (default %(default)s)."
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="The seed of everything that is drawn (default %(default)s).",
    )
    arguments = parser.parse_args()
    if not BASE_MODEL.exists():
        sys.exit(
            f"{BASE_MODEL} is missing in the current folder. Make it once with: python -m "
            f"recipes.lab.prepare"
        )
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(BASE_MODEL),
        AutoTokenizer.from_pretrained(BASE_MODEL),
    )
    train(model, tokenizer, arguments.steps, arguments.seed)


if __name__ == "__main__":
    main()
