"""The record of which published runs a test has repeated: ``results/verified.yaml``, which the
tables of results quote.

A test calls :func:`record_verified` after its last assertion. Only ``RECORD_VERIFIED=1`` (``make
verified``) makes it write, so that other runs of the tests leave the repository as it is. Nothing
is entered by hand.
"""

from __future__ import annotations

import datetime
import os

import yaml

from core.tracking.run_manifest import ROOT, git_state
from results.reporting.readme_tables import VERIFIED

HEAD = "# Written by `make verified`, by the tests that are named; not edited by hand.\n"


def record_verified(experiment: str, run: str, by: str, recorded: str) -> None:
    """Enter that the test ``by`` (file::name) has repeated a run that was recorded at the commit
    ``recorded``."""
    if os.environ.get("RECORD_VERIFIED") != "1":
        return
    path = ROOT / "results" / VERIFIED
    entries = (yaml.safe_load(path.read_text(encoding="utf-8")) or []) if path.exists() else []
    entry = {"experiment": experiment, "run": run, "recorded": recorded, "by": by}
    entry |= {"date": datetime.date.today().isoformat(), "commit": git_state()["commit"][:10]}
    entries = sorted(
        [*(e for e in entries if e["experiment"] != experiment), entry],
        key=lambda e: e["experiment"],
    )
    path.write_text(HEAD + yaml.safe_dump(entries, sort_keys=False, width=200), encoding="utf-8")
