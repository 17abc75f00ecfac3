"""The estimators and losses beside those of the installed verl and TRL packages, on random inputs.

The packages live in an environment of their own: ``bash tests/crosscheck/make_env.sh`` makes it. This TRL has no PPO
trainer, so GAE is compared with verl's alone.
"""

import json
import math
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.algorithm import advantages
from core.algorithm.losses import kl_penalty
from tests.padded import PaddedAdvantageInputs, on_padded, padded_loss, padded_loss_weights

HERE = Path(__file__).parent
PYTHON = HERE / ".venv" / "bin" / "python"
LOW, HIGH, DUAL = 0.15, 0.3, 3.0
CONFIG = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=DUAL)
ROWS, N, WIDTH = 12, 4, 7

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="bash tests/crosscheck/make_env.sh makes its environment"),
]


def make(seed: int) -> dict:
    """A JSON document of inputs; the masks are prefixes, as TRL has them, and a third of the answers is unscorable."""
    rng = np.random.default_rng(seed)
    mask = np.arange(WIDTH) < rng.integers(1, WIDTH + 1, ROWS)[:, None]
    old = -rng.exponential(size=(ROWS, WIDTH))
    rewards = np.zeros((ROWS, WIDTH))
    rewards[np.arange(ROWS), mask.sum(1) - 1] = rng.normal(size=ROWS)
    outcome = [None if rng.random() < 0.3 else float(rng.choice([0, 1, 2.5])) for _ in range(ROWS)]
    outcome[4:8] = [None, 1.0, None, None]  # one answer of the group could be scored
    return {
        "rewards": rewards.tolist(),
        "outcome": outcome,
        "n": N,
        "width": WIDTH,
        "mask": mask.astype(int).tolist(),
        "group": np.repeat(np.arange(ROWS // N), N).tolist(),
        "values": rng.normal(size=(ROWS, WIDTH)).tolist(),
        "baseline": rng.normal(size=ROWS).tolist(),
        "gamma": 0.97,
        "lam": 0.9,
        "old_log_prob": old.tolist(),
        "log_prob": (old + rng.normal(scale=0.4, size=old.shape)).tolist(),
        "ref_log_prob": (old + rng.normal(scale=0.4, size=old.shape)).tolist(),
        "advantages": rng.normal(size=old.shape).tolist(),
        "row_advantages": rng.normal(size=ROWS).tolist(),
        "clip": [LOW, HIGH, DUAL],
        "loss_modes": ["vanilla", "gspo", "gpg", "cispo"],
        "agg_modes": ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"],
    }


def published(package: str, document: dict) -> dict:
    done = subprocess.run(
        [PYTHON, HERE / "published.py", package],
        input=json.dumps(document),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_close(got, want, what: str, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=tolerance, atol=tolerance, err_msg=what)


def inputs_of(document: dict, **fields) -> PaddedAdvantageInputs:
    return PaddedAdvantageInputs(
        **{
            "token_level_rewards": double(document["rewards"]),
            "response_mask": torch.tensor(document["mask"]).bool(),
            "group": torch.tensor(document["group"]),
            "values": double(document["values"]),
            "baseline": double(document["baseline"]),
            "gamma": document["gamma"],
            "lam": document["lam"],
            **fields,
        }
    )


def ours(document: dict, mode: str, agg: str, adv: torch.Tensor, *, beta: float = 0.0, config=CONFIG, old=None):
    """(objective, gradient in the log-probs)."""
    log_prob = double(document["log_prob"]).requires_grad_()
    mask = torch.tensor(document["mask"]).bool()
    old = double(document["old_log_prob"]) if old is None else old
    loss_BT, _ = padded_loss(mode)(log_prob, old, adv, mask, config)
    if beta:
        loss_BT = loss_BT + beta * kl_penalty(log_prob, double(document["ref_log_prob"]), "k3", mask)
    loss = (loss_BT * padded_loss_weights(mask.double(), agg, scale_factor=WIDTH)).sum()
    loss.backward()
    return loss.item(), log_prob.grad


@pytest.mark.parametrize("seed", [0, 1])
def test_verl(seed):
    document = make(seed)
    answer = published("verl", document)
    for name, want in answer["advantages"].items():
        inputs = inputs_of(document, norm_adv_by_std_in_grpo=name != "dr_grpo")
        got = on_padded(advantages.estimator(name.removeprefix("dr_")))(inputs)
        for one, other, what in zip(got, want, ("advantages", "returns"), strict=True):
            assert_close(one, other, f"{name} {what}", 1e-5)
    for key, (loss, gradient) in answer["losses"].items():
        mode, agg = key.split()
        # This version averages gspo as configured; v0.6.1 and the golden vectors always per sequence, as here.
        got = ours(document, mode, agg, double(document["advantages"]))
        assert_close(got[0], loss, key)
        assert_close(got[1], gradient, f"gradient of {key}")
    assert len(answer["losses"]) == 12 and len(answer["advantages"]) == 8


@pytest.mark.parametrize("seed", [0, 1])
def test_trl(seed):
    document = make(seed)
    answer = published("trl", document)
    outcome = double([math.nan if value is None else value for value in document["outcome"]])
    rewards = outcome[:, None].expand(-1, WIDTH).clone()
    rewards[:, 1:] = 0
    for name, want in answer["advantages"].items():
        inputs = inputs_of(
            document,
            token_level_rewards=rewards,
            in_group_stats=~outcome.isnan(),
            norm_adv_by_std_in_grpo=name != "dr_grpo",
            epsilon=1e-4,  # TRL's
        )
        assert_close(on_padded(advantages.estimator(name.removeprefix("dr_")))(inputs)[0][:, 0], want, name, 1e-5)

    rows = double(document["row_advantages"])[:, None].expand(-1, WIDTH).contiguous()
    no_dual_clip = SimpleNamespace(**{**vars(CONFIG), "clip_ratio_c": math.inf})
    modes = {
        "grpo": "seq-mean-token-mean",
        "bnpo": "token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
        "dapo": "token-mean",
    }
    for key, (loss, gradient) in answer["losses"].items():
        if key == "rloo":  # a ratio of whole sequences: at the old policy its gradient is the token form's
            old = double(document["log_prob"])
            got = ours(document, "vanilla", "seq-mean-token-sum", rows, config=no_dual_clip, old=old)
            assert_close(got[1], gradient, "gradient of rloo")
            continue
        loss_type, level, beta = key.split()
        mode = {"token": "vanilla", "sequence": "gspo"}[level]
        got = ours(document, mode, modes[loss_type], rows, beta=float(beta), config=no_dual_clip)
        assert_close(got[0], loss, key)
        # Through its mean over the row, a sequence ratio spreads a token's gradient: sums over rows agree where every
        # token of a row weighs the same.
        if level == "token" or loss_type == "grpo":
            assert_close(got[1], gradient, f"gradient of {key}")
    assert len(answer["losses"]) == 17 and len(answer["advantages"]) == 3
