"""The labs of episodes: the warm start's episodes are those that the loops play."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from core.config.composition import compose
from core.engines.engine import SamplingParams
from core.rollout.agent_loop import Episode, EpisodeLimits, TrajectorySampler
from core.rollout.tool_agent import ToolAgentLoop
from core.rollout.tools import BaseTool, load_listed
from core.tracking.run_manifest import ROOT
from core.types import Prompt
from recipes.lab import guesses, sums
from recipes.lab.base_model import IGNORED
from recipes.lab.base_model import encode as encode_episode
from recipes.lab.tokenizer import build_tokenizer
from recipes.search_r1 import knowledge, knowledge_model
from recipes.search_r1.search_loop import INVALID, information, parse_action
from reward_scores import qa_em_format
from reward_scores.qa_em_format import PROMPT_END, structure_problem
from tests.scripted_engine import ScriptedEngine

TURNS = "actor_rollout_ref.rollout.multi_turn"


@pytest.fixture(scope="module")
def words():
    return build_tokenizer(knowledge.ALPHABET, knowledge.WORDS)


def encode(words, text):
    return words.encode(text, add_special_tokens=False, split_special_tokens=True)


# --- knowledge ---


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    base = knowledge.draw(1)
    return base, knowledge_model.searcher(base, tmp_path_factory.mktemp("kb") / "kb")


def test_the_right_query_finds_the_fact_first(searched):
    base, search = searched
    asked = list(base.facts)[::7]
    found = search([f"{relation} {name}" for name, relation in asked])
    for (name, relation), passages in zip(asked, found, strict=True):
        assert passages[0].contents == (
            f"{name}\nthe {relation} of {name} is {base.facts[name, relation]}."
        )
        assert len(passages) == 3


def test_the_warm_start_may_see_several_numbers_of_passages():
    recipe = knowledge_model.KnowledgeRecipe(bases=2, questions_each=3, passages=(1, 3))
    passages: dict[str, set[int]] = {}
    for base, _, blocks in knowledge_model.questions(recipe, recipe.new_tokenizer()):
        seen = passages.setdefault(str(base.facts), set())
        seen.update(block.count("Doc ") for block in blocks)
    assert list(passages.values()) == [{1}, {3}]


def test_episodes_with_thoughts_have_the_structure_that_the_format_reward_wants(searched):
    base, search = searched
    tokenizer = knowledge_model.THINKING.new_tokenizer()
    question = knowledge.splits(base, 1, 10, 10)["train"][-1]
    found = search(knowledge.queries(question, base))
    blocks = [
        information(passages, 10**6, lambda text: encode(tokenizer, text)) for passages in found
    ]
    thinking = knowledge.searching(question, base, blocks, thinks=True)
    rng = random.Random(0)
    wanted = {
        "thinking": (thinking, ""),
        "guess": (knowledge.guessing(rng, thinks=True), ""),
        "plain": (
            knowledge.searching(question, base, blocks),
            "Unexpected tag <search> in state start",
        ),
        "rambling": (knowledge.rambling(rng, thinks=True), "Unexpected content '"),
    }
    for stretches, problem in wanted.values():
        text = "".join(text for text, _ in stretches)
        found_problem = structure_problem(PROMPT_END + text) or ""
        assert found_problem.startswith(problem) and bool(found_problem) == bool(problem)
        for text, is_written in stretches:
            ids = encode(tokenizer, text)
            assert tokenizer.decode(ids) == text
            assert len(ids) <= 12 or not is_written  # max_response_length of the preset
    truth = {"target": [base.answer(question)]}
    text = "".join(text for text, _ in thinking)
    assert qa_em_format.score(text, truth, structure_format_score=0.2).value == 1.0


def test_every_word_of_an_episode_is_a_token_and_nothing_is_lost(searched, words):
    base, search = searched
    question = knowledge.splits(base, 1, 10, 10)["train"][-1]
    blocks = [
        information(passages, 10**6, lambda text: encode(words, text))
        for passages in search(knowledge.queries(question, base))
    ]
    for block in blocks:
        assert words.decode(encode(words, block)) == block and len(encode(words, block)) <= 40
    assert words.decode(encode(words, question.prompt)) == question.prompt
    assert len(encode(words, INVALID)) == 1
    ids, labels = encode_episode(
        question.prompt, knowledge.searching(question, base, blocks), words
    )
    written = words.decode([label for label in labels if label != IGNORED])
    queries = knowledge.queries(question, base)
    assert written == "".join(f"<search> {q}</search>" for q in queries) + (
        f"<answer> {base.answer(question)}</answer>"
    )
    assert parse_action(written).content == queries[0]
    assert len(ids) == len(labels) <= 160


# --- sums ---


def test_a_calling_answer_is_what_the_tool_agent_would_make_of_it():
    words = build_tokenizer(sums.ALPHABET, sums.WORDS)
    one = sums.RECIPE.splits(10, 10)["train"][0]
    (call, _), (said, by_policy), (answer, _) = sums.calling(one, words.eos_token)
    tool = load_listed(ROOT / "recipes" / "lab" / "tools.yaml", BaseTool)["calculator"]
    arguments = json.loads(call.removeprefix("<tool_call>").split("</tool_call>")[0])["arguments"]
    assert tool.problem(arguments) is None
    assert (
        said == f"<tool_response>{asyncio.run(tool.execute('0', arguments))}</tool_response>"
        and not by_policy
    )
    assert answer == f"#### {one.value}{words.eos_token}"
    ids, _ = encode_episode(one.prompt, sums.calling(one, words.eos_token), words)
    assert words.decode(ids) == one.prompt + call + said + answer


# --- guesses ---


def test_episodes_of_the_warm_start_are_what_the_tool_agent_plays_with_the_user(tmp_path):
    words, user = (
        build_tokenizer((*guesses.LETTERS, *"-?#"), (guesses.EARLIER, guesses.LATER)),
        "thinker",
    )
    words.chat_template = guesses.TEMPLATE
    (tmp_path / "users.yaml").write_text((ROOT / "recipes" / "lab" / "users.yaml").read_text())
    config = compose(
        "grpo", ["preset=lab_users", f"{TURNS}.interaction_config_path={tmp_path}/users.yaml"]
    )
    loop, unheard = ToolAgentLoop(config, words), random.Random(2)
    for one in guesses.RECIPE.splits()["test"][:40]:
        for way in (list(guesses.halving(one)), list(guesses.deaf(one, unheard))):
            row = guesses.RECIPE.row(one, "test", 0)
            said = [f"#{guesses.LETTERS[guess]}" for guess in way]
            ids = tuple(encode(words, one.prompt))
            asked = Prompt(
                0,
                "u",
                ids,
                row["prompt"],
                guesses.LETTERS[one.secret],
                "lab/guesses",
                row["extra_info"],
            )
            engine, sampling = (
                ScriptedEngine(words, lambda _, left=said: left.pop(0)),
                SamplingParams(max_tokens=24),
            )
            episode = Episode(
                asked,
                0,
                sampling,
                EpisodeLimits(24, 32),
                TrajectorySampler(engine, words, run_seed=1),
            )
            asyncio.run(loop.run(episode))
            trajectory = episode.trajectory()
            warm, labels = encode_episode(
                one.prompt, guesses.episode(one, iter(way), words.eos_token), words
            )
            assert [*ids, *trajectory.response_ids.tolist()] == warm
            assert trajectory.response_mask.tolist() == [
                label != IGNORED for label in labels[len(ids) :]
            ]
            assert trajectory.user_scores[-1] == (way[-1] == one.secret) and not any(
                trajectory.user_scores[:-1]
            )
            assert row["extra_info"]["interaction_kwargs"]["name"] == user and not said


# --- the warm start ---
