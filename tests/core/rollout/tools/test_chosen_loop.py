"""The tool agent where rows of the data name it."""

from __future__ import annotations

import pytest

from core.errors import InputError
from core.rollout.agent_loop import make_agent_loop
from tests.core.rollout.test_agent_loop import TOKENIZER, config


def test_a_tool_agent_of_the_data_needs_tools():
    with pytest.raises(InputError, match="tool_config_path=null"):
        make_agent_loop(config(), TOKENIZER, {"tool_agent"}, [])
