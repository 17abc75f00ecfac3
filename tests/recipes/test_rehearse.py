"""The rehearsal of a script: small enough for CPUs, with the script's algorithm and layout, and one
harm at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.config import examine
from recipes.launch.rehearse import shrunk
from recipes.launch.strikes import PHASES, Strikes, hang_itself, kill_itself
from results.reporting.run_scripts import read_script

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SCRIPTS = (
    "dapo/run_qwen2.5_32b.sh",
    "dapo/run_qwen2.5_7b_math.sh",
    "search_r1/run_qwen2.5_7b_base_ppo.sh",
    "search_r1/run_qwen2.5_3b_base_grpo.sh",
    "grpo/run_qwen2.5_7b_gsm8k.sh",
    "ppo/run_deepseek7b_gsm8k.sh",
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_rehearsal_is_small_and_keeps_the_scripts_algorithm(name):
    script = read_script(RECIPES / name)
    small = [f"{key}={value}" for key, value in shrunk(script.config, Path("/tiny"), 2).items()]
    composed = examine(script.recipe, [*script.arguments, "--", *small])
    assert composed.problems == ()
    config, full = composed.config, script.config
    assert (
        config.trainer.nnodes == min(2, full.trainer.nnodes) and config.trainer.n_gpus_per_node == 2
    )
    assert config.algorithm == full.algorithm
    assert (
        config.actor_rollout_ref.actor.loss_agg_mode == full.actor_rollout_ref.actor.loss_agg_mode
    )
    assert config.actor_rollout_ref.hybrid_engine == full.actor_rollout_ref.hybrid_engine


def test_each_phase_is_struck_once_with_a_step_between_and_the_hang_comes_last(tmp_path):
    harms = []

    class Call:
        remote = harms.append

    class Actor:
        __ray_call__ = Call

    actors = {"learner rank 0": Actor, "engine 0": Actor}
    strikes = Strikes(tmp_path / "journal")
    struck_after = []
    for step in range(30):
        for phase in ("generate", "old_log_prob", "update_actor", "update_weights"):
            before = len(harms)
            strikes.before(phase, actors)
            struck_after += [step] * (len(harms) - before)
    assert harms == [kill_itself] * 4 + [hang_itself]
    assert (tmp_path / "journal").read_text().split()[-1] == "hang"
    assert struck_after[0] >= 1 and struck_after == sorted({*struck_after})
    assert "generate" in PHASES
