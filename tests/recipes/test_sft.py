"""Supervised fine-tuning: masks made where tokens are made, the likelihood, resuming, rejection
sampling."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from core import evaluate
from core.answers import questions_hash
from core.config import convert
from core.config.composition import compose, examine
from core.data.prompts import question_hash
from core.errors import InputError
from core.learner.models import load_policy
from core.ray_trainer import RayPPOTrainer
from recipes.sft import demonstration_files, rejection
from recipes.sft.config_schema import DemonstrationConfig
from recipes.sft.demonstration_files import DemonstrationFiles
from recipes.sft.demonstrations import Demonstration, DemonstrationError, Writer
from recipes.sft.sft_trainer import RaySFTTrainer
from tests.core.rollout.test_tool_agent import tokenizer as tool_tokenizer
from tests.recipes.sft_data import (
    TEMPLATE,
    chats,
    configured,
    learner_gradients,
    prepare,
    settings,
    tokenizer,
    write_rows,
)

EOS = 1


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("sft"))


def writer(**template) -> Writer:
    return Writer(tokenizer(), template, {EOS})


def trained_text(one: Demonstration) -> str:
    """What is trained on, each stretch in brackets."""
    found, before, tok = "", False, tokenizer()
    for token, trained in zip(one.ids.tolist(), one.mask.tolist(), strict=True):
        found += {(False, True): "[", (True, False): "]"}.get((before, trained), "") + tok.decode(
            [token]
        )
        before = trained
    return found + "]" * before


# --- tokens and masks ---


def test_the_assistants_turns_are_trained_on_up_to_their_end():
    turns = [
        ("system", "be"),
        ("user", "a"),
        ("assistant", "bc"),
        ("user", "d"),
        ("assistant", "e"),
    ]
    chat = [{"role": role, "content": content} for role, content in turns]
    one = writer().chat(chat)
    expected = (
        "<bos>system: be\n<bos>user: a\n<bos>assistant: [bc<eos>]\n<bos>user: "
        "d\n<bos>assistant: [e<eos>]\n"
    )
    assert trained_text(one) == expected
    plain = tokenizer().apply_chat_template(
        chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert one.ids.tolist() == plain["input_ids"] and one.mask.tolist() == [
        bool(m) for m in plain["assistant_masks"]
    ]
    assert one.ids.dtype == np.int32 and one.mask.dtype == np.bool_


def test_an_answer_to_a_chat_ends_as_the_template_ends_it_and_to_a_string_with_the_end_of_sequence():
    assert trained_text(writer().answer([{"role": "user", "content": "a"}], "bc")) == (
        "<bos>user: a\n<bos>assistant: [bc<eos>]\n"
    )
    assert trained_text(writer().answer("a=", "bc")) == "a=[bc<eos>]"


def test_a_template_that_writes_earlier_turns_anew_is_refused():
    forgets = (
        "{% for m in messages %}{{ m['role'] if loop.last else '-' }}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(DemonstrationError, match="writes earlier turns anew"):
        writer(chat_template=forgets).chat(chats(1, seed=3)[0] + chats(1)[0])


def test_ids_of_a_policy_are_kept_with_their_mask_and_those_of_another_tokenizer_are_refused():
    ids = {"prompt_ids": [5, 6], "response_ids": [7, 8, 9], "response_mask": [True, False, True]}
    text = tokenizer().decode([5, 6])
    one = writer().written(text, ids)
    assert one.ids.tolist() == [5, 6, 7, 8, 9] and one.mask.tolist() == [
        False,
        False,
        True,
        False,
        True,
    ]
    with pytest.raises(DemonstrationError, match="not those of this tokenizer"):
        writer().written("other", ids)


TOOLS = "{% for t in tools or [] %}{{ '<bos>tool ' + t.name + t.keys()|join(' ') }}{% endfor %}"
THINKING = "add_generation_prompt %}{{ 'fast ' if enable_thinking is false else '' }}"
TOOLS_TEMPLATE = TOOLS + TEMPLATE.replace("add_generation_prompt %}", THINKING)


def read_rows(tmp_path, rows, template=TOOLS_TEMPLATE, **keys) -> list[str]:
    """The texts of demonstrations of a file of these rows."""
    config = DemonstrationConfig(apply_chat_template_kwargs={"chat_template": template}, **keys)
    files = DemonstrationFiles(config, tokenizer(), {EOS})
    files.load(
        [str(write_rows(tmp_path / "rows.parquet", rows))],
        lambda sizes: [range(size) for size in sizes],
    )
    return [tokenizer().decode(one.ids) for one in files.measured]


def test_questions_of_demonstrations_are_those_that_a_validation_compares(tmp_path):
    asked = [{"role": "user", "content": "a"}]
    chats = [
        {
            "messages": [
                *asked,
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
            ]
        }
    ]
    answers = [{"prompt": asked, "response": "b"}, {"prompt": "a", "response": "b"}]
    for rows in (chats, *([row] for row in answers)):
        path = str(write_rows(tmp_path / "rows.parquet", rows))
        config = DemonstrationConfig(apply_chat_template_kwargs={"chat_template": TEMPLATE})
        files = DemonstrationFiles(config, tokenizer(), {EOS})
        files.load([path, path], lambda sizes: [range(size) for size in sizes])
        assert len(files) == 2 and files.questions() == {path: [question_hash(asked)] * 2}


def test_a_call_is_trained_on_with_its_own_arguments_as_values(tmp_path):
    call = "{{ c.function.name }}{{ c.function.arguments | tojson }}"
    template = TEMPLATE.replace("m['content']", "(m['content'] or '')").replace(
        "{% generation %}",
        "{% generation %}{% for c in m.tool_calls or [] %}" + call + "{% endfor %}",
    )
    calls = [("f", {"city": "Paris"}), ("g", {"sum": "1+1"})]
    rows = []
    for name, arguments in calls:
        for written in (arguments, json.dumps(arguments)):
            function = {"name": name, "arguments": written}
            answer = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
            rows.append({"messages": [{"role": "user", "content": "a"}, answer]})
    expected = [f"assistant: {name}{json.dumps(arguments)}<eos>" for name, arguments in calls]
    for kind in (0, 1):  # structs, JSON text
        shown = read_rows(tmp_path, rows[kind::2], template)
        assert [text.rpartition("<bos>")[2].rstrip() for text in shown] == expected


def test_columns_of_tools_and_thinking_are_arguments_of_the_chat_template(tmp_path):
    """verl renders both; a column that is left out trains on another prompt than the file's author
    meant."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [
        {"messages": chat, "fns": [{"name": "dig", "depth": 1, "width": None}]},
        {"messages": chat, "fns": [{"name": "fly", "depth": None, "width": 2}]},
        {"messages": chat, "fns": None},
    ]
    dig, fly, none = read_rows(tmp_path, rows, tools_key="fns")
    # The fields that parquet added are gone
    assert "tool dig" in dig and "depth" in dig and "width" not in dig
    assert "tool fly" in fly and "depth" not in fly and "tool" not in none
    (text,) = read_rows(tmp_path, [{"messages": chat, "tools": json.dumps([{"name": "dig"}])}])
    assert "tool dig" in text
    prompts = [{"prompt": chat[:1], "response": "b", "enable_thinking": on} for on in (True, False)]
    # The column reached the template
    with pytest.raises(InputError, match="begins an answer with 'fast "):
        read_rows(tmp_path, prompts)
    for row, told in (
        ({"messages": chat, "tools": "dig"}, "is no JSON"),
        (
            {"prompt": "a", "response": "b", "tools": "[{}]"},
            "a plain prompt goes through no chat template",
        ),
    ):
        with pytest.raises(InputError, match=told):
            read_rows(tmp_path, [row])
    with pytest.raises(InputError, match="the chat template does not write them"):
        read_rows(tmp_path, rows, TEMPLATE, tools_key="fns")


