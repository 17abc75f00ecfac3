"""Passages that contradict each other: one knows what is now, a search finds it, and the first is out of date."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from core.config import compose
from core.data.parquet import ExampleFile
from core.tracking.run_manifest import ROOT
from recipes.lab.tokenizer import build_tokenizer
from recipes.lab.warm_start import IGNORED, as_row
from recipes.search_r1 import conflicts, knowledge, knowledge_model, main_search_r1
from recipes.search_r1.index.opening import make_retriever
from recipes.search_r1.index.passages import RetrieverOptions
from recipes.search_r1.search_loop import information, parse_action

FACT = re.compile(r"the (\w+) of (\w+) is( now| still) (\w+)\.")


@pytest.fixture(scope="module")
def base():
    return conflicts.draw(1)


@pytest.fixture(scope="module")
def search(base, tmp_path_factory):
    return knowledge_model.searcher(base, tmp_path_factory.mktemp("conflicts") / "kb")


@pytest.fixture(scope="module")
def words():
    return build_tokenizer(knowledge.ALPHABET, conflicts.WORDS)


def test_the_corpus_alone_decides(base):
    said: dict[tuple[str, str], list[tuple[bool, str]]] = {}
    for passage in base.passages():
        if found := FACT.search(passage["contents"]):
            relation, name, now, value = found.groups()
            said.setdefault((name, relation), []).append((now == " now", value))
    assert {fact: max(values)[1] for fact, values in said.items()} == base.facts
    for values in said.values():
        assert sum(now for now, _ in values) == 1
        assert len({value for _, value in values}) == len(values) == 1 + conflicts.DIFFICULTY


@pytest.mark.parametrize("difficulty", [0, 1, 2])
def test_difficulty_is_how_many_passages_are_out_of_date(difficulty):
    counts = [len(values) for values in conflicts.draw(3, difficulty).outdated.values()]
    assert {*counts} == {difficulty}
    assert conflicts.draw(3, difficulty) == conflicts.draw(3, difficulty)


def test_a_search_finds_all_that_is_said_and_the_first_is_out_of_date(base, search):
    asked = list(base.facts)[::5]
    found = search([f"{relation} {name}" for name, relation in asked])
    for (name, relation), passages in zip(asked, found, strict=True):
        read = [FACT.search(passage.contents) for passage in passages]
        assert {(hit[2], hit[1]) for hit in read} == {(name, relation)}
        assert [hit[3] for hit in read] == [" still", " still", " now"]
        assert [hit[4] for hit in read] == [*base.outdated[name, relation], base.facts[name, relation]]


def test_an_episode_is_its_tokens_and_a_hasty_one_reads_what_stands_first(base, search, words):
    question = knowledge.splits(base, 1, 10, 10)["train"][-1]
    encode = lambda text: words.encode(text, add_special_tokens=False, split_special_tokens=True)  # noqa: E731
    blocks = [information(found, 10**6, encode) for found in search(knowledge.queries(question, base))]
    assert all(words.decode(encode(block)) == block and len(encode(block)) <= 60 for block in blocks)
    ids, labels = as_row(question.prompt, knowledge.searching(question, base, blocks), words)
    written = words.decode([label for label in labels if label != IGNORED])
    assert written.endswith(f"<answer> {base.answer(question)}</answer>") and len(ids) <= 200
    *before, (answer, by_policy) = knowledge.hasty(question, base, blocks)
    assert by_policy and before == knowledge.searching(question, base, blocks)[:-1]
    assert parse_action(answer).content == FACT.search(blocks[-1])[4]
    fact = next(fact for fact, earlier in base.outdated.items() if earlier)
    block = f"Doc 1(Title: {fact[0]}) the {fact[1]} of {fact[0]} is still {base.outdated[fact][0]}."
    misled = knowledge.hasty(knowledge.Question(fact[0], (fact[1],)), base, [block])[-1][0]
    assert parse_action(misled).content == base.outdated[fact][0] != base.facts[fact]


def test_shares_of_the_mixture_are_the_recipes(words, monkeypatch):
    recipe = replace(conflicts.RECIPE, bases=1, questions_each=1000)
    right, mixture = knowledge_model.rows(recipe, words, conflicts.draw)
    texts = [words.decode([label for label in labels if label != IGNORED]) for _, labels in mixture]
    searched = sum("<search>" in text for text in texts) / len(texts)
    rambled = sum("?" in text for text in texts) / len(texts)
    assert len(right) == len(mixture) == 1000
    assert searched == pytest.approx(recipe.search_share + recipe.hasty_share, abs=0.05)
    assert rambled == pytest.approx(recipe.ramble_share, abs=0.04)


def test_files_are_written_and_an_answer_is_worth_a_little(tmp_path):
    knowledge.write(tmp_path, 1, train=20, test=10, draw=conflicts.draw)
    file, base = ExampleFile(tmp_path / "test.parquet"), conflicts.draw(1)
    rows = [file.example(number) for number in range(len(file))]
    assert {row.data_source for row in rows} == {conflicts.DATA_SOURCE}
    golds = [{"target": [base.answer(q)]} for q in knowledge.splits(base, 1, 20, 10)["test"]]
    assert [row.ground_truth for row in rows] == golds
    assert len((tmp_path / "corpus.jsonl").read_text().splitlines()) == len(base.passages()) > 2000


def test_the_studys_preset_pays_any_answer_a_little():
    config = compose("search_r1", ["preset=study_conflicts"], main_search_r1.HOOKS)
    assert config.reward_model.reward_kwargs["qa_em"]["format_score"] == pytest.approx(0.05)
    assert config.retriever.url is None and config.max_turns == 2


def test_processes_that_prepare_at_once_leave_one_index_which_a_run_may_be_reading(tmp_path):
    """It is made once; the next command keeps it, and one with other passages makes it anew."""
    command = "from recipes.search_r1 import conflicts; conflicts.prepare(())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [subprocess.Popen([sys.executable, "-c", command], cwd=tmp_path, env=environment) for _ in range(3)]
    assert [one.wait() for one in started] == [0, 0, 0]
    folder = tmp_path / conflicts.FOLDER
    index = folder / "index" / "bm25"
    made = {path.name: path.stat().st_ino for path in index.iterdir()}
    assert made
    knowledge_model.write_with_index(folder, 1, test=conflicts.TEST, draw=conflicts.draw)
    assert {path.name: path.stat().st_ino for path in index.iterdir()} == made
    knowledge_model.write_with_index(folder, 1, test=conflicts.TEST, draw=lambda seed: conflicts.draw(seed, 1))
    retriever = make_retriever(RetrieverOptions(index=folder / "index", mmap=False))
    name, relation = next(iter(conflicts.draw(1).facts))
    (found,) = retriever.retrieve([f"{relation} {name}"], 3)
    about = [passage for passage in found if f"the {relation} of {name}" in passage.contents]
    assert len(about) == 2  # of three that the former index held
