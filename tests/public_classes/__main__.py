"""Print the table of files: whether each loads and plays, and why not (``python -m tests.public_classes``)."""

from __future__ import annotations

from tests.public_classes.cases import REWARDS, TOOLS, USERS
from tests.public_classes.outcomes import outcome

KINDS = {"reward": REWARDS, "tool": TOOLS, "interaction": USERS}


def main() -> None:
    rows, totals = [], []
    for kind, cases in KINDS.items():
        outcomes = [outcome(case) for case in cases]
        for case, one in zip(cases, outcomes, strict=True):
            marks = ("yes" if one.loads else "no", "yes" if one.plays else "no")
            rows.append(f"{kind:12}{case.path:46}{marks[0]:7}{marks[1]:7}{one.reason}"[:240])
        loads, plays = sum(one.loads for one in outcomes), sum(one.plays for one in outcomes)
        totals.append(f"{kind}s: of {len(cases)} files {loads} load and {plays} score or play")
    print(f"{'kind':12}{'file':46}{'loads':7}{'plays':7}reason", *rows, "", *totals, sep="\n")


if __name__ == "__main__":
    main()
