"""What a person sees of questions about pictures: one placeholder in their text, and thumbnails in the report."""

from __future__ import annotations

import json

from core.tracking.tracker import Tracker, read_jsonl
from core.types import Prompt
from core.vision.pictures import SHOWN, thumbnail
from tests.core.synthetic import configured
from tests.pictures import picture, pictures


def test_the_pictures_of_kept_questions_are_kept_once_and_small(tmp_path):
    media = [pictures(*[picture(i)] * (i % 10)) or None for i in range(100)]
    prompts = [Prompt(-1 - i, f"q{i}", (5,), (), "b", "s", media=media[i]) for i in range(100)]
    rows = [{"uid": f"q{i}", "data_source": "s", "input": "", "output": "a", "score": 0.0} for i in range(100)]
    tracker = Tracker(tmp_path, configured({"trainer.logger": ()}))
    for step in (5, 10):
        tracker.log_samples(step, rows, prompts)
        stored = json.loads((tmp_path / "pictures.json").read_text())["s"]
        asked = {row["uid"] for row in read_jsonl(tmp_path / "samples.jsonl") if int(row["uid"][1:]) % 10}
        assert stored.keys() == asked and len(stored["q8"]) == SHOWN == 8
        assert stored["q4"] == [thumbnail(picture(4))] * 4
    tracker.close("finished")
    Tracker(tmp_path, configured({"trainer.logger": ()})).close("finished")
    assert not (tmp_path / "pictures.json").exists()  # a new run begins without an old one's


def test_a_runs_questions_without_pictures_keep_none(tmp_path):
    tracker = Tracker(tmp_path, configured({"trainer.logger": ()}))
    tracker.log_samples(5, [{"input": "q", "output": "a", "score": 0.0}], [Prompt(-1, "q", (5,), (), "b", "s")])
    tracker.close("finished")
    assert not (tmp_path / "pictures.json").exists()