@pytest.mark.parametrize(
    ("line", "schedule"),
    [
        (
            ["model.path=org/name", "optim.lr_warmup_steps_ratio=0.2"],
            ("constant", 0.2, (0.9, 0.999)),
        ),
        (
            ["engine=fsdp", "optim=fsdp", "optim.lr_scheduler_type=cosine"],
            ("cosine", 0.0, (0.9, 0.999)),
        ),
        (["data.pad_mode=no_padding", "optim.betas=[0.9,0.95]"], ("constant", 0.0, (0.9, 0.95))),
        (["engine.strategy=fsdp2", "optim.warmup_style=cosine"], ("cosine", 0.0, (0.9, 0.999))),
        (
            ["model.partial_pretrain=org/name", "optim.lr_warmup_steps_ratio=0.2"],
            ("cosine", 0.2, (0.9, 0.95)),
        ),
        (["actor_rollout_ref.model.path=org/name"], ("cosine", 0.1, (0.9, 0.95))),
    ],
)
def test_a_line_of_verls_later_trainer_gets_its_schedule(line, schedule):
    found = examine("sft", line)
    optim = found.config.actor_rollout_ref.actor.optim
    assert (
        not found.problems
        and (optim.lr_scheduler_type, optim.lr_warmup_steps_ratio, optim.betas) == schedule
    )


