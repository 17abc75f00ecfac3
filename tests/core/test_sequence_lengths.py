"""What is longer than the model has positions is refused before a model loads, not by the engine
when it comes."""

from __future__ import annotations

import pytest

from core.errors import InputError
from core.learner.models import check_lengths
from core.ray_trainer import RayPPOTrainer
from recipes.search_r1.search_r1_ray_trainer import SearchR1Trainer
from tests.core.scripted_run import configured, prepare
from tests.row_files import plain_row, write_parquet

TOOLS = "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml"


def write_lengths(folder):
    """Write a model of 256 positions, training prompts of 26 tokens and a validation prompt of
    200."""
    prepare(folder)
    write_parquet(folder / "long.parquet", [plain_row(0, text="a" * 200)])
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_lengths(tmp_path_factory.mktemp("lengths"))


def problems(folder, *overrides):
    with pytest.raises(InputError) as refused:
        RayPPOTrainer(configured(folder, "run", *overrides)).init_workers()
    return refused.value.problems


def test_a_training_prompt_with_its_response_has_to_fit(folder):
    line, of_validation = problems(folder, "data.max_response_length=240")
    assert line.startswith(
        "data.max_prompt_length=64, data.max_response_length=240: the longest prompt of "
    )
    assert (
        "data.train_files has 26 tokens and 240 may follow" in line
        and "max_position_embeddings=256; lower" in line
    )
    assert "data.val_files" in of_validation


def test_a_remedy_that_was_followed_is_not_given_again(folder):
    long, remedy = "data.max_response_length=240", "data.filter_overlong_prompts=True"
    assert remedy in problems(folder, long)[0]
    assert remedy not in "".join(problems(folder, long, remedy))


def test_a_validation_prompt_too(folder):
    long = ["data.max_prompt_length=256", f"data.val_files={folder / 'long.parquet'}"]
    (line,) = problems(folder, *long, "data.max_response_length=57")
    assert "data.val_files has 200 tokens and 57 may follow" in line
    config = configured(folder, "run", *long, "data.max_response_length=56")
    trainer = RayPPOTrainer(config)
    trainer.load_data()
    assert trainer.longest() == {"data.train_files": (26, 56), "data.val_files": (200, 56)}
    check_lengths(config, trainer.longest())


def test_searches_come_behind_the_prompt_and_tools_are_counted_with_it(folder):
    """A prompt's length has the tools in it."""
    config = configured(folder, "run", TOOLS, "actor_rollout_ref.rollout.multi_turn.enable=True")
    assert RayPPOTrainer(config).response_limit(10) == 6
    assert SearchR1Trainer(config).response_limit(10) == 60
