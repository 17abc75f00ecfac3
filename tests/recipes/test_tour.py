"""The way of a prompt through the code stays short enough to be read."""

from recipes.lab import tour
from tests.faults.tiny_run import command, prepare


def test_a_prompt_passes_at_most_25_files_and_two_crossings(tmp_path, monkeypatch):
    prepare(tmp_path)
    factory = command(tmp_path, "grpo", 2, "trainer.backend=local", "trainer.val_before_train=False")
    settings = factory(tmp_path / "run")[3:]
    monkeypatch.setattr(tour, "SETTINGS", ())
    taken = tour.take_tour(*settings)
    way = taken.way()
    assert way[0] == "core/ray_trainer.py" and "core/data/parquet.py" in way[:9]
    assert way.index("core/learner/batching.py") < way.index("core/algorithm/losses.py")
    assert len(way) <= 25 and taken.crossings <= 2, "\n".join(taken.lines())
