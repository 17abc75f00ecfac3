"""The tour of a prompt names the files that a step really enters, at most twenty of them."""

from recipes.lab import tour
from tests.faults.tiny_run import command, prepare


def test_a_prompt_passes_the_files_of_the_tour(tmp_path, monkeypatch):
    prepare(tmp_path)
    factory = command(
        tmp_path, "grpo", 2, "trainer.backend=local", "trainer.val_before_train=False"
    )
    monkeypatch.setattr(tour, "SETTINGS", ())
    files = tour.visited(*factory(tmp_path / "run")[3:])
    of_lab = {"reward_scores/hops.py"}  # the scorer of the lab's task
    assert not tour.STATIONS.keys() - of_lab - {*files} and len(tour.STATIONS) <= 20
    assert files.index("core/rollout/collect.py") < files.index("core/algorithm/losses.py")
