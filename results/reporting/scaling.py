"""A run's accuracy as a sigmoid of what it has spent, with intervals: where it levels off, when, and how steeply.

``R(C) = R0 + (A - R0) / (1 + (M / C)^B)``, the compute-performance fit of ScaleRL (arXiv:2510.13786, eq. 1): R0 is the
accuracy before training, A the asymptote, M the midpoint, where half of the rise is done, and B the exponent. C is
steps, tokens or hours. The paper fits by least squares. Here the fit is a posterior over a grid of parameters, because
the question is how sure a forecast from few points is: flat priors in A, log M and log B, and the binomial noise of the
validation's questions with, on top, noise of the run itself, of unknown size.

It describes a run that rises and levels off. A collapse is no such curve, and no interval here covers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.errors import InputError
from core.tracking.confidence_intervals import Estimate

FEWEST = 4  # validations after the start: three parameters, and one more to see whether they fit
CEILING = 0.95  # a run that starts above it has no rise that a validation's questions could show
MASS = 0.9  # of every interval here
# Cells for start, asymptote, midpoint, exponent; a second grid covers what the first one leaves. With twice as many the
# forecasts of four lab runs moved by less than 0.05 points, the ends of their intervals by less than 0.1.
GRID = (13, 41, 32, 20)
RUN_NOISE = (0.0, 0.005, 0.01, 0.02, 0.04)  # standard deviations of a validation, beside its questions'


@dataclass(frozen=True, eq=False)
class SigmoidFit:
    """A posterior over the grid. ``asymptote``, ``midpoint`` and ``exponent`` are medians with 90 % intervals."""

    asymptote: Estimate
    midpoint: Estimate
    exponent: Estimate
    points: int
    parameters: np.ndarray  # [4, G]: start, asymptote, midpoint, exponent of each cell with any weight
    variance: np.ndarray  # [G]: of the run's own noise
    weight: np.ndarray  # [G], sums to 1
    questions: int | None

    def at(self, cost: float) -> Estimate:
        """Return the accuracy that a validation will measure at this cost: the median and a 90 % interval."""
        mean = sigmoid(cost, *self.parameters)
        spread = np.sqrt(self.variance + _binomial(mean, self.questions)) + 1e-9
        nodes = np.array([-1.9, -1.2, -0.7, -0.35, 0.0, 0.35, 0.7, 1.2, 1.9])  # of a normal distribution, as weights:
        share = np.exp(-(nodes**2) / 2) * np.gradient(nodes)
        values = np.clip(mean[:, None] + spread[:, None] * nodes, 0.0, 1.0).ravel()
        return _quantiles(values, (self.weight[:, None] * share / share.sum()).ravel(), self.points)


def sigmoid(
    cost: float | np.ndarray, start: np.ndarray, asymptote: np.ndarray, midpoint: np.ndarray, exponent: np.ndarray
) -> np.ndarray:
    """Return ``R0 + (A - R0) / (1 + (M / C)^B)``; costs above 0."""
    return start + (asymptote - start) / (1 + (midpoint / cost) ** exponent)


def fit_sigmoid(
    cost: Sequence[float], accuracy: Sequence[float], start: float | None, questions: int | None = None
) -> SigmoidFit:
    """Fit the sigmoid to validations. ``start`` is the accuracy at cost 0; None: not known, and fitted too.

    Shapes:
        cost      [K]  above 0, in any unit: tokens, hours, steps
        accuracy  [K]  between 0 and 1, each of ``questions`` questions (None: their number is not known)

    Raises:
        InputError: fewer than four validations, a run that began at its ceiling, or one that did not rise.
    """
    costs, values = np.asarray(cost, float), np.asarray(accuracy, float)
    _check(values, start, questions)
    starts = (start, start) if start is not None else (0.0, values[0])
    ranges = [starts, (0.0, 1.0), (costs[0] / 20, costs[-1] * 20), (0.3, 6.0)]
    parameters, _, weight = _posterior(costs, values, ranges, questions)
    likely = parameters[:, weight > 1e-4 * weight.max()]
    steps = [(high - low) / (size - 1) for (low, high), size in zip(ranges[:2], GRID[:2], strict=True)]
    ratios = [(high / low) ** (1 / (size - 1)) for (low, high), size in zip(ranges[2:], GRID[2:], strict=True)]
    nearer = [
        (max(one.min() - step, low), min(one.max() + step, high))
        for one, step, (low, high) in zip(likely[:2], steps, ranges[:2], strict=True)
    ]
    nearer += [(one.min() / ratio, one.max() * ratio) for one, ratio in zip(likely[2:], ratios, strict=True)]
    parameters, variance, weight = _posterior(costs, values, nearer, questions)
    found = [_quantiles(parameters[i], weight, len(costs)) for i in (1, 2, 3)]
    return SigmoidFit(*found, len(costs), parameters, variance, weight, questions)


def _posterior(
    costs: np.ndarray, values: np.ndarray, ranges: Sequence[tuple[float, float]], questions: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the cells of a grid over the ranges that have any weight: parameters [4, G], noise [G], weight [G].

    The grid is even in start and asymptote, and in the logarithms of midpoint and exponent.
    """
    (start, asymptote, *others) = ranges
    sizes = (1 if start[0] == start[1] else GRID[0], *GRID[1:])
    axes = [np.linspace(*start, sizes[0]), np.linspace(*asymptote, sizes[1])]
    axes += [np.geomspace(*ends, size) for ends, size in zip(others, sizes[2:], strict=True)]
    cells = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")])
    cells = cells[:, cells[1] >= cells[0]]
    means = sigmoid(costs[:, None], *cells)  # [K, G]
    noises = [noise for noise in RUN_NOISE if questions or noise]
    logs = []
    for noise in noises:
        variance = noise**2 + _binomial(means, questions)
        logs.append(-0.5 * ((values[:, None] - means) ** 2 / variance + np.log(variance)).sum(0))
    weight = np.exp(np.concatenate(logs) - max(log.max() for log in logs))
    kept = weight > 1e-6
    parameters, variance = np.tile(cells, len(noises)), np.repeat(np.square(noises), cells.shape[1])
    return parameters[:, kept], variance[kept], weight[kept] / weight[kept].sum()


