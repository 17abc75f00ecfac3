import json
import logging
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.data.encoder import Encoder
from core.data.parquet import ExampleFile
from core.data.prompts import PromptFiles, PromptStream, load_val_prompts, warn_of_trained_questions
from core.errors import InputError
from core.types import Prompt
from tests.row_files import data_config, plain_row, rows_file, write_parquet
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CHAT = [{"role": "user", "content": "1+1?"}]


def loaded(config, seed, **options):
    return PromptStream(config, PromptFiles(config, TOKENIZER, **options), seed)


def stream(files, seed=1, **changes):
    return loaded(data_config(train_files=files, **changes), seed)


def validation(files, **changes):
    return load_val_prompts(PromptFiles(data_config(val_files=files, **changes), TOKENIZER))


def golds(prompts):
    return [prompt.ground_truth for prompt in prompts]


def refused(make, *parts):
    with pytest.raises(InputError) as caught:
        make()
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    return caught.value.problems


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Files of 7, 5 and 12 rows whose prompts are a0, a1, ..., b0, ..., c11."""
    folder = tmp_path_factory.mktemp("three")
    return [
        rows_file(folder / f"{name}.parquet", count, name)
        for name, count in (("a", 7), ("b", 5), ("c", 12))
    ]


def test_a_prompt_has_everything_of_its_row(tmp_path):
    chat, extra = [{"role": "system", "content": "x"}, *CHAT], {"split": "test", "index": 3, "z": 1}
    raw = plain_row(3, "qa", prompt=chat, extra_info=extra)
    prompt = stream(write_parquet(tmp_path / "a.parquet", [raw])).prompt(4)
    text = "<bos>system: x\n<bos>user: 1+1?\n<bos>assistant: "
    assert prompt == Prompt(
        ordinal=4,
        uid="qa/test/3",
        token_ids=tuple(TOKENIZER(text)["input_ids"]),
        messages=tuple(chat),
        ground_truth="3",
        data_source="qa",
        extra_info=extra,
    )
    plain = stream(write_parquet(tmp_path / "b.parquet", [plain_row(0, text="1+1=")])).prompt(0)
    assert plain.messages == ({"role": "user", "content": "1+1="},)
    assert TOKENIZER.decode(plain.token_ids) == "1+1="


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**40), shuffle=st.booleans(), start=st.integers(0, 100))
def test_every_epoch_asks_every_question_once(three, seed, shuffle, start):
    prompts = stream(three, seed, shuffle=shuffle)
    assert len(prompts) == 24 and prompts.steps(1, 5) == 4
    epoch = [prompts.prompt(ordinal).uid for ordinal in range(24 * start, 24 * start + 24)]
    assert len(set(epoch)) == 24
    assert {prompts.epoch(24 * start), prompts.epoch(24 * start + 23)} == {start}
    again = stream(three, seed, shuffle=shuffle)
    assert [again.prompt(24 * start + index).uid for index in (23, 0, 7)] == [
        epoch[23],
        epoch[0],
        epoch[7],
    ]


def test_unshuffled_rows_come_in_file_order(three):
    prompts = stream(three, shuffle=False)
    uids = (
        "a/train/0",
        "a/train/6",
        "b/train/0",
        "b/train/4",
        "c/train/0",
        "c/train/11",
        "a/train/0",
    )
    assert tuple(prompts.prompt(i).uid for i in (0, 6, 7, 11, 12, 23, 24)) == uids


def test_the_data_s_own_seed_goes_first(three):
    def order(seed, own=None):
        prompts = loaded(data_config(train_files=three, seed=own), seed)
        return [prompts.prompt(ordinal).uid for ordinal in range(24)]

    assert order(1) != order(2)
    assert order(1, own=9) == order(2, own=9) == order(9)


def test_train_max_samples_is_a_seeded_choice_of_all_files(three):
    def chosen(seed, first=0):
        return {
            prompt.uid
            for prompt in map(
                stream(three, seed, train_max_samples=9).prompt, range(first, first + 9)
            )
        }

    assert len(chosen(3)) == 9 and chosen(3) == chosen(3, first=9) != chosen(4)
    in_order = stream(three, shuffle=False, train_max_samples=9)
    assert [in_order.prompt(i).uid for i in (0, 8)] == ["a/train/0", "b/train/1"]
    seen = []
    loaded(in_order.config, 1, visit=seen.append)
    assert [row.number for row in seen] == [*range(7), 0, 1]
    assert {row.data_source for row in seen} == {"a", "b"}
    assert len(stream(three, train_max_samples=1000)) == 24


@pytest.fixture
def long_and_short(tmp_path):
    """Six prompts of 2, 3, ... 7 tokens."""
    return write_parquet(
        tmp_path / "long.parquet", [plain_row(n, text="x" * (n + 2)) for n in range(6)]
    )


def test_overlong_prompts_are_left_out_or_cut_and_counted_or_an_error(
    long_and_short, three, caplog
):
    caplog.set_level(logging.INFO, "core.data.prompts")
    limit, filtered = dict(max_prompt_length=4), dict(filter_overlong_prompts=True)
    prompts = stream(long_and_short, **limit, **filtered)
    assert len(prompts) == 3 and sorted(golds(map(prompts.prompt, range(3)))) == ["0", "1", "2"]
    assert (
        "3 left out and 0 cut as longer than data.max_prompt_length=4 tokens, longest prompt 4"
        in caplog.text
    )
    said = "all 6 prompts are longer than data.max_prompt_length=1 tokens", "the shortest has 2"
    refused(lambda: stream(long_and_short, max_prompt_length=1, **filtered), *said)
    parts = (
        "long.parquet",
        "data.max_prompt_length=4 tokens in 3 rows (3: 5 tokens, 4: 6 tokens, 5: 7 tokens)",
    )
    refused(lambda: stream(long_and_short, **limit), *parts, "data.filter_overlong_prompts=True")
    prompts = stream(long_and_short, **limit, truncation="left")
    assert max(len(prompts.prompt(ordinal).token_ids) for ordinal in range(6)) == 4
    assert "0 left out and 3 cut as longer than data.max_prompt_length=4 tokens" in caplog.text
    short = validation([long_and_short, three[0]], **limit, **filtered)
    assert [prompt.ordinal for prompt in short] == [-1, -2, -3, *range(-7, -14, -1)]


def test_all_problems_of_all_files_come_together(three, tmp_path):
    rows = [plain_row(0), plain_row(1, reward_model=None), plain_row(2, text=" ")]
    bad = write_parquet(tmp_path / "bad.parquet", rows)
    long = write_parquet(tmp_path / "long.parquet", [plain_row(0, text="x" * 600)])
    problems = refused(lambda: stream([*three, bad, long]))
    assert len(problems) == 3 and all(str(tmp_path) in line for line in problems)
    missing = refused(
        lambda: stream([str(tmp_path / "x.parquet"), three[0], str(tmp_path / "y.parquet")])
    )
    assert len(missing) == 2 and all("does not exist" in line for line in missing)
    refused(lambda: validation([str(tmp_path / "x.parquet")]), "does not exist")


def test_a_template_s_refusal_and_a_prompt_without_tokens_are_problems(tmp_path):
    alternate = (
        "{% if messages|length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}hello"
    )
    only_user = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    chats = [CHAT, CHAT * 2, CHAT * 3]
    developer = [CHAT, [{"role": "developer", "content": "be brief"}, *CHAT]]
    for template, prompts, said in (
        (
            alternate,
            chats,
            "in 3 rows (0: it leaves out the text of role user, 1: roles must alternate",
        ),
        ("{{ '' }}", chats, "a prompt has no tokens in 3 rows (0, 1, 2)"),
        (
            only_user,
            developer,
            "refuses a prompt in 1 row (1: it leaves out the text of role developer)",
        ),
    ):
        rows = [plain_row(n, prompt=chat) for n, chat in enumerate(prompts)]
        file = write_parquet(tmp_path / "a.parquet", rows)
        refused(lambda: stream(file, apply_chat_template_kwargs={"chat_template": template}), said)  # noqa: B023


CALLS = (
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(("ending", "own_null"), [("parquet", ""), ("jsonl", ', "day": null')])
def test_a_call_shows_its_own_arguments_and_none_of_other_rows(tmp_path, ending, own_null):
    rows = []
    for number, arguments in enumerate([{"city": "Paris", "day": None}, {"sum": "1+1"}, {}]):
        calls = [{"function": {"arguments": arguments}}]
        calling = {"role": "assistant", "content": "", "tool_calls": calls}
        prompt = [{"role": "user", "content": "go"}, calling, {"role": "tool", "content": "ok"}]
        rows.append(plain_row(number, prompt=prompt))
    path = tmp_path / f"a.{ending}"
    if ending == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        write_parquet(path, rows)
    loaded = stream(str(path), shuffle=False, apply_chat_template_kwargs={"chat_template": CALLS})
    shown = [tiny_tokenizer().decode(loaded.prompt(number).token_ids) for number in range(3)]
    assert shown == [f'go{{"city": "Paris"{own_null}}}ok', 'go{"sum": "1+1"}ok', "go{}ok"]


def test_a_prompt_knows_the_tag_that_it_opens(tmp_path):
    path = write_parquet(
        tmp_path / "a.parquet", [plain_row(0, text="Q: 1+1? <think>"), plain_row(1)]
    )
    assert {stream([path], shuffle=False).prompt(n).opened_tag for n in range(2)} == {
        "<think>",
        None,
    }


def test_a_uid_names_a_question_wherever_it_is_loaded(three, tmp_path):
    alone, together = stream(three[1], shuffle=False), stream(three, shuffle=False)
    assert alone.prompt(2).uid == together.prompt(9).uid == "b/train/2"
    # Two questions under one name are told apart, their neighbours keep their names.
    clash = write_parquet(
        tmp_path / "clash.parquet", [plain_row(2, "b", text="another"), plain_row(9, "b")]
    )
    both = stream([three[1], clash], shuffle=False)
    uids = [both.prompt(ordinal).uid for ordinal in range(7)]
    assert len(set(uids)) == 7
    assert uids[1] == "b/train/1" and uids[6] == "b/train/9"
    assert uids[2].startswith("b/train/2/") and uids[5].startswith("b/train/2/")


def test_copies_of_a_question_share_their_uid_and_are_counted(tmp_path, caplog):
    caplog.set_level(logging.INFO, "core.data.prompts")
    unnamed = [plain_row(n % 3, extra_info={"split": "test"}) for n in range(9)]
    prompts = stream(write_parquet(tmp_path / "a.parquet", unnamed), shuffle=False)
    uids = [prompts.prompt(ordinal).uid for ordinal in range(9)]
    assert len(set(uids)) == 3 and uids[:3] == uids[3:6]
    assert "9 of 9 rows, 3 different questions" in caplog.text
    named = write_parquet(tmp_path / "b.parquet", [plain_row(0), plain_row(0)])
    assert {stream(named).prompt(ordinal).uid for ordinal in range(2)} == {"s/train/0"}


def test_a_file_that_is_listed_twice_counts_twice(three):
    uids = [stream([three[0], three[0]]).prompt(ordinal).uid for ordinal in range(14)]
    assert Counter(Counter(uids).values()) == {2: 7}
    assert len(stream([three[0], three[0]], train_max_samples=9)) == 9
    prompts = validation([three[1], three[0], three[1]])
    assert golds(prompts)[:5] == golds(prompts)[12:] == [*"01234"]
    assert len({prompt.ordinal for prompt in prompts}) == 17


def test_validation_questions_that_are_trained_on_are_counted(three, tmp_path, caplog):
    def shared(train, *asked, **changes):
        caplog.clear()
        prompts = validation(list(asked))
        warn_of_trained_questions(stream(train, **changes).files.questions(), prompts)
        return [each.args for each in caplog.records if each.levelno == logging.WARNING]

    assert shared(three[:2], three[2]) == []
    # The same questions with other names, graded otherwise, as chats and lines of JSON
    chat = [{"role": "user", "content": "a3 "}]
    rows = [
        plain_row(9, prompt=chat, extra_info={"index": 40}),
        plain_row(2, "a"),
        plain_row(3, "d"),
    ]
    test = tmp_path / "test.jsonl"
    test.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert shared(three, str(test), three[2]) == [(14, 15, f"{three[0]}, {three[2]}")]
    assert shared(three[:1], str(test), shuffle=False, train_max_samples=3) == [(1, 3, three[0])]
    assert shared([three[0]] * 2, str(test), shuffle=False, train_max_samples=8)[0][:2] == (2, 3)


def test_validation_asks_every_row_in_order(three):
    prompts = validation(three)
    assert [prompt.uid for prompt in prompts][6:8] == ["a/train/6", "b/train/0"]
    assert [prompt.ordinal for prompt in prompts] == [-1 - index for index in range(24)]
    assert validation(None) == validation([]) == []


def test_a_validation_choice_is_a_file_s_own_and_the_same_for_every_run(three):
    prompts = validation(three, val_max_samples=4)
    assert Counter(prompt.data_source for prompt in prompts) == {"a": 4, "b": 4, "c": 4}
    assert prompts == validation(three, val_max_samples=4)
    # A row keeps its ordinal, and with it its sampling seeds, whatever else is left out.
    everything = {prompt.uid: prompt for prompt in validation(three)}
    assert all(prompt == everything[prompt.uid] for prompt in prompts)
    only_c = validation(three[2:], val_max_samples=4)
    assert [prompt.uid for prompt in only_c] == [prompt.uid for prompt in prompts[8:]]
    assert golds(only_c) != ["0", "1", "2", "3"]
    assert golds(only_c) == sorted(golds(only_c), key=int)
    assert golds(validation(three[2:], val_max_samples=4, seed=5)) != golds(only_c)


def test_files_with_different_kinds_of_ground_truth_go_together(tmp_path):
    model = {"style": "rule", "ground_truth": {"target": ["x", "y"]}}
    lists = write_parquet(tmp_path / "b.parquet", [plain_row(5, "qa", reward_model=model)])
    prompts = stream([rows_file(tmp_path / "a.parquet", 2), lists], shuffle=False)
    assert golds(map(prompts.prompt, range(3))) == ["0", "1", model["ground_truth"]]


def test_a_start_reads_each_example_once_and_encodes_each_prompt_once(three, monkeypatch):
    read, encoded = [], []
    check, encode = ExampleFile._checked, Encoder.encode
    monkeypatch.setattr(ExampleFile, "_checked", lambda *args: read.append(args[2]) or check(*args))
    monkeypatch.setattr(
        Encoder,
        "encode",
        lambda self, prompt, *rest: encoded.append(prompt) or encode(self, prompt, *rest),
    )
    seen = []
    prompts = load_val_prompts(
        PromptFiles(data_config(val_files=three), TOKENIZER, visit=seen.append)
    )
    assert len(prompts) == len(seen) == len(read) == len(encoded) == len(set(encoded)) == 24
    loaded(data_config(train_files=three), 1)
    assert len(read) == len(encoded) == 48
