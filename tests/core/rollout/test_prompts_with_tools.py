"""What is known of tools and templates before a run begins: lengths with schemas, roles, and what a dry run reports."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace

import pytest

from core.command_line import prepare
from core.config import compose
from core.data.prompts import PromptStream, agent_names
from core.engines import SamplingParams
from core.errors import InputError
from core.rollout.agent_loop import Episode, Limits, check_examples, make_agent_loop
from core.rollout.tool_agent import ToolAgentLoop
from tests.core.data.templates import CHATML, FAMILIES, GEMMA, LLAMA3, PHI3
from tests.core.rollout.test_tool_agent import CALCULATOR, MULTI, TEMPLATE, tokenizer
from tests.row_files import data_config, plain_row, write_parquet
from tests.scripted_engine import ScriptedEngine
from tests.tiny import tiny_tokenizer

NO_TOOL = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools!') }}{% endif %}{{ m.content }}"
    "{% endfor %}"
)
USERS = "interaction:\n  - name: checker\n    class_name: tests.core.rollout.test_users:Checker\n"


def settings(folder, *options, users=False):
    (folder / "tools.yaml").write_text(CALCULATOR)
    (folder / "users.yaml").write_text(USERS)
    named = f"interaction_config_path={folder}/users.yaml" if users else f"tool_config_path={folder}/tools.yaml"
    return [f"{MULTI}.enable=True", f"{MULTI}.{named}", *options]


def loop_of(folder, *options, words=None, users=False):
    return ToolAgentLoop(compose("grpo", settings(folder, *options, users=users)), words or tokenizer())


def chat(text, role="user"):
    return [{"role": role, "content": text}]


def rows(folder, *prompts, **changes):
    return write_parquet(folder / "rows.parquet", [plain_row(n, prompt=p, **changes) for n, p in enumerate(prompts)])


def of_episode(loop, prompt):
    episode = Episode(
        prompt,
        0,
        SamplingParams(max_tokens=4),
        Limits(4, 4),
        engine=ScriptedEngine(loop.tokenizer, lambda _: "2"),
        tokenizer=loop.tokenizer,
        run_seed=1,
    )
    asyncio.run(loop.run(episode))
    return episode.trajectory().prompt_ids.tolist()


@pytest.mark.parametrize("write", [chat, str])
@pytest.mark.parametrize("format", ["hermes", "react"])
def test_lengths_count_the_schemas_as_the_episode_does(tmp_path, format, write):
    words = tokenizer()
    words.chat_template = CHATML.replace("{% for m", "{{ tools | tojson if tools }}{% for m", 1)
    loop = loop_of(tmp_path, f"{MULTI}.format={format}", "data.max_prompt_length=4000", words=words)
    files = rows(tmp_path, write("1+1"), write("1+1" * 40), write("2"))
    given = dict(train_files=files, shuffle=False, max_prompt_length=4000)
    stream = PromptStream(data_config(**given), words, 1, word=loop.worded)
    lengths = stream.files.measured[str(files)].rows["length"].tolist()
    prompts = [stream.prompt(n) for n in range(3)]
    assert lengths == [len(of_episode(loop, prompt)) for prompt in prompts]
    assert all(length > len(prompt.token_ids) + 100 for length, prompt in zip(lengths, prompts, strict=True))
    limit = dict(given, max_prompt_length=lengths[1] - 1)
    kept = PromptStream(data_config(**limit, filter_overlong_prompts=True), words, 1, word=loop.worded)
    assert len(kept) == 2
    with pytest.raises(InputError, match="a prompt with its tools' schemas is longer than data.max_prompt_length"):
        PromptStream(data_config(**limit), words, 1, word=loop.worded)


def test_rows_that_choose_their_tools_are_counted_with_those(tmp_path):
    loop = loop_of(tmp_path)
    same, alone = (plain_row(n, prompt=chat("1+1")) for n in range(2))
    alone["extra_info"] = {"tool_selection": []}
    same["extra_info"] = {"tool_selection": None}
    files = write_parquet(tmp_path / "rows.parquet", [same, alone])
    stream = PromptStream(data_config(train_files=files, shuffle=False), tokenizer(), 1, word=loop.worded)
    with_tool, without = stream.files.measured[str(files)].rows["length"].tolist()
    assert with_tool - without == len("<tool calculator>\n") and with_tool == len(of_episode(loop, stream.prompt(0)))


def test_a_prompt_is_cut_as_it_is_configured(tmp_path):
    loop = loop_of(tmp_path, "data.max_prompt_length=30", "data.truncation=left")
    files = rows(tmp_path, chat("9" * 100))
    config = data_config(train_files=files, max_prompt_length=30, truncation="left")
    prompt = PromptStream(config, tokenizer(), 1, word=loop.worded).prompt(0)
    assert of_episode(loop, prompt) == list(prompt.token_ids) and len(prompt.token_ids) == 30
    late = loop_of(tmp_path, "data.max_prompt_length=30")
    with pytest.raises(ValueError, match=f"uid={prompt.uid}, with its tools' schemas: a prompt of"):
        of_episode(late, prompt)


def test_names_of_loops_are_known_before_the_data_is_read(tmp_path):
    files = rows(tmp_path, "a", agent_name="tool_agent")
    config = data_config(train_files=[files, str(tmp_path / "none.parquet")], val_files=None)
    assert agent_names(config) == {"tool_agent"} and agent_names(config, training=False) == set()
    staged = data_config(curriculum=[{"files": files}], val_files=())
    assert agent_names(staged) == {"tool_agent"}
    loop = make_agent_loop(compose("grpo", settings(tmp_path)), tokenizer(), {"tool_agent"})
    prompt = PromptStream(data_config(train_files=files), tokenizer(), 1, word=loop.worded).prompt(0)
    with pytest.raises(InputError, match="names an agent loop that is not among"):
        check_examples(loop, [replace(prompt, agent_name="nobody")])


@pytest.mark.parametrize(
    ("template", "users", "options", "reason"),
    [
        (NO_TOOL, False, (), "as a message of role 'tool': no tools!"),
        (GEMMA, False, (), "as a message of role 'tool': roles must alternate"),
        (PHI3, False, (), "as a message of role 'tool': it writes 0 of the texts"),
        (TEMPLATE, False, (f"{MULTI}.max_parallel_calls=3",), None),
        (
            TEMPLATE.replace("m in messages", "m in messages[:3]"),
            False,
            (f"{MULTI}.max_parallel_calls=3",),
            "and 2 more",
        ),
        (LLAMA3, False, (), None),
        (GEMMA, False, (f"{MULTI}.format=react",), None),
        (GEMMA, True, (), None),
        (TEMPLATE.replace("m['content']", "m['content'] if m.role != 'user'"), True, (), "a simulated user's turn"),
    ],
)
def test_a_template_without_use_for_a_turn_is_refused_at_the_start_and_by_a_dry_run(
    tmp_path, monkeypatch, capsys, template, users, options, reason
):
    words = tiny_tokenizer()
    words.chat_template = template
    folder = tmp_path / "model"
    words.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    model = f"actor_rollout_ref.model.path={folder}"
    monkeypatch.setenv("DRY_RUN", "1")
    with pytest.raises(SystemExit) as ended:
        prepare("grpo", settings(tmp_path, model, *options, users=users))
    dry = capsys.readouterr().err
    assert ended.value.code == (0 if reason is None else 2), dry
    if reason is None:
        return loop_of(tmp_path, model, *options, words=words, users=users).close()
    with pytest.raises(InputError) as error:
        loop_of(tmp_path, model, *options, words=words, users=users)
    (line,) = error.value.problems
    assert line in dry.splitlines() and reason in line
    assert line.startswith(f"{model}: the chat template cannot write ") and "custom_chat_template" in line


@pytest.mark.parametrize("name", FAMILIES)
def test_a_dry_run_renders_as_transformers_does(name):
    from core.data.chat_frames import rendered, template_of
    from core.rollout import template_check

    words = tiny_tokenizer()
    words.chat_template = FAMILIES[name].template
    talk = [*chat("a <&> b"), *chat("c\n", "assistant"), *chat(" d ")]
    names = {"eos_token": words.eos_token}
    own = rendered(template_check._render(words.chat_template, names), talk, add_generation_prompt=True)
    assert own == rendered(template_of(words, {}), talk, add_generation_prompt=True)


def test_a_tokenizer_with_a_template_of_its_own_for_tools_is_read(tmp_path):
    from core.rollout import template_check

    named = [{"name": "default", "template": NO_TOOL}, {"name": "tool_use", "template": TEMPLATE}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "eos_token": {"content": "x"}}))
    model = compose("grpo", [f"actor_rollout_ref.model.path={tmp_path}"]).actor_rollout_ref.model
    assert template_check._template(model, tools=True) == (TEMPLATE, {"eos_token": "x"})
    assert template_check._template(model, tools=False)[0] == NO_TOOL
    words = tiny_tokenizer()
    words.chat_template = {one["name"]: one["template"] for one in named}
    loop_of(tmp_path, words=words).close()


def test_a_role_that_the_template_leaves_out_is_a_problem_of_the_data(tmp_path):
    words = tiny_tokenizer()
    words.chat_template = PHI3
    files = rows(tmp_path, chat("x"), [*chat("be brief", "developer"), *chat("x")])
    with pytest.raises(InputError, match=r"leaves out the text of a message in 1 row \(1: role developer\)"):
        PromptStream(data_config(train_files=files), words, 1)


def test_a_template_that_does_not_tell_of_tools_is_reported(tmp_path, caplog):
    words = tokenizer()
    words.chat_template = CHATML
    with caplog.at_level(logging.WARNING):
        loop_of(tmp_path, words=words)
        assert "does not write the schemas of tools (calculator)" in caplog.text
        caplog.clear()
        loop_of(tmp_path, f"{MULTI}.format=react", words=words)
        loop_of(tmp_path)
    assert not caplog.text