@pytest.mark.parametrize("spelling", ["data.tools_key", "data.multiturn.tools_key"])
def test_the_names_of_these_columns_are_verls(spelling):
    line = [f"{spelling}=fns", "data.multiturn.enable_thinking_key=slow"]
    data = examine("sft", line).config.data
    assert (data.tools_key, data.enable_thinking_key) == ("fns", "slow")


# --- files ---


def loaded(path: Path, *overrides: str) -> list[Demonstration]:
    config = compose("sft", overrides)
    found = DemonstrationFiles(config.data, tokenizer(), {EOS})
    found.load([str(path)], lambda sizes: [range(size) for size in sizes])
    return found.measured


@pytest.mark.parametrize(
    ("template", "warns"), [(TEMPLATE, False), (TEMPLATE.replace(" + '<eos>'", ""), True)]
)
def test_turns_without_an_end_are_told_before_training(template, warns, tmp_path, caplog):
    with_template = tokenizer()
    with_template.chat_template = template
    path = write_rows(tmp_path / "x.parquet", [{"messages": chat} for chat in chats(3)])
    DemonstrationFiles(compose("sft", ()).data, with_template, {EOS}).load(
        [str(path)], lambda _: [range(3)]
    )
    assert ("would not learn to stop" in caplog.text) == warns


def test_every_bad_row_is_named_with_its_rule_before_a_model_loads(tmp_path):
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    empty, long = ({"role": "assistant", "content": content} for content in (None, "b" * 99))
    rows = [[user, assistant], [user], [assistant, user], [user, empty], [], [user, long]]
    path = write_rows(tmp_path / "x.parquet", [{"messages": messages} for messages in rows])
    limits = ("data.max_prompt_length=32", "data.max_response_length=32")
    with pytest.raises(InputError) as refused:
        loaded(path, *limits)
    lines = "\n".join(refused.value.problems)
    assert f"{path}: a chat has no assistant turn in 1 row (1); leave the row out" in lines
    assert "a chat begins with the assistant in 1 row (2)" in lines
    assert "messages must hold text (images are not supported) in 1 row (3)" in lines
    assert "messages must be a list of messages, and not empty in 1 row (4)" in lines
    assert (
        "longer than data.max_prompt_length + data.max_response_length=64 in 1 row (5: 122 tokens)"
    ) in lines
    assert len(refused.value.problems) == 5
    good = write_rows(tmp_path / "y.parquet", [{"messages": rows[0]}, {"messages": rows[5]}])
    assert [len(one) for one in loaded(good, *limits, "data.filter_overlong_prompts=True")] == [24]
    whole, right, left = (
        loaded(good, *limits, *change)
        for change in (
            ["data.max_response_length=200"],
            ["data.truncation=right"],
            ["data.truncation=left"],
        )
    )
    assert [len(one) for one in right] == [len(one) for one in left] == [24, 64]
    assert (right[1].ids == whole[1].ids[:64]).all() and (left[1].ids == whole[1].ids[-64:]).all()
    assert (left[1].mask[1:] == whole[1].mask[-63:]).all() and not left[1].mask[0]


