"""Logins in URLs of a command."""

from __future__ import annotations

import pytest

from core.errors import InputError
from core.files.remote.urls import place


def test_a_login_in_the_url_of_a_command_is_refused():
    with pytest.raises(InputError, match=r"--run=s3://\*\*\*@b/run: holds a login"):
        place("s3://k:s@b/run", "--run")
