"""The tour of a prompt names the files of the loop, in the order in which the prompt passes through them."""

from recipes.lab import tour
from tests.faults.tiny_run import command, prepare


def test_a_prompt_passes_the_loops_files_in_order(tmp_path, monkeypatch):
    prepare(tmp_path)
    factory = command(tmp_path, "grpo", 2, "trainer.backend=local", "trainer.val_before_train=False")
    settings = factory(tmp_path / "run")[3:]
    monkeypatch.setattr(tour, "SETTINGS", ())
    taken = tour.take_tour(*settings)
    way = taken.way()
    assert way[0] == "core/ray_trainer.py" and "core/data/parquet.py" in way[:9]
    assert way.index("core/learner/batching.py") < way.index("core/algorithm/losses.py")
