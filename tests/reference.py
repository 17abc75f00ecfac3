"""The formulas of the papers in float64 numpy and plain loops, written apart from the code they check."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

Array = np.ndarray


def _groups(group: Array, counted: Array) -> dict[int, list[int]]:
    members = defaultdict(list)
    for row, label in enumerate(group):
        if counted[row]:
            members[int(label)].append(row)
    return members


def outcome_advantage(kind: str, rewards: Array, mask: Array, group: Array, counted: Array, norm: bool = True) -> Array:
    """One number a row for the estimators that compare the rows of a group; [B]."""
    score = [math.fsum(row) for row in rewards]
    out = np.zeros(len(score))
    everyone = _groups(group, np.ones(len(group), bool))
    nonzero = sum(1 for row in range(len(score)) if counted[row] and score[row] != 0)
    for label, rows in _groups(group, counted).items():
        values = [score[row] for row in rows]
        n = len(values)
        mean = math.fsum(values) / n
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1)) if n > 1 else 1.0
        alone = len(everyone[label]) == 1
        lengths = [int(mask[row].sum()) for row in rows]
        for row, value in zip(rows, values, strict=True):
            others = math.fsum(values) - value
            if kind == "grpo":
                out[row] = (value - (0 if alone else mean)) / (std + 1e-6 if norm else 1)
            elif kind == "rloo":
                out[row] = value - (others / (n - 1) if n > 1 else 0 if alone else value)
            elif kind == "opo":
                weighted = math.fsum(length * v for length, v in zip(lengths, values, strict=True))
                out[row] = value - (0 if alone else weighted / sum(lengths))
            elif kind == "gpg":
                out[row] = (value - (0 if alone else mean)) * counted.sum() / max(nonzero, 1)
            elif kind == "centred":
                out[row] = value - (0 if alone else mean)
            elif kind == "grpo_passk":
                best, second = sorted(values, reverse=True)[:2] if n > 1 else (value, value)
                if value == best:
                    out[row] = (best - second) / (std + 1e-6 if norm else 1)
            else:
                raise ValueError(kind)
    return out


def whiten(values: Array, mask: Array) -> Array:
    """Standardised with Bessel's correction over the mask; 0 elsewhere."""
    kept = values[mask]
    out = np.zeros_like(values)
    out[mask] = (kept - kept.mean()) / math.sqrt(kept.var(ddof=1) + 1e-8)
    return out


def gae(rewards: Array, values: Array, mask: Array, gamma: float, lam: float) -> tuple[Array, Array]:
    """By the definition: the discounted sum of the deltas of the policy's own tokens; (advantages, returns)."""
    advantage = np.zeros_like(values)
    for row in range(len(values)):
        own = np.flatnonzero(mask[row])
        following = [values[row, t] for t in own[1:]] + [0.0] * bool(len(own))
        delta = [rewards[row, t] + gamma * after - values[row, t] for t, after in zip(own, following, strict=True)]
        for i, t in enumerate(own):
            advantage[row, t] = math.fsum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(own)))
    return whiten(advantage, mask), np.where(mask, advantage + values, 0)


def discounted_returns(rewards: Array, mask: Array, gamma: float) -> Array:
    out = np.zeros_like(rewards)
    for row in range(len(rewards)):
        own = np.flatnonzero(mask[row])
        for i, t in enumerate(own):
            out[row, t] = math.fsum(gamma ** (j - i) * rewards[row, own[j]] for j in range(i, len(own)))
    return out


def policy_loss(kind: str, logp: Array, old: Array, adv: Array, mask: Array, c: dict[str, float]) -> Array:
    """[B, T] loss a token, 0 outside the mask."""
    out = np.zeros_like(logp)
    for row, t in zip(*np.nonzero(mask), strict=True):
        a, log_ratio = adv[row, t], logp[row, t] - old[row, t]
        if kind == "gspo":
            log_ratio = float(np.mean((logp - old)[row][mask[row]]))
        ratio = math.exp(min(max(log_ratio, -20), 20))
        near = min(max(ratio, 1 - c["clip_ratio_low"]), 1 + c["clip_ratio_high"])
        if kind == "vanilla":
            out[row, t] = -min(ratio * a, near * a)
            if a < 0:
                out[row, t] = min(out[row, t], -c["clip_ratio_c"] * a)
        elif kind == "gspo":
            out[row, t] = -min(ratio * a, near * a)
        elif kind == "geo_mean":  # the smaller of log-ratio and bounded log-ratio, times the sign of A, token by token
            bounds = -c["clip_ratio_low"], c["clip_ratio_high"]
            logs = [logp[row, i] - old[row, i] for i in np.flatnonzero(mask[row])]
            signs = [math.copysign(1, adv[row, i]) for i in np.flatnonzero(mask[row])]
            pairs = [(x, min(max(x, bounds[0]), bounds[1])) for x in logs]
            parts = [min(pair) if sign > 0 else max(pair) for pair, sign in zip(pairs, signs, strict=True)]
            out[row, t] = -a * math.exp(float(np.mean(parts)))
        elif kind == "sapo":
            tau = c["tau_pos"] if a > 0 else c["tau_neg"]
            out[row, t] = -a * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
        elif kind in ("gpg", "reinforce"):
            out[row, t] = -a * logp[row, t]
        elif kind == "cispo":
            out[row, t] = -near * a * logp[row, t]
        elif kind in ("clip_cov", "kl_cov"):  # every second token is the one treated apart
            apart = (row * logp.shape[1] + t) % 2 == 0
            near = ratio if kind == "kl_cov" else near
            out[row, t] = 0.0 if apart and kind == "clip_cov" else -min(ratio * a, near * a)
            out[row, t] += 0.25 * abs(log_ratio) if apart and kind == "kl_cov" else 0.0
        else:
            raise ValueError(kind)
    return out


def aggregate(loss: Array, mask: Array, mode: str, width: float) -> float:
    """The objective from the losses of a whole optimizer step."""
    rows = [loss[row][mask[row]] for row in range(len(loss)) if mask[row].any()]
    if not rows:
        return 0.0
    if mode == "token-mean":
        return float(np.concatenate(rows).mean())
    if mode == "token-sum":
        return float(np.concatenate(rows).sum())
    per_row = {"seq-mean-token-mean": np.mean, "seq-mean-token-sum": np.sum}.get(mode, lambda row: row.sum() / width)
    return float(np.mean([per_row(row) for row in rows]))


def kl(kind: str, logp: Array, ref: Array) -> Array:
    d = logp - ref
    name = kind.rstrip("+")
    if name in ("kl", "k1"):
        return d
    if name == "abs":
        return np.abs(d)
    if name in ("mse", "k2"):
        return d**2 / 2
    return np.minimum(np.expm1(-np.clip(d, -20, 20)) + np.clip(d, -20, 20), 10)


def head(hidden: Array, weight: Array, labels: Array, temperature: float, bias: Array | None) -> tuple[Array, Array]:
    """(log-probs, entropies) by an explicit softmax."""
    logits = (hidden @ weight.T + (0 if bias is None else bias)) / temperature
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    return np.log(probs[np.arange(len(labels)), labels]), -(probs * np.log(probs)).sum(-1)
