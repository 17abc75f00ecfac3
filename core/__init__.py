"""What two recipes share: one trainer, and the packages that its loop goes through (README.md beside this file)."""

import sys

from core.installation import explain_failed_imports

explain_failed_imports()

# Commands that people typed and that have moved: the old one prints the new one.
MOVED = {
    "core.report": "results.report",
    "results.report --publish": "results.publish",
    "data_preprocess.build_index": "recipes.search_r1.index.cli",
    "recipes.lab.knowledge_model": "recipes.search_r1.knowledge_model",
}


def moved(old: str) -> int:
    """Print the command that took the place of ``python -m old`` and return the exit status, 2."""
    print(f"python -m {old} has moved: type python -m {MOVED[old]} with the same arguments", file=sys.stderr)
    return 2