def test_a_file_that_cannot_be_trained_on_is_refused(tmp_path, subtests):
    ids = {"response_ids": [6], "response_mask": [True], "prompt": tokenizer().decode([5])}
    rows = [{"prompt_ids": [5], **ids}, {"prompt_ids": None, **ids}]
    with pytest.raises(InputError, match=r"prompt_ids is null in 1 row \(1\)"):
        loaded(write_rows(tmp_path / "null.parquet", rows))
    for row, says in [
        ({"text": "x"}, "has neither chats nor answers"),
        ({"prompt": "x", "response": " "}, "response must be text, and not empty"),
        ({"prompt": "", "response": "x"}, "has no prompt"),
        (
            {"prompt": '[{"role": "user", "content": "hi"}]', "response": "yo"},
            "prompt must not be a chat that was written as text",
        ),
        (
            {"prompt": [{"role": "user", "content": "a"}], "response": "b", "enable_thinking": "f"},
            "enable_thinking must be true or false, not 'f'",
        ),
        (
            {
                "prompt_ids": [5],
                "response_ids": [6],
                "response_mask": [False],
                "prompt": tokenizer().decode([5]),
            },
            "nothing of a row is trained on",
        ),
    ]:
        with subtests.test(row=row, says=says), pytest.raises(InputError, match=says):
            loaded(write_rows(tmp_path / "x.parquet", [row]))


def test_pictures_are_not_left_out_unnoticed(tmp_path):
    row = {"prompt": "x", "response": "y", "images": [{"bytes": b"x", "path": None}]}
    with pytest.raises(InputError, match=r"column 'images' \(data.image_key\) holds pictures"):
        loaded(write_rows(tmp_path / "x.parquet", [row, {**row, "images": None}]))
    for none in (None, []):
        rows = [{**row, "images": none}]
        assert len(loaded(write_rows(tmp_path / "y.parquet", rows))) == 1


# --- the objective ---


