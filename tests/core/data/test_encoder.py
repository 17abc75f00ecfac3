import json

import pytest
from tokenizers.processors import TemplateProcessing

from core.config.training_keys import ModelConfig
from core.data.encoder import Encoder
from core.data.prompts import truncate
from core.data.vocabulary import ChatError
from core.errors import InputError
from core.learner.models import load_tokenizer
from tests.tiny import tiny_config, tiny_tokenizer

USER = {"role": "user", "content": "1+1?"}
SYSTEM = {"role": "system", "content": "be brief"}


# Values of verl's postprocess_data (torch_functional.py:514), padding aside.
@pytest.mark.parametrize(
    ("length", "limit", "mode", "kept"),
    [
        (10, 6, "left", [5, 6, 7, 8, 9, 10]),
        (10, 6, "right", [1, 2, 3, 4, 5, 6]),
        (10, 6, "middle", [1, 2, 3, 8, 9, 10]),
        (10, 5, "middle", [1, 2, 8, 9, 10]),
        (10, 1, "middle", [10]),
        (6, 6, "error", [1, 2, 3, 4, 5, 6]),
    ],
)
def test_truncation_keeps_what_its_name_says(length, limit, mode, kept):
    assert truncate(list(range(1, length + 1)), limit, mode) == kept


def encoded(prompt, tokenizer=None, **template_kwargs):
    tokenizer = tokenizer or tiny_tokenizer()
    ids = Encoder(tokenizer, template_kwargs).encode(prompt)
    assert type(ids) is list and all(type(value) is int for value in ids)
    return tokenizer.decode(ids)


def test_a_chat_ends_where_the_answer_begins_and_a_begun_answer_is_continued():
    assert encoded([SYSTEM, USER]) == "<bos>system: be brief\n<bos>user: 1+1?\n<bos>assistant: "
    turns = [USER, {"role": "assistant", "content": "2"}, {"role": "user", "content": "sure?"}]
    assert encoded(turns) == (
        "<bos>user: 1+1?\n<bos>assistant: 2\n<bos>user: sure?\n<bos>assistant: "
    )
    begun = [USER, {"role": "assistant", "content": "I think"}]
    assert encoded(begun) == "<bos>user: 1+1?\n<bos>assistant: I think"


QWEN3 = (
    "{% for m in messages %}[{{ m.role[0] | upper }}]"
    "{% if m.role == 'assistant' and '</think>' not in m.content %}"
    "<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}[A]"
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is false }}{% endif %}"
)
GLM45 = QWEN3.replace("<think>\n\n</think>\n\n", "\n<think></think>\n")
R1 = (
    "{% for m in messages %}[{{ m.role[0] | upper }}]"
    "{{ m.content.split('</think>')[-1] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[A]<think>\n{% endif %}"
)
GEMMA = QWEN3.replace("<think>\n\n</think>\n\n", "").replace("m.content }}", "m.content | trim }}")
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[Q] {{ m.content }}"
    "{% else %} {{ m.content }}<eos>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "begun", "expected", "tag"),
    [
        (QWEN3, "<think>\n", "[A]<think>\n", "<think>"),
        (QWEN3, "<think>", "[A]<think>", "<think>"),
        (QWEN3, "Let me see", "[A]Let me see", None),
        (QWEN3, "<think>\nI add.\n</think>\nIt is", "[A]<think>\nI add.\n</think>\nIt is", None),
        (QWEN3, "", "[A]", None),
        (GLM45, "<think>\n", "[A]<think>\n", "<think>"),
        (R1, "<think>\nOkay, ", "[A]<think>\nOkay, ", "<think>"),
        (R1, "<think>Okay", "[A]<think>Okay", "<think>"),
        (R1, "Okay", "[A]<think>\nOkay", "<think>"),
        (R1, "<think>\nnone\n</think>", "[A]<think>\nnone\n</think>", None),
        (R1, "none\n</think>\n", "[A]<think>\nnone\n</think>\n", None),
        (GEMMA, "<think>\n", "[A]<think>\n", "<think>"),
        (GEMMA, " so ", "[A] so ", None),
        (LLAMA2, "I think", " I think", None),
    ],
)
def test_a_begun_answer_stands_as_the_policy_would_write_it(template, begun, expected, tag):
    encoder = Encoder(tiny_tokenizer(), {"chat_template": template})
    chat = [USER, {"role": "assistant", "content": begun}]
    asked = encoder.render([USER]).partition("[A]")[0]
    assert encoder.render(chat) == asked + expected
    assert encoder.opened_tag(chat, encoder.encode(chat)) == tag


