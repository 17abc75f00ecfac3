"""How often verdicts of laptop studies agree with signs that are known of large models: results/claims.{md,html}.

    python -m results.claims

Runs nothing: ``make studies`` runs what is missing of the studies.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from results.reporting.claims import write
from results.reporting.study import StudyError


def main() -> int:
    """Write the page and return the exit status: 2 where a study's file or record is at fault."""
    text = "Writes the page of claims whose sign is known of large models."
    argparse.ArgumentParser("python -m results.claims", description=text).parse_args()
    try:
        print(f"page: {write(Path('results'))}")
    except StudyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
