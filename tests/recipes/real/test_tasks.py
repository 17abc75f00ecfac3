"""Passages, arithmetic and search: what is held out, that every row can be graded, and what missing
data is told."""

from __future__ import annotations

import gzip
import json

import pyarrow.parquet as pq
import pytest

from core.errors import InputError
from recipes.real import arithmetic, passages, search
from recipes.real.prepare import TASKS, write_task
from recipes.search_r1.demonstrations import demonstrations
from recipes.search_r1.index.build import build_index
from recipes.search_r1.index.opening import make_retriever
from recipes.search_r1.index.passages import RetrieverOptions
from recipes.search_r1.search_loop import parse_action
from reward_scores import scorer_for

CITIES = [f"City{number}" for number in range(700)]


@pytest.fixture
def data_dir(tmp_path, monkeypatch):
    """A folder of public data: a question about every city, two of them about each of the first
    hundred."""
    folder = tmp_path / "data"
    (folder / "nq_open_oracle").mkdir(parents=True)
    (folder / "wiki_passages").mkdir()

    def example(city, question, answer):
        page = {
            "title": city,
            "text": f"{city} is a town. Its mayor is {answer}, who came from the coast.",
        }
        return {"question": question, "answers": [answer, f"Mayor {answer}"], "ctxs": [page]}

    examples = [
        example(city, f"who is the mayor of {city}", f"Name{at}") for at, city in enumerate(CITIES)
    ]
    examples += [
        example(city, f"who governs {city} today", f"Name{at}")
        for at, city in enumerate(CITIES[:100])
    ]
    examples.append({**examples[0], "ctxs": [{"title": "Long", "text": "word " * 101}]})
    with gzip.open(folder / passages.NQ_FILE, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in examples)
    others = [{"id": str(at), "contents": f'"Other{at}"\nnothing about anybody'} for at in range(5)]
    (folder / search.OTHER_FILE).write_text("".join(json.dumps(line) + "\n" for line in others))
    monkeypatch.setenv("DATA_DIR", str(folder))
    return folder


def rows(path):
    return pq.read_table(path).to_pylist()


def test_every_row_of_a_task_can_be_graded_and_the_files_repeat(data_dir, tmp_path, subtests):
    for task in TASKS:
        with subtests.test(task=task):
            first, again = (write_task(task, tmp_path / name) for name in ("one", "two"))
            assert [one.sha256 for one in first] == [one.sha256 for one in again]
            assert {"train", "test", "train_random", "train_shuffled"} <= {
                one.path.stem for one in first
            }
            for written in first:
                for line in rows(written.path)[:50]:
                    scorer, gold = (
                        scorer_for(line["data_source"]),
                        line["reward_model"]["ground_truth"],
                    )
                    assert scorer.problem(gold) is None
                    assert "response" not in line or scorer(line["response"], gold).value == 1


def test_no_page_is_in_two_splits_and_long_passages_are_left_out(data_dir):
    questions = passages.read_questions(passages.data_file(passages.NQ_FILE, passages.NQ_SOURCE))
    splits = passages.split_questions(questions)
    titles = [{question.title for question in chosen} for chosen in splits.values()]
    assert not titles[0] & titles[1] and not titles[0] & titles[2] and not titles[1] & titles[2]
    assert sum(map(len, splits.values())) == len(questions) == 800 and "Long" not in set().union(
        *titles
    )
    assert [
        passages.HELD_OUT <= len(splits["test"]) <= passages.HELD_OUT + 1,
        len(splits["train"]) > 150,
    ] == [True] * 2


def test_held_out_operands_are_in_no_other_split():
    splits = arithmetic.split_pairs()
    assert len({pair for pairs in splits.values() for pair in pairs}) == sum(
        map(len, splits.values())
    )
    test, train = (
        {tuple(sorted(line["extra_info"]["operands"])) for line in arithmetic.rows_of()[name]}
        for name in ("test", "train")
    )
    assert test <= set(splits["test"]) and not test & train


def test_the_ground_truth_is_the_result_of_the_operation():
    for line in arithmetic.rows_of()["train"][:500]:
        a, b = line["extra_info"]["operands"]
        value = a + b if line["extra_info"]["operation"] == "plus" else a - b
        assert line["reward_model"]["ground_truth"]["target"][0] == str(value) and value > 0
        assert arithmetic.words_of(a) in line["prompt"][0]["content"]


def test_missing_data_is_told_with_its_source(tmp_path, monkeypatch):
    monkeypatch.delenv("DATA_DIR", raising=False)
    with pytest.raises(InputError, match=r"DATA_DIR: is not set.*lost-in-the-middle"):
        write_task("passages", tmp_path)
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    with pytest.raises(InputError, match=r"DATA_DIR=.*has no nq_open_oracle"):
        write_task("passages", tmp_path / "out")
    (tmp_path / "nq_open_oracle").mkdir()
    (tmp_path / passages.NQ_FILE).write_bytes(b"half a file")
    with pytest.raises(InputError, match="take it anew from"):
        write_task("passages", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Characters:
    """A tokenizer whose tokens are characters."""

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(character) for character in text]}

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        return f"<user>{messages[-1]['content']}<assistant>"


def test_an_episode_is_two_turns_of_the_policy_with_the_gold_passage_between_them(
    data_dir, tmp_path
):
    search.write_corpus(tmp_path / "corpus.jsonl")
    build_index(tmp_path / "corpus.jsonl", tmp_path / "index")
    retriever = make_retriever(RetrieverOptions(index=tmp_path / "index", mmap=False))
    asked = search.rows_of()["to_demonstrate"][:20]
    lines = list(demonstrations(asked, retriever.retrieve, Characters(), topk=1, room=10_000))
    assert len(lines) > 15
    for line in lines:
        pieces, text = [], "".join(map(chr, line["response_ids"]))
        for character, written in zip(text, line["response_mask"], strict=True):
            if not pieces or pieces[-1][1] != written:
                pieces.append(["", written])
            pieces[-1][0] += character
        (ask, yes), (shown, no), (answer, also) = pieces
        assert (
            (yes, no, also) == (True, False, True)
            and ask.endswith("</search>")
            and answer.endswith("</answer>")
        )
        assert parse_action(ask).kind == "search" and "<information>" in shown
        gold = line["reward_model"]["ground_truth"]
        assert (
            scorer_for(search.DATA_SOURCE)(answer, gold).value == 1 and gold["target"][0] in shown
        )
        assert line["prompt"] == "".join(map(chr, line["prompt_ids"]))
