"""Secrets of the requests to a judge."""

from __future__ import annotations

from core.config import convert, examine
from tests.core.config.test_secret_keys import SECRET, shown


def test_a_password_in_what_requests_add_is_hidden():
    config = examine("grpo", [f"+reward_model.judge.extra={{user:{{password:{SECRET}}}}}"]).config
    assert config.reward_model.judge.extra == {"user": {"password": SECRET}}, "the requests have it"
    assert SECRET not in str(convert.as_json(config)) + shown(config)
