"""Secrets in a configuration: what a run writes, prints or sends to a logger shows ``***`` in their place.

A secret is known by the name of its key, or by standing in a URL. Better is one that is in no configuration: the keys
that end in ``api_key_env`` name an environment variable.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"
# Names of secrets end so, in any case and with any marks between: hf_token, X-Api-Key, clientSecret, env_vars.NAME
SECRET = re.compile(
    r"(token|(api|access|secret|private|account).?key(.?id)?|secret|passw(or)?d|pwd|auth(orization)?|credentials?"
    r"|cookie|signature)$|(^|\.)(env|env_vars|environment)(\.|$)",
    re.IGNORECASE,
)
NO_SECRET = re.compile(r"(pad|eos|bos|unk|sep|cls|mask|stop|start|end|think|image|next|max|min)_?token$", re.IGNORECASE)
# In a URL a user with a password, or, in http, alone; and its parameters where one of them is a secret
LOGIN = re.compile(r"(https?://|[a-z][\w+.-]*://(?=[^\s/@]*:))[^\s'\",\]}/@]+@", re.IGNORECASE)
QUERY = re.compile(r"(://[^\s'\",\]}?]*\?)[^\s'\",\]}]*(key|code|sig|signature|token|secret)=[^\s'\",\]}]*", re.I)


def is_secret(key: str) -> bool:
    """Return whether the value of a key is a secret, by the last part of its name or by ``env_vars`` above it."""
    return bool(SECRET.search(key)) and not NO_SECRET.search(key)


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
    return [without_hidden(item) for item in tree if item != HIDDEN] if isinstance(tree, list) else tree


def command_line(words: Sequence[str]) -> str:
    """Return a command, quoted for a shell; of a word that names a secret only the key is shown."""
    shown = []
    for word in words:
        key, equals, value = word.partition("=")
        names = [key.lstrip("-+"), *(f"{key}.{name}" for name in re.findall(r"([\w.-]+)['\"]?\s*:", value))]
        shown.append(f"{key}={HIDDEN}" if equals and any(map(is_secret, names)) else without_login(word))
    return shlex.join(shown)


def without_login(text: str) -> str:
    """Return a text with ``***`` in place of the login of each URL in it; ``sftp://jane@host`` holds none."""
    return QUERY.sub(rf"\1{HIDDEN}", LOGIN.sub(rf"\1{HIDDEN}@", text)) if "://" in text else text
