"""The countdown lab: questions, attempts and answers, the warm start's mixture, and what the scorer makes of them."""

from __future__ import annotations

import collections
import dataclasses
import random

import pytest

from core.config import compose
from recipes.lab import countdown, countdown_model
from recipes.lab.base_model import IGNORED, BaseModelError
from recipes.lab.countdown import Countdown
from recipes.lab.countdown_model import CountdownRecipe, build, prepare, warm_answer
from recipes.lab.tokenizer import build_tokenizer
from reward_scores.countdown import score

QUESTION = Countdown((3, 5, 8), 6)
SMALL = CountdownRecipe(
    hidden_size=16, intermediate_size=16, layers=1, heads=2, batch_size=4, steps=2, warmup_steps=1, loss_bound=99.0,
    test_numbers=15,
)  # fmt: skip


def graded(question: Countdown, text: str) -> float:
    return score(text, {"target": question.target, "numbers": list(question.numbers)}, None, format_score=0.0).value


def test_an_attempt_shows_running_totals_and_the_scorer_reads_the_answer_alone():
    assert QUESTION.prompt == "358=x=" and countdown.letter(6) == "x"
    assert QUESTION.solutions == ["-+"] and QUESTION.attempt("-+") == "-5p+8x;"
    assert QUESTION.answer("-+") == "<answer>3-5+8</answer>"
    for signs in countdown.PATTERNS:
        for tries in ("", QUESTION.attempt("++")):
            assert graded(QUESTION, tries + QUESTION.answer(signs)) == float(signs == "-+")
    assert graded(QUESTION, QUESTION.attempt("-+")) == 0.0, "an attempt is no answer"
    assert graded(QUESTION, "<answer>3</answer>") == 0.0


def test_letters_cover_every_total():
    extremes = ((1, 9, 9), (9, 9, 9))
    reached = {t for numbers in extremes for signs in countdown.PATTERNS for t in countdown.totals(numbers, signs)}
    assert (min(reached), max(reached)) == (-17, 27) and len(set(countdown.TOTALS)) == 45
    assert countdown.letter(-17) == "a" and countdown.letter(27) == "S"


def test_splits_share_no_numbers_in_the_same_order_and_every_question_can_be_solved():
    splits = countdown.splits(150, seed=1)
    held, trained = ({question.numbers for question in splits[name]} for name in ("test", "train"))
    assert len(held) == 150 and len(trained) == 9**3 - 150 and not held & trained
    every = splits["test"] + splits["train"]
    assert len(set(every)) == len(every) and len(splits["test"]) > 350
    for question in every[::3]:
        assert question.solutions and question.target >= 0
        assert all(graded(question, question.answer(signs)) == 1.0 for signs in question.solutions)
    assert countdown.splits(150, seed=1) == splits != countdown.splits(150, seed=2)


def test_the_mixture_searches_hurries_guesses_and_goes_on_without_end():
    recipe, rng = CountdownRecipe(search_share=0.3, hasty_share=0.3, endless_share=0.2), random.Random(0)
    kinds: collections.Counter[str] = collections.Counter()
    for question in rng.choices(countdown.splits(10, 1)["train"], k=4000):
        text, ends = warm_answer(question, recipe, rng)
        tries = text.split("<answer>")[0].split(";")[:-1]
        if not ends:
            kinds["endless"] += 1
            assert "<answer>" not in text and len(set(tries)) == 1
        elif not tries:
            kinds["guess"] += 1
        elif graded(question, text) and len(tries) > 2:
            kinds["search"] += 1
            assert len(set(tries)) == len(tries)
    assert kinds["endless"] == pytest.approx(800, abs=100) and kinds["guess"] == pytest.approx(800, abs=100)
    assert kinds["search"] > 300


def test_labels_are_the_answer_and_its_end_which_an_endless_one_does_not_have():
    tokenizer, rng = build_tokenizer(countdown.ALPHABET, countdown.TAGS), random.Random(3)
    recipe = dataclasses.replace(SMALL, longest=20)
    ids, labels = countdown_model.batch([QUESTION] * 200, recipe, tokenizer, rng)
    assert ids.shape == labels.shape == (200, countdown.PROMPT_CHARS + 20)
    assert (labels[:, : countdown.PROMPT_CHARS] == IGNORED).all()
    ended = 0
    for row, label in zip(ids, labels, strict=True):
        text = tokenizer.decode(label[label != IGNORED])
        assert tokenizer.decode(row, skip_special_tokens=True) == QUESTION.prompt + text.removesuffix("<eos>")
        ended += text.endswith("</answer><eos>")
    assert 20 < ended < 180


def test_tags_are_tokens_also_after_loading_beside_the_model(tmp_path):
    from transformers import AutoTokenizer

    folder = build(tmp_path, SMALL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = QUESTION.prompt + QUESTION.attempt("-+") + QUESTION.answer("-+")
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == countdown.PROMPT_CHARS + countdown.ATTEMPT_CHARS + countdown.ANSWER_TOKENS - 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert build(tmp_path, SMALL) == folder and (tmp_path / "current").resolve() == folder
    assert dataclasses.replace(SMALL, steps=3).digest != SMALL.digest
    with pytest.raises(BaseModelError, match="did not learn"):
        build(tmp_path, dataclasses.replace(SMALL, loss_bound=0.01))


def test_the_study_s_preset_trains_on_what_prepare_makes(tmp_path):
    from core.ray_trainer import RayPPOTrainer

    assert issubclass(RayPPOTrainer, RayPPOTrainer)
    base = prepare(tmp_path, SMALL)
    config = compose("dapo", ["preset=study"])
    assert config.actor_rollout_ref.model.path == f"./{countdown_model.FOLDER}/base/current"
    assert config.data.train_files == (f"./{countdown_model.FOLDER}/train.parquet",)
    small = [
        *("preset=study", f"data.train_files={tmp_path}/train.parquet", f"data.val_files={tmp_path}/test.parquet"),
        *(f"actor_rollout_ref.model.path={base}", f"trainer.default_local_dir={tmp_path}/run", "trainer.cpu_threads=1"),
        *("trainer.total_training_steps=1", "data.train_batch_size=2", "data.gen_batch_size=2"),
        *("actor_rollout_ref.rollout.n=2", "algorithm.filter_groups.enable=False"),
    ]
    RayPPOTrainer(compose("dapo", small)).init_workers().fit()
    assert "val-core/countdown/acc/mean@1" in (tmp_path / "run" / "metrics.jsonl").read_text()
