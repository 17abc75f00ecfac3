"""Data sources of one's own that a scorer of the table grades: ``reward_model.scorers``."""

from __future__ import annotations

import pytest

from core.config.composition import compose
from core.errors import InputError
from core.rewards.grading import Job
from core.rewards.layer import RewardLayer

MINE = "reward_model.scorers={my/questions: qa_em}"


@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_a_data_source_of_ones_own_is_graded_by_the_scorer_that_a_key_names(manager):
    """It was refused with the names of the table, and no key mapped one."""
    keys = [MINE, f"reward_model.reward_manager={manager}", "reward_model.num_workers=1"]
    layer = RewardLayer(compose("grpo", keys))
    assert layer.scorers.scorer("my/questions").name == "qa_em"
    assert layer.scorers.scorer("openai/gsm8k").name == "gsm8k"
    assert layer.pool.settings["named"] == {"my/questions": "qa_em"}
    score = layer.scorers(Job("my/questions", "<answer>Paris</answer>", {"target": ["Paris"]}, {}))
    assert score.value == 1.0
    layer.close()


def test_a_name_that_is_no_scorer_is_refused_with_the_names():
    with pytest.raises(InputError, match="reward_model.scorers.mine=nq: is no scorer; .*qa_em"):
        RewardLayer(compose("grpo", ["reward_model.scorers={mine: nq}"]))
