"""The last command of a run_lab.sh: it writes the run's report and prints what was learnt.

python -m recipes.lab.report <recipe> <the arguments of main_<recipe>>
"""

from __future__ import annotations

import argparse
import sys

from core.config.composition import examine
from core.config.paths import run_folder
from core.errors import printable
from results.reporting.run_reader import NotARun, load_run
from results.reporting.run_report import closing_lines, headline, write_report


def main(recipe: str, arguments: list[str]) -> int:
    """Write the report of the run that these arguments start; return the exit status, 2 where there
    is no such run."""
    # The run itself has checked the configuration.
    run_dir = run_folder(examine(recipe, arguments).config)
    try:
        runs = [load_run(run_dir)]
    except NotARun as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    page = write_report(runs, run_dir)
    print("\n".join(["", *closing_lines(runs[0]), printable(f"{headline(runs)}; report: {page}")]))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m recipes.lab.report", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("recipe", help="The recipe of the run, as in grpo.")
    parser.add_argument(
        "arguments", nargs="...", help="The arguments that the run was started with."
    )
    asked = parser.parse_args()
    sys.exit(main(asked.recipe, asked.arguments))
