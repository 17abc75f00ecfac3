"""Capsules from somebody else: the names of files that they list."""

from __future__ import annotations

import json

import pytest

from core.errors import InputError
from core.extensions.capsules.capsule_recorder import FACTS, FORMAT
from core.extensions.capsules.stored_step import read


@pytest.mark.parametrize("name", ["../escaped", "/etc/passwd", "a/../../../escaped", "groups\\..", ""])
def test_a_capsule_lists_files_of_its_own(name, tmp_path):
    facts = {"format": FORMAT, "files": {name: "0"}, "weights": {"kept": [], "checkpoint": None}}
    (tmp_path / FACTS).write_text(json.dumps(facts))
    with pytest.raises(InputError, match="leads out of its folder"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"kept": ["actor", "../other"]}, "must be one of actor, critic, ref"),
        ({"kept": ["/etc", "actor"]}, "must be one of actor, critic, ref"),
        ({"kept": []}, "lacks the policy's weights"),
    ],
)
def test_a_capsule_has_its_weights_beside_it(weights, said, tmp_path):
    (tmp_path / FACTS).write_text(json.dumps({"format": FORMAT, "files": {}, "weights": weights}))
    with pytest.raises(InputError, match=said):
        read(tmp_path)
