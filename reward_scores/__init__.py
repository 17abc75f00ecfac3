"""Pure scoring functions, one file per kind of answer, and the table from data sources to them.

``reward_model.reward_kwargs`` chooses a variant by the scorer's name: ``{"gsm8k": {"method":
"flexible"}}``.
"""

from __future__ import annotations

import difflib
from types import ModuleType

from reward_scores import (
    countdown,
    geo3k,
    gsm8k,
    hops,
    instructions,
    knowledge,
    math_dapo,
    math_reward,
    maze,
    multiply,
    prime_code,
    prime_math,
    qa_em,
    qa_em_format,
    random_reward,
    short_answer,
)
from reward_scores.score import Scorer, any_ground_truth, no_libraries


def _scorer(module: ModuleType) -> Scorer:
    check = getattr(module, "check_ground_truth", any_ground_truth)
    libraries = getattr(module, "libraries", no_libraries)
    note = getattr(module, "note_ground_truth", any_ground_truth)
    return Scorer(
        module.__name__.rpartition(".")[2], module.score, module.EXAMPLES, check, libraries, note
    )


_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
_SEARCHED = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")

# A name that ends in * stands for every data source that starts so.
SCORERS: dict[str, Scorer] = {
    **dict.fromkeys(("lab/figures", "lab/guesses", "lab/hops"), _scorer(hops)),
    "lab/knowledge*": _scorer(knowledge),
    "lab/maze": _scorer(maze),
    **dict.fromkeys(("lab/sums", "openai/gsm8k"), _scorer(gsm8k)),
    "real/instructions": _scorer(instructions),
    **dict.fromkeys(("real/passages", "real/arithmetic"), _scorer(short_answer)),
    "control/random_reward": _scorer(random_reward),
    **dict.fromkeys(
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
        _scorer(math_reward),
    ),
    **dict.fromkeys(("math", "math_dapo", "math_dapo_reasoning", "aime*"), _scorer(math_dapo)),
    **dict.fromkeys((f"numina_{name}" for name in _NUMINA), _scorer(prime_math)),
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), _scorer(prime_code)),
    "hiyouga/geometry3k": _scorer(geo3k),
    **dict.fromkeys(
        ("real/search", *_SEARCHED, *(f"searchR1_{name}" for name in _SEARCHED)), _scorer(qa_em)
    ),
    "qa_em_format": _scorer(qa_em_format),
    "countdown": _scorer(countdown),
    "multiply": _scorer(multiply),
}


class UnknownDataSource(ValueError):
    """No scorer is known for a data source."""


def scorer_for(data_source: str) -> Scorer:
    """Return the scorer of a data source. Raises :class:`UnknownDataSource`, with the nearest
    names, without one."""
    exact = SCORERS.get(data_source)
    if exact is not None and not data_source.endswith("*"):
        return exact
    for name, scorer in SCORERS.items():
        if name.endswith("*") and str(data_source).startswith(name[:-1]):
            return scorer
    raise UnknownDataSource(
        f"no scorer for data_source={data_source!r}; {_nearest(str(data_source))}"
    )


def _nearest(data_source: str) -> str:
    folded = {name.casefold(): name for name in SCORERS}
    wanted = data_source.casefold()
    near = [folded[name] for name in difflib.get_close_matches(wanted, folded, n=3, cutoff=0.6)]
    near += [name for key, name in folded.items() if wanted and wanted in key and name not in near]
    if near:
        return f"nearest: {', '.join(near[:3])}"
    return f"known: {', '.join(sorted(SCORERS))}"
