"""Comparing what was recorded with what was computed again: by which rule, and where the first difference is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from core.checkpoint.provenance import package_versions
from core.extensions.capsules.capsule_recorder import PACKAGES, digest, pieces
from core.extensions.capsules.rebuild import device_of
from core.extensions.capsules.stored_step import StoredStep
from core.tracking.run_manifest import cpu_kind

TOLERANCE = 1e-5
Where = Callable[[int], str]  # from the index in a flat tensor to the place in words


@dataclass(frozen=True)
class Closeness:
    """How equal is equal: to the bit where one thread of the same kind of machine computed the step, else to 1e-5.

    The tolerance is absolute, and relative to numbers above 1. An optimizer's moments are as small as gradients and
    their squares: there it is relative to the largest number of that moment in the model, and twice as large for the
    squares. AdamW makes a step of up to the learning rate of a gradient that is rounding alone, as that of a key's bias
    is: where the mean of the gradients is within the tolerance of 0, weights may differ by two such steps.
    """

    exact: bool
    why: str

    @classmethod
    def of(cls, stored: StoredStep) -> Closeness:
        """Return the rule that holds on this machine for a capsule."""
        machine, here = stored.facts["machine"], package_versions(PACKAGES)
        pairs = [("device", machine["device"], device_of(stored)), ("CPU", machine["cpu"], cpu_kind())]
        pairs += [(name, there, here.get(name)) for name, there in stored.facts["versions"].items()]
        other = [f"{name} was {there}, is {now}" for name, there, now in pairs if there != now]
        if machine["device"] != "cpu":
            other.append("a GPU does not add up in a fixed order")
        if machine["threads"] > 1:  # a step of two threads was repeated to the bit but for the order of its sums
            other.append(f"{machine['threads']} threads need not add up in the same order; trainer.cpu_threads=1 does")
        if other:
            return cls(False, "; ".join(other))
        versions = ", ".join(f"{name} {version}" for name, version in here.items())
        return cls(True, f"as recorded: {machine['cpu']}, 1 thread, {versions}")

    def __str__(self) -> str:
        return f"{'to the bit' if self.exact else f'to {TOLERANCE:g}'} ({self.why})"


@dataclass(frozen=True)
class Difference:
    """A tensor or metric that is not as recorded. ``text`` has both values, where, and how many differ."""

    phase: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.phase}: {self.name} {self.text}"


def differing(recorded: Tensor, replayed: Tensor, rule: Closeness, scale: Tensor | None = None) -> Tensor:
    """Return a mask of the numbers that differ, of two tensors of one shape and type.

    ``scale`` is what the tolerance is relative to, instead of the numbers themselves.
    """
    if not recorded.dtype.is_floating_point:
        return recorded != replayed
    both_nan = recorded.isnan() & replayed.isnan()
    if rule.exact:
        return (recorded != replayed) & ~both_nan
    bound = TOLERANCE * (recorded.abs().clamp(min=1) if scale is None else scale)
    return ~((recorded - replayed).abs() <= bound) & ~both_nan & (recorded != replayed)


def compare(
    phase: str, name: str, recorded: Tensor | None, replayed: Tensor | None, rule: Closeness, where: Where
) -> Iterator[Difference]:
    """Yield the difference of two flat tensors, if they are not equal under the rule."""
    if recorded is None or replayed is None:
        yield absent(phase, name, recorded is not None)
        return
    there, here = (f"{list(of.shape)} of {str(of.dtype).removeprefix('torch.')}" for of in (recorded, replayed))
    if there != here:
        yield Difference(phase, name, f"has shape {here}, recorded {there}")
        return
    mask = differing(recorded, replayed, rule)
    if bool(mask.any()):
        at = int(mask.nonzero()[0, 0])
        yield Difference(phase, name, f"{where(at)}: {_values(recorded, replayed, mask, at)}")


def absent(phase: str, name: str, recorded: bool) -> Difference:
    """Return the difference of what is on one side alone."""
    text = "was recorded, and is not computed now" if recorded else "is computed now, and was not recorded"
    return Difference(phase, name, text)


def _values(recorded: Tensor, replayed: Tensor, mask: Tensor, at: int) -> str:
    there, here = recorded[at].item(), replayed[at].item()
    text = f"recorded {_shown(there)}, replayed {_shown(here)}; {int(mask.sum())} of {mask.numel()} differ"
    if recorded.dtype.is_floating_point:
        text += f", by {float((recorded - replayed)[mask].abs().max()):.3g} at most"
    return text


def _shown(value: float | int | bool) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


# Metrics that the capsules of results/capsules lack: no step computed them when these were recorded
NEWER = (
    "response/repeated_trigrams",
    *(f"rollout_corr/{name}" for name in ("surprise_gap", "surprise_gap_square", "surprise_z")),
)


def compare_metrics(
    phase: str, recorded: dict[str, float], replayed: dict[str, float], rule: Closeness
) -> Iterator[Difference]:
    """Yield the metrics that differ, in the order in which they are computed now."""
    for name, here in replayed.items():
        there = recorded.get(name)
        if there is None and name in NEWER:
            continue
        if there is None:
            yield Difference(phase, name, f"is {_shown(here)}, and was not recorded")
            continue
        pair = torch.tensor([[there], [here]], dtype=torch.float64)
        if bool(differing(pair[0], pair[1], rule).any()):
            yield Difference(phase, name, f"was {_shown(there)}, is {_shown(here)}")


def compare_pieces(
    phase: str, name: str, recorded: dict[str, Tensor], replayed: Tensor, rule: Closeness, scale: Tensor | None
) -> Iterator[Difference]:
    """Compare a tensor with the checksums and numbers that were kept of it; ``scale`` is that of the tolerance."""
    starts, now = pieces(replayed.numel()), digest(replayed)
    shape = f"of shape {list(replayed.shape)}"
    if recorded["crc"].shape != now["crc"].shape:
        yield Difference(phase, name, f"{shape} has another size than the recorded one")
        return
    there, here = recorded["sample"], now["sample"]
    mask = recorded["crc"] != now["crc"] if rule.exact else differing(there, here, rule, scale)
    if bool(mask.any()):
        at = int(mask.nonzero()[0, 0])
        place = f"in its numbers {starts[at]} to {[*starts[1:], replayed.numel()][at] - 1}"
        values = f"the first of them recorded {_shown(there[at].item())}, replayed {_shown(here[at].item())}"
        count = f"{int(mask.sum())} of {len(starts)} pieces differ"
        yield Difference(phase, name, f"{shape}, {place}: {values}; {count}")