def plain_gradients(module, demonstrations) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean over all trained tokens of -log p, each demonstration alone, by transformers and
    nothing else."""
    total, loss = sum(int(one.mask.sum()) for one in demonstrations), 0.0
    for one in demonstrations:
        ids, labels = torch.from_numpy(one.ids).long(), torch.from_numpy(one.ids).long()
        labels[~torch.from_numpy(one.mask)] = -100
        logits = module(input_ids=ids[None]).logits[0]
        loss = (
            loss
            + F.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum") / total
        )
    module.zero_grad()
    loss.backward()
    return float(loss.detach()), {
        name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float64, 1e-7), (torch.float32, 1e-5)], ids=["fp64", "fp32"]
)
def test_loss_and_gradients_are_those_of_plain_transformers(packed, dtype, near, files):
    layout = (f"actor_rollout_ref.model.use_remove_padding={packed}", "data.train_batch_size=9")
    config = configured(files, *layout, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=192")
    demonstrations = [writer().chat(chat) for chat in chats(9, seed=5)]
    loss, gradients, metrics = learner_gradients(config, demonstrations, dtype)
    assert not [name for name in metrics if name.startswith("rollout_corr")]  # no engine wrote them
    assert metrics["actor/nll"] == pytest.approx(loss, rel=1e-5)
    expected, plain = plain_gradients(
        load_policy(config.actor_rollout_ref.model, dtype), demonstrations
    )
    assert loss == pytest.approx(expected, rel=near)
    assert plain.keys() == gradients.keys() and len(plain) > 10
    for name, value in plain.items():
        assert float((gradients[name] - value).norm()) <= near * max(float(value.norm()), 1e-3), (
            name
        )


# --- runs ---


def lines(folder: Path) -> list[dict]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timing = ("timing_s/", "perf/")
    return [
        {name: value for name, value in one.items() if not name.startswith(timing)} for one in found
    ]


def fitted(files: Path, folder: Path, *overrides: str) -> RaySFTTrainer:
    run = RaySFTTrainer(
        configured(files, f"trainer.default_local_dir={folder}", *overrides)
    ).init_workers()
    run.fit()
    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "global_step_6" / "actor" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run = fitted(files, folder)
    # Nothing is answered, so no second copy of the weights is made
    assert run.workers.engine is None
    return folder


def test_a_run_raises_the_likelihood_and_records_it(whole):
    found = lines(whole)
    assert [one["step"] for one in found] == [1, 2, 3, 4, 5, 6]
    assert found[-1]["actor/nll"] < found[0]["actor/nll"] - 0.05
    rates = [one["actor/lr"] for one in found]  # a cosine whose last step still trains
    assert rates == sorted(rates, reverse=True) and rates[0] > 0.0027 and 0 < rates[-1] < 0.0003
    assert [one["training/epoch"] for one in found] == [0, 0, 0, 1, 1, 1]
    assert all(0 < one["sft/tokens_trained"] < one["sft/length/mean"] * 4 for one in found)


def test_a_stopped_run_ends_as_if_it_had_never_stopped(files, whole, tmp_path):
    folder = tmp_path / "run"
    run = RaySFTTrainer(configured(files, f"trainer.default_local_dir={folder}")).init_workers()
    draw = run.draw

    def stop_in_the_fourth(step):
        if step == 3:
            run.run.stop.requested = True  # a first Ctrl-C: step 3 is not begun
        return draw(step)

    run.draw = stop_in_the_fourth
    run.fit()
    assert len(lines(folder)) == 2
    fitted(files, folder)
    assert lines(folder) == lines(whole)
    one, other = weights(folder), weights(whole)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- validation and rejection sampling ---


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(sum(map(ord, solution_str)) % 2 == 0)
"""


@pytest.fixture(scope="module")
def questions(files) -> Path:
    (files / "reward.py").write_text(REWARD)
    truth = {"data_source": "tests/letters", "reward_model": {"style": "rule", "ground_truth": "a"}}
    rows = [
        {
            "prompt": [{"role": "user", "content": "abcd"[index % 4] * (1 + index % 5)}],
            "extra_info": {"index": index, "split": "train"},
            **truth,
        }
        for index in range(8)
    ]
    return write_rows(files / "questions.parquet", rows)


def answering(files: Path, questions: Path) -> list[str]:
    keys = {
        "data.val_files": questions,
        "custom_reward_function.path": files / "reward.py",
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.val_kwargs.n": 4,
        "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
        "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
    }
    return [f"{key}={value}" for key, value in keys.items()]


@pytest.fixture(scope="module")
def scores(files, questions) -> Path:
    out = files / "answers.jsonl"
    typed = [one for one in settings(files) if "model.path" not in one]
    typed = [
        *typed,
        *answering(files, questions),
        "data.max_response_length=64",
        "data.max_prompt_length=64",
    ]
    assert (
        evaluate.main(
            ["generate", "sft", *typed, "--model", str(files / "model"), "--out", str(out)]
        )
        == 0
    )
    # The settings beside the answers name no code
    own = f"custom_reward_function.path={files / 'reward.py'}"
    assert evaluate.main(["score", str(out), "--name", "parity", own]) == 0
    return files / "answers.scores-parity.jsonl"


def kept(scores: Path, *arguments: str) -> list[dict]:
    out = scores.with_name("kept.parquet")
    assert rejection.main([str(scores), "--out", str(out), *arguments]) == 0
    return pq.read_table(out).to_pylist()


