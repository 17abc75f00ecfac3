"""The tour of a prompt names the files of the loop, in the order in which the prompt passes through them."""

from recipes.lab import tour
from tests.faults.tiny_run import command, prepare


def test_a_prompt_passes_the_loops_files_in_order(tmp_path, monkeypatch):
    prepare(tmp_path)
    factory = command(tmp_path, "grpo", 2, "trainer.backend=local", "trainer.val_before_train=False")
    monkeypatch.setattr(tour, "SETTINGS", ())
    files = tour.visited(*factory(tmp_path / "run")[3:])
    assert files[0] == "core/ray_trainer.py" and "core/data/parquet.py" in files[:9]
    assert files.index("core/rollout/collect.py") < files.index("core/algorithm/losses.py")
    assert all(tour.purpose(file) for file in files)