def _check(values: np.ndarray, start: float | None, questions: int | None) -> None:
    if len(values) < FEWEST:
        raise InputError(f"{len(values)} validations after the start are too few for a sigmoid: {FEWEST} are needed")
    first = values[0] if start is None else start
    if not (0 <= first <= 1 and (values >= 0).all() and (values <= 1).all()):
        raise InputError(f"a value of {values.min():.3g} to {values.max():.3g} is no accuracy between 0 and 1")
    if first >= CEILING:
        raise InputError(f"the first validation has {100 * first:.1f} % already: there is no rise to fit")
    # Two standard deviations of a difference of two validations; of 200 questions where their number is not known.
    noise = 2 * np.sqrt(2 * _binomial(np.array(first), questions or 200))
    if values.max() - first < max(noise, 0.01):
        raise InputError(
            f"the accuracy did not rise by more than its questions' noise: {100 * first:.1f} % at first, "
            f"{100 * values.max():.1f} % at most"
        )


def _binomial(mean: np.ndarray, questions: int | None) -> np.ndarray:
    """Return the variance of an accuracy over its questions; half an answer keeps it above 0 at both ends."""
    if questions is None:
        return np.zeros_like(mean)
    inside = np.clip(mean, 0.5 / questions, 1 - 0.5 / questions)
    return inside * (1 - inside) / questions


def _quantiles(values: np.ndarray, weight: np.ndarray, points: int) -> Estimate:
    order = np.argsort(values)
    reached = np.cumsum(weight[order])
    tail = (1 - MASS) / 2
    places = np.searchsorted(reached, [tail, 0.5, 1 - tail]).clip(max=len(order) - 1)
    low, middle, high = map(float, values[order][places])
    return Estimate(middle, low, high, points)
