"""Secrets of a configuration: what is recorded, shown or printed has ``***`` in their place.

A secret is known by the name of its key, by standing under ``env_vars``, or by standing in a URL.
What another library writes is searched for the secrets that this process was given.
"""

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "***"
SHORT = 7  # characters of a secret that may be a word of a message too, as INFO under env_vars
# Names of secrets end so, in any case and with any marks between: hf_token, X-Api-Key, clientSecret
SECRET_NAME = (
    r"(token|(api|access|secret|private|account).?key(.?id)?|secret|passw(or)?d|pwd"
    r"|auth(orization)?|credentials?|cookie|signature)$"
)
SECRET = re.compile(rf"{SECRET_NAME}|(^|\.)(env|env_vars|environment)(\.|$)", re.IGNORECASE)
NO_SECRET = re.compile(
    r"(pad|eos|bos|unk|sep|cls|mask|stop|start|end|think|image|next|max|min)_?token$", re.IGNORECASE
)
# In a URL a user with a password, or, in http, alone; and its parameters where one of them is a
# secret
LOGIN = re.compile(r"(https?://|[a-z][\w+.-]*://(?=[^\s/@]*:))[^\s'\",\]}/@]+@", re.IGNORECASE)
QUERY = re.compile(
    r"(://[^\s'\",\]}?]*\?)[^\s'\",\]}]*(key|code|sig|signature|token|secret)=[^\s'\",\]}]*", re.I
)
GIVEN: set[str] = set()  # long secrets of this process's command line and environment


def is_secret(key: str) -> bool:
    """Return whether the value of a key is a secret, by the last part of its name or by
    ``env_vars`` above it."""
    return bool(SECRET.search(key)) and not NO_SECRET.search(key)


def hidden(value: Any, key: str = "") -> Any:
    """Return a tree of mappings and lists with ``***`` in place of each secret. ``key`` is that of
    the value."""
    if isinstance(value, Mapping):
        return {
            name: hidden(item, key if is_secret(key) else f"{key}.{name}")
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(hidden(item, key) for item in value)
    if value in (None, "") or isinstance(value, bool) or not is_secret(key):
        return without_login(value) if isinstance(value, str) else value
    return HIDDEN


def secrets_of(value: Any, key: str = "") -> Iterator[str]:
    """Yield the texts of a tree in whose place :func:`hidden` has ``***``."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from secrets_of(item, key if is_secret(key) else f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from secrets_of(item, key)
    elif hidden(value, key) == HIDDEN:
        yield str(value)


def without_hidden(tree: Any) -> Any:
    """Return what was recorded without the entries whose value was not: a program must not take
    ``***`` for a value."""
    if isinstance(tree, Mapping):
        return {name: without_hidden(item) for name, item in tree.items() if item != HIDDEN}
    return (
        [without_hidden(item) for item in tree if item != HIDDEN]
        if isinstance(tree, list)
        else tree
    )


# -- texts ----------------------------------------------------------------------------------------


def shown_word(word: str) -> str:
    """Return a word of a command line; of one that names a secret only the key is shown."""
    key, equals, value = word.partition("=")
    names = [
        key.lstrip("-+"),
        *(f"{key}.{name}" for name in re.findall(r"([\w.-]+)['\"]?\s*:", value)),
    ]
    return f"{key}={HIDDEN}" if equals and any(map(is_secret, names)) else without_login(word)


def command_line(words: Sequence[str]) -> str:
    """Return a command, quoted for a shell and without secrets."""
    return shlex.join(map(shown_word, words))


def without_login(text: str) -> str:
    """Return a text with ``***`` in place of the login of each URL in it; ``sftp://jane@host``
    holds none."""
    return QUERY.sub(rf"\1{HIDDEN}", LOGIN.sub(rf"\1{HIDDEN}@", text)) if "://" in text else text


def without_secrets(text: str, tree: Any, key: str = "") -> str:
    """Return a text that another library wrote, with ``***`` in place of the secrets of a tree that
    stand in it.

    A short one, as most settings under ``env_vars`` are, is known by the quotes, ``:`` or ``=``
    around it alone.
    """
    for secret in sorted({*secrets_of(tree, key)}, key=len, reverse=True):
        for form in {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1]}:
            before = r"(?<!\w)" if len(secret) > SHORT else r"(?<=['\":=])"
            spaced = r"(?<=[:=] )" + re.escape(form)
            # Of a path the beginning alone is none: a message may name a file below it
            text = re.sub(rf"(?:{before}{re.escape(form)}|{spaced})(?![\w/])", HIDDEN, text)
    return without_login(text)


def remember(*trees: Any) -> None:
    """Keep the long secrets of trees, and of the environment, out of what :func:`without_given`
    returns."""
    # Folders
    environment = {name: value for name, value in os.environ.items() if not name.endswith("PWD")}
    GIVEN.update(
        text for tree in (*trees, environment) for text in secrets_of(tree) if len(text) > SHORT
    )


def without_given(text: str) -> str:
    """Return a text with ``***`` in place of the secrets that this process was given."""
    return without_secrets(text, {"secret": [*GIVEN]})