def test_right_answers_are_kept_with_the_ids_that_the_policy_wrote(scores, capsys):
    answers = [
        json.loads(line) for line in scores.with_name("answers.jsonl").read_text().splitlines()
    ]
    right = [
        one
        for one in answers
        if sum(map(ord, one["response"])) % 2 == 0 and one["stop"] != "length"
    ]
    rows, one_each = kept(scores), kept(scores, "--most", "1")
    assert 0 < len(rows) < len(answers) and kept(scores, "--most", "1") == one_each
    uids = [row["uid"] for row in one_each]
    assert len(uids) == len(set(uids)) == len({row["uid"] for row in rows})
    capsys.readouterr()
    kept(scores)
    said = capsys.readouterr().out
    assert (
        f"{len(rows)} of 32 answers kept, to {len({row['uid'] for row in rows})} of 8 questions"
    ) in said
    assert [(row["uid"], row["sample"]) for row in rows] == [
        (one["uid"], one["sample"]) for one in right
    ]
    for row, one in zip(rows, right, strict=True):
        assert (
            row["response_ids"] == one["response_ids"]
            and all(row["response_mask"])
            and row["score"] == 1.0
        )
        assert tokenizer().decode(row["prompt_ids"]) == one["prompt"]
    told = json.loads(scores.with_name("kept.manifest.json").read_text())
    assert told["chosen"] == {"by": "acc", "least": 1.0, "most": None, "seed": 1} and told[
        "rows"
    ] == len(rows)
    found = loaded(scores.with_name("kept.parquet"), "data.truncation=right")
    assert [one.ids.tolist() for one in found] == [
        row["prompt_ids"] + row["response_ids"] for row in rows
    ]


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        ("grpo", []),
        ("grpo", ["actor_rollout_ref.rollout.multi_turn.enable=True"]),
        ("search_r1", ["data.max_start_length=20", "data.truncation=left", "do_search=False"]),
    ],
    ids=["plain", "tools", "search"],
)
def test_questions_are_read_anew_as_their_episodes_had_them(tmp_path, recipe, keys):
    tool_tokenizer().save_pretrained(tmp_path / "model")
    shape = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 200}
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    tools = {"tools": [{"class_name": "recipes.lab.tools.Calculator", "config": {}}]}
    (tmp_path / "tools.yaml").write_text(json.dumps(tools))
    chat = [{"role": "user", "content": "how much is 3 and 4, and of that twice as much?"}]
    truth = {"style": "rule", "ground_truth": "14"}
    row = {"data_source": "openai/gsm8k", "prompt": chat, "reward_model": truth}
    (tmp_path / "questions.jsonl").write_text(json.dumps(row) + "\n")
    keys = [
        *keys,
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        f"data.val_files={tmp_path / 'questions.jsonl'}",
    ]
    if any("multi_turn" in key for key in keys):
        keys.append(
            f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path / 'tools.yaml'}"
        )
    asking = RayPPOTrainer(compose(recipe, keys))
    asking.load_tokenizer()
    asking.load_questions()
    settings_of_answers = {"prompts": questions_hash(asking.val_prompts)}
    manifest = {
        "recipe": recipe,
        "config": convert.as_json(asking.config),
        "settings": settings_of_answers,
    }
    again = rejection._prompts(tmp_path / "answers.jsonl", manifest)
    assert [p.token_ids for p in again.values()] == [p.token_ids for p in asking.val_prompts]


def test_what_does_not_belong_together_is_refused(scores, questions, capsys):
    rows, held = pq.read_table(questions).to_pylist(), questions.read_bytes()
    answers = scores.with_name("answers.jsonl")
    text = answers.read_text()

    def refused(*arguments: str) -> str:
        assert (
            rejection.main(
                [str(scores), "--out", str(scores.with_name("kept.parquet")), *arguments]
            )
            == 2
        )
        return capsys.readouterr().err

    assert "none of 32 answers has acc of at least 2" in refused("--least", "2")
    assert (
        "--by=nope" in refused("--by", "nope")
        and refused("--most", "0")
        and refused("--out", "x.json")
    )
    rows[3]["prompt"][0]["content"] = "other"
    write_rows(questions, rows)
    try:
        assert "others than those that were answered" in refused()
        answers.write_text(text.replace("tests/letters", "tests/Letters", 1))
        assert "is not the file that" in refused()
    finally:
        questions.write_bytes(held)
        answers.write_text(text)


