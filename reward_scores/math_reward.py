"""MATH: the last ``\\boxed{...}``, compared as text after the normalisation of Hendrycks et al.
(2021).

``published`` is verl's ``math_reward``: text equality, no algebra. 1,000 is not 1000, 0.25 is not
1/4, and a last box that is not closed loses an earlier one. ``robust`` reads the last box that is
closed, or what is marked as the answer, and compares values; ``math_verify`` reads the same and
compares by the library of that name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reward_scores.equivalence import cleaned, equivalent
from reward_scores.final_answer import final_answer
from reward_scores.latex import closing_brace
from reward_scores.score import Score, as_text, graded, no_answer, text_problem
from reward_scores.symbolic import MATH_VERIFY, math_verify_equal

# And the library that may not end
METHODS = {"published": None, "robust": None, "math_verify": MATH_VERIFY}
EXAMPLES = (
    (r"So the graph has $\boxed{2}$ vertical asymptotes.", "2", 1.0),
    (r"\boxed{\dfrac12}", r"\frac{1}{2}", 1.0),
    (r"\boxed{1}, no: \boxed{\left(3, \frac{\pi}{2}\right)}", r"(3,\frac{\pi}{2})", 1.0),
    (r"\boxed{3}", "2", 0.0),
    ("It is 2.", "2", 0.0),
)


def score(
    response: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    method: str = "published",
) -> Score:
    """Return 1 where the last boxed answer equals the gold one: ``published`` as text after
    :func:`strip_string`.

    A number as ground truth is read as text, but under ``published``, where it equals no answer.
    """
    if method not in METHODS:
        raise ValueError(f"math_reward method={method!r}: must be one of {', '.join(METHODS)}")
    if method != "published":
        answer = final_answer(response)
        equal = equivalent if method == "robust" else math_verify_equal
        return (
            no_answer()
            if answer is None
            else graded(equal(answer, as_text(ground_truth)), cleaned(answer))
        )
    answer = unbox(last_box(response))
    if answer is None:
        return no_answer()
    return graded(is_equiv(answer, ground_truth), normalised(answer))


def last_box(text: str) -> str | None:
    r"""Return the last ``\boxed{...}`` with its braces, or ``\boxed x`` up to a ``$``; None where
    it is not closed."""
    if "\\boxed " in text:
        return "\\boxed " + text.rpartition("\\boxed ")[2].partition("$")[0]
    start = text.rfind("\\boxed")
    if start < 0:
        start = text.rfind("\\fbox")
    if start < 0:
        return None
    end = closing_brace(text, start)
    return None if end is None else text[start : end + 1]


def unbox(box: str | None) -> str | None:
    r"""Return a box's content; None for ``\fbox`` and for what is no box (published: only
    ``\boxed`` counts)."""
    if box is None:
        return None
    if "\\boxed " in box:
        return box.removeprefix("\\boxed ") if box.startswith("\\boxed ") else None
    if box.startswith("\\boxed{") and box.endswith("}"):
        return box[len("\\boxed{") : -1]
    return None


def is_equiv(answer: str | None, ground_truth: str | None) -> bool:
    """Return whether two answers are equal after normalising, or as they stand where one cannot be
    normalised."""
    if answer is None or ground_truth is None:
        return answer is ground_truth
    if not isinstance(ground_truth, str):
        return False
    try:
        return strip_string(answer) == strip_string(ground_truth)
    except ValueError:
        return answer == ground_truth


def normalised(answer: str) -> str:
    try:
        return strip_string(answer)
    except ValueError:
        return answer


_REPLACEMENTS = (
    *(
        ("\n", ""),
        ("\\!", ""),
        ("\\\\", "\\"),
        ("tfrac", "frac"),
        ("dfrac", "frac"),
        ("\\left", ""),
        ("\\right", ""),
    ),
    *(("^{\\circ}", ""), ("^\\circ", ""), ("\\$", "")),
)


def strip_string(text: str) -> str:
    """Return the normal form of an answer in LaTeX. Raises ValueError where the published rules
    break down."""
    for old, new in _REPLACEMENTS:
        text = text.replace(old, new)
    text = _drop_unit(text)
    for old, new in (("\\\\%", ""), ("\\%", ""), (" .", " 0."), ("{.", "{0.")):
        text = text.replace(old, new)
    if not text:
        return text
    if text.startswith("."):
        text = "0" + text
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left) <= 2:
        text = right
    text = _brace_fractions(_brace_roots(text).replace(" ", ""))
    if text == "0.5":
        return "\\frac{1}{2}"
    return _slash_to_fraction(text)


def _drop_unit(text: str) -> str:
    """Cut at ``\\text{ ``, which in MATH is only ever a unit."""
    before, *others = text.split("\\text{ ")
    if len(others) > 1:
        raise ValueError("more than one unit")
    return before


def _brace_roots(text: str) -> str:
    """Rewrite ``\\sqrt3`` as ``\\sqrt{3}``."""
    head, *roots = text.split("\\sqrt")
    if "" in roots:
        raise ValueError("a root of nothing")
    return head + "".join(
        "\\sqrt" + (root if root[0] == "{" else f"{{{root[0]}}}{root[1:]}") for root in roots
    )


def _brace_fractions(text: str) -> str:
    """Rewrite ``\\frac12`` as ``\\frac{1}{2}`` and ``\\frac1{72}`` as ``\\frac{1}{72}``."""
    head, *fractions = text.split("\\frac")
    for fraction in fractions:
        if not fraction:
            raise ValueError("a fraction of nothing")
        if fraction[0] == "{":
            head += "\\frac" + fraction
        elif len(fraction) < 2:
            return text
        else:
            below = fraction[1:] if fraction[1] == "{" else f"{{{fraction[1]}}}{fraction[2:]}"
            head += f"\\frac{{{fraction[0]}}}{below}"
    return head


def _slash_to_fraction(text: str) -> str:
    """Rewrite ``3/4`` as ``\\frac{3}{4}``, for whole numbers in their usual spelling only."""
    whole = re.fullmatch(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)", text)
    return f"\\frac{{{whole[1]}}}{{{whole[2]}}}" if whole else text


def check_ground_truth(ground_truth: Any, method: str = "published") -> str | None:
    problem = text_problem(ground_truth, numbers=method != "published")
    if problem:
        return problem
    text = as_text(ground_truth)
    if not (normalised(text) if method == "published" else cleaned(text)):
        return f"{ground_truth!r:.200} normalises to nothing, which an empty box would match"
    return None


def libraries(method: str = "published") -> tuple[str, ...]:
    return (METHODS[method],) if METHODS.get(method) else ()
