"""The robust variants of scorers give the answers that golden vectors recommend;
tests/test_conformance.py has the published ones."""

from __future__ import annotations

import pytest

from tests.golden_scorers import ROBUST, raw_cases


@pytest.mark.parametrize("file", ROBUST)
def test_golden_recommended(file):
    for case in raw_cases(file):
        if "recommended" in case:
            wanted = case["recommended"]
            value = (
                wanted.get("score", wanted.get("result")) if isinstance(wanted, dict) else wanted
            )
            assert ROBUST[file]({**case["inputs"], **case.get("params", {})}) == float(value), case[
                "name"
            ]
