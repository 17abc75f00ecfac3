"""Plans of models whose sizes are impossible, or whose files are damaged."""

from __future__ import annotations

import re

import pytest

from core.command_line import prepare
from core.planning.model_shapes import shape_of
from tests.core.config.test_random_lines import enter_dry_run


@pytest.fixture
def here(tmp_path, monkeypatch):
    return enter_dry_run(tmp_path, monkeypatch)


@pytest.mark.parametrize("sizes", ["{hidden_size: 0}", "{num_attention_heads: x}", "{vocab_size: null}"])
def test_a_plan_of_impossible_sizes_names_them(sizes, here, capsys):
    model = "actor_rollout_ref.model"
    with pytest.raises(SystemExit) as end:
        prepare("ppo", [f"{model}.path=./model", f"{model}.override_config={sizes}"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and re.search(rf"none: .*{sizes[1:].partition(':')[0]}", text)


@pytest.mark.parametrize("text", ["", "[]", "{", "\udcff"])
def test_a_plan_of_a_damaged_model_names_the_file(text, here):
    (here / "model/config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match="config.json .*JSON"):
        shape_of("./model")
    with pytest.raises(ValueError, match="not known offline"):
        shape_of("~no_such_user/" + "x" * 300)