def test_fine_tuning_on_kept_answers_validates_on_the_way(files, scores, questions, tmp_path):
    kept(scores)
    folder = tmp_path / "run"
    keys = [*answering(files, questions), f"data.train_files={scores.with_name('kept.parquet')}"]
    fitted(
        files, folder, *keys, "trainer.test_freq=3", "trainer.save_freq=-1", "data.truncation=right"
    )
    found = lines(folder)
    accuracy = "val-core/tests/letters/acc/mean@4"
    assert [one["step"] for one in found if accuracy in one] == [0, 3, 6]
    first, last = ((folder / "validation" / f"{step}.jsonl").read_text() for step in (0, 6))
    assert first != last  # the engine answers with what was trained


# --- keys ---


def test_what_has_no_meaning_here_is_refused(subtests):
    for override, says in [
        ("data.truncation=middle", "takes away what the answers stand on"),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla",
            "weighs samples by their advantages",
        ),
        ("algorithm.adv_estimator=gae", "has no meaning in"),
        ("actor_rollout_ref.actor.use_kl_loss=True", "has no meaning in"),
        ("critic.ppo_epochs=2", "has no meaning in"),
        ("actor_rollout_ref.rollout.n=2", "has no meaning in"),
        ("actor_rollout_ref.rollout.temperature=0.7", "has no meaning in"),
        ("trainer.max_staleness=1", "has no meaning in"),
        ("trainer.test_freq=5", "data.val_files names none"),
    ]:
        with subtests.test(override=override, says=says):
            assert not examine("sft", []).problems
            found = examine("sft", [override]).problems
            assert any(
                line.lower().startswith(f"{override.lower()}: ") and says in line for line in found
            )


def test_json_lines_are_the_demonstrations_that_parquet_holds(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": letter}]}
        for letter in "bcd"
    ]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    loaded = []
    for path in (write_rows(tmp_path / "rows.parquet", rows), lines):
        config = DemonstrationConfig(apply_chat_template_kwargs={"chat_template": TEMPLATE})
        files = DemonstrationFiles(config, tokenizer(), {EOS})
        files.load([str(path)], lambda sizes: [range(size) for size in sizes])
        loaded.append([(one.ids.tolist(), one.mask.tolist()) for one in files.measured])
    assert len(loaded[0]) == 3 and loaded[0] == loaded[1]


def test_a_line_keeps_the_nulls_of_its_own_calls(tmp_path):
    call = {"function": {"name": "f", "arguments": {"day": None}}}
    chat = [{"role": "user", "content": "a", "name": None}, {"role": "assistant", "content": None}]
    chat[1]["tool_calls"] = [call]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": chat}))
    (row,) = demonstration_files.read_rows(str(tmp_path / "rows.jsonl"), DemonstrationConfig())
    read = demonstration_files._messages(row["messages"], "messages", nested=False)
    assert read == [{"role": "user", "content": "a"}, chat[1]]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('{"messages": []}\n{"messages"', r"in 1 row \(1: "),
        ('{"question": "a"}', "has neither chats nor answers"),
        ('{"prompt": "a", "response": "b", "images": ["c"]}', "holds pictures"),
        ("\n", "has no rows"),
    ],
)
def test_json_lines_that_cannot_be_trained_on_are_refused(tmp_path, text, rule):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(InputError, match=f"rows.jsonl: .*{rule}"):
        demonstration_files.read_rows(str(tmp_path / "rows.jsonl"), DemonstrationConfig())
