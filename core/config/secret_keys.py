"""Secrets in a configuration: what a run writes, prints or sends to a logger shows ``***`` in their place.

A secret is known by the name of its key, or by standing in a URL. Better is one that is in no configuration: the keys
that end in ``api_key_env`` name an environment variable.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlsplit

HIDDEN = "***"
ENVIRONMENTS = {"env", "env_vars", "environment"}  # every value in them
# How names of secrets end, in lower case and without marks: hf_token, X-Api-Key, clientSecret
ENDS = ("token", "apikey", "accesskey", "secretkey", "privatekey", "accountkey", "accesskeyid", "secret", "password")
ENDS += ("passwd", "pwd", "auth", "authorization", "credential", "credentials", "cookie", "signature")
NO_SECRETS = re.compile(r"(pad|eos|bos|unk|sep|cls|mask|stop|start|end|think|image|next|max|min)_?token$")
IN_URLS = {"key", "code", "sig"}  # parameters that are secrets in a URL alone


def is_secret(key: str) -> bool:
    """Return whether the value of a key is a secret, by the last part of its name or by ``env_vars`` above it."""
    *above, name = key.lower().split(".")
    if ENVIRONMENTS & {*above}:
        return True
    return re.sub(r"[^a-z]", "", name).endswith(ENDS) and not NO_SECRETS.search(name)


def hidden(value: Any, key: str = "") -> Any:
    """Return a tree of mappings and lists with ``***`` in place of each secret. ``key`` is that of the value."""
    if isinstance(value, Mapping):
        return {name: hidden(item, key if is_secret(key) else f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(hidden(item, key) for item in value)
    if value in (None, "") or isinstance(value, bool) or not is_secret(key):
        return without_login(value) if isinstance(value, str) else value
    return HIDDEN


def without_hidden(tree: Any) -> Any:
    """Return what was recorded without the entries whose value was not: a program must not take ``***`` for a value."""
    if isinstance(tree, Mapping):
        return {name: without_hidden(item) for name, item in tree.items() if item != HIDDEN}
    if isinstance(tree, list):
        return [without_hidden(item) for item in tree if item != HIDDEN]
    return tree


def command_line(words: Sequence[str]) -> str:
    """Return a command, quoted for a shell; of a word that names a secret only the key is shown."""
    shown = []
    for word in words:
        key, equals, value = word.partition("=")
        names = [key.lstrip("-+"), *re.findall(r"([\w.-]+)['\"]?\s*:", value)]
        secret = equals and (any(map(is_secret, names)) or ENVIRONMENTS & {*names, key.rpartition(".")[2]})
        shown.append(f"{key}={HIDDEN}" if secret else without_login(word))
    return shlex.join(shown)


def login_in(url: str) -> str | None:
    """Return what of a URL is a login, in words; None where it holds none.

    A user's name alone is one in http URLs, where it is mostly a token; ``sftp://jane@host`` holds none.
    """
    try:
        parts = urlsplit(url) if "://" in url else None
    except ValueError:  # no URL: who opens it reports that
        return None
    if parts is None:
        return None
    user, _, _ = parts.netloc.rpartition("@")
    if user and (":" in user or parts.scheme in ("http", "https")):
        return "a user and a password" if ":" in user else "a user or token"
    names = (name for name, _ in parse_qsl(parts.query) if name.lower() in IN_URLS or is_secret(name))
    return next((f"the parameter {name}" for name in names), None)


def without_login(text: str) -> str:
    """Return a text with ``***`` in place of the login of each URL in it."""

    def hide(match: re.Match[str]) -> str:
        url = match[0]
        if login_in(url) is None:
            return url
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        user = f"{HIDDEN}@" if host != parts.netloc else ""
        query = f"?{HIDDEN}" if parts.query else ""
        return f"{parts.scheme}://{user}{host}{parts.path}{query}"

    return re.sub(r"[a-z][a-z0-9+.-]*://[^\s'\",\]}]+", hide, text, flags=re.IGNORECASE) if "://" in text else text
