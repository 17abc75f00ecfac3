"""Ends of a turn and dropped roles, by templates in the form of public models'."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from core.data.vocabulary import end_ids, template_ends, writable
from tests.core.data.templates import FAMILIES, tokenizer_of

CHAT = {"role": "user", "content": "q"}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ends_of_a_turn_are_found_by_rendering(name):
    words, ends = tokenizer_of(name), FAMILIES[name].ends
    assert set(template_ends(words)) == ends
    generation = SimpleNamespace(eos_token_id=[words.eos_token_id, 50])
    assert end_ids(words, generation) == {
        50,
        words.eos_token_id,
        *map(words.convert_tokens_to_ids, ends),
    }


def test_without_a_template_or_with_a_broken_one_the_tokenizer_s_end_is_left():
    words = tokenizer_of("plain")
    for template in (None, "{{ raise_exception('no') }}", "{{ messages[9].content }}", "nothing"):
        words.chat_template = template
        assert end_ids(words) == {words.eos_token_id} and end_ids(
            SimpleNamespace(eos_token_id=3)
        ) == {3}


def test_text_that_no_tokenizer_takes_is_replaced():
    assert writable("a\ud83d\x00b\ude00") == "a\ufffd\ufffdb\ufffd" and writable("😀é") == "😀é"