def test_a_begun_answer_keeps_the_empty_thought_that_was_asked_for():
    chat = [USER, {"role": "assistant", "content": "It is"}]
    shown = encoded(chat, chat_template=QWEN3, enable_thinking=False)
    assert shown == "[U]1+1?<eos>[A]<think>\n\n</think>\n\nIt is"


CALLS = (
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
)
JOINED = CALLS.replace("c.function.arguments | tojson", "'' + c.function.arguments")  # text alone


@pytest.mark.parametrize(
    ("template", "arguments", "expected"),
    [
        (CALLS, '{"city": "Paris", "day": null}', 'f({"city": "Paris", "day": null})'),
        (CALLS, {"city": "Paris"}, 'f({"city": "Paris"})'),
        (CALLS, "Paris", 'f("Paris")'),
        (JOINED, '{"a":1}', 'f({"a":1})'),
    ],
)
def test_arguments_that_are_json_text_reach_the_template_as_values(template, arguments, expected):
    function = {"name": "f", "arguments": arguments}
    calling = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    chat = [USER, calling, {"role": "tool", "content": "ok"}]
    assert encoded(chat, chat_template=template) == f"1+1?{expected}ok"
    assert function["arguments"] == arguments


THINKS = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt "
    "%}<think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("prompt", "template", "tag"),
    [
        ([USER], THINKS, "<think>"),
        ([USER], THINKS.replace("<think>", "<think>\n\n</think>\n"), None),
        ([USER], None, None),
        ([{"role": "user", "content": "reason in <think>"}], None, None),
        ([USER, {"role": "assistant", "content": "<think>\nOkay, "}], None, "<think>"),
        ([USER, {"role": "assistant", "content": "<think>no</think> So"}], None, None),
        ("Q: 1+1?\nA: Let me see.\n<think>", None, "<think>"),
        ("Answer in <answer> tags: 1+1?", None, None),
    ],
)
def test_a_tag_that_the_prompts_end_opens_is_known(prompt, template, tag):
    encoder = Encoder(tiny_tokenizer(), {"chat_template": template} if template else {})
    assert encoder.opened_tag(prompt, encoder.encode(prompt)) == tag


def test_template_arguments_reach_the_template():
    template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if thinking %}<think>{% endif %}"
    )
    assert encoded([USER], chat_template=template, thinking=True) == "1+1?<think>"
    assert encoded([USER], add_generation_prompt=False) == "<bos>user: 1+1?\n"
    with pytest.raises(ChatError, match="tokenize"):
        encoded([USER], tokenize=True)


def test_special_tokens_are_added_once_and_never_an_end():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 3), ("<eos>", 1)]
    )
    assert tokenizer("a")["input_ids"][0] == 3 and tokenizer("a")["input_ids"][-1] == 1
    assert encoded("1+1=", tokenizer) == "<bos>1+1=" and encoded("1+1=") == "1+1="
    assert encoded("<bos>1+1=", tokenizer) == "<bos>1+1="  # as a template rendered it
    assert encoded([USER], tokenizer) == "<bos>user: 1+1?\n<bos>assistant: "


def test_a_chat_that_cannot_be_written_says_why():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template.*custom_chat_template.*plain strings"):
        Encoder(tokenizer).encode([USER])
    with pytest.raises(ChatError, match="roles must alternate"):
        encoded([USER, USER], chat_template="{{ raise_exception('roles must alternate') }}")


def test_a_text_without_the_chat_never_becomes_the_template(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    tiny_config().save_pretrained(tmp_path)
    for text in ("/no/messages.jinja", "{{ bos_token }}Answer:"):
        with pytest.raises(InputError, match=f"custom_chat_template={text}: is no Jinja template"):
            load_tokenizer(ModelConfig(path=str(tmp_path), custom_chat_template=text))


def test_a_chat_template_that_only_a_processor_s_file_holds_is_read(tmp_path):
    words = tiny_tokenizer()
    words.chat_template = None
    words.save_pretrained(tmp_path)
    tiny_config().save_pretrained(tmp_path)
    assert load_tokenizer(ModelConfig(path=str(tmp_path))).chat_template is None
    text = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": text}))
    assert Encoder(load_tokenizer(ModelConfig(path=str(tmp_path)))).render([USER]) == "[1+1?]"
