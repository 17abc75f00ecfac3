"""The rehearsal of a script: small enough for CPUs, with the script's algorithm and layout, and one
harm at a time."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from core.config.composition import examine
from recipes.launch import rehearse
from recipes.launch.rehearse import Rehearsal, shrunk
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


def test_a_rehearsal_writes_prompts_that_a_run_reads_and_a_page_of_what_held(tmp_path, monkeypatch):
    """Nothing is struck here: the runs of a whole rehearsal take minutes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("DRY_RUN", raising=False)
    monkeypatch.setattr(
        Rehearsal, "losses_and_signal", lambda self: self.check("SIGTERM saves", True, "status 0")
    )
    monkeypatch.setattr(
        Rehearsal, "resume", lambda self: self.check("resume", False, "from step 3")
    )
    with pytest.raises(SystemExit) as ended:
        rehearse.main([str(RECIPES / SCRIPTS[0])])
    assert ended.value.code == 1
    (page,) = tmp_path.glob("outputs/rehearsal/*/page.md")
    assert "| SIGTERM saves | yes | status 0 |" in page.read_text()
    assert "| resume | **no** | from step 3 |" in page.read_text()
    assert pq.read_table(page.with_name("prompts.parquet")).num_rows == 16
