"""What must not be recorded or printed: secrets, found by the names of their keys, in URLs, and in environments.

The running code has the real values. What is written (a run's configuration, its command, manifests, what
loggers are sent) and what is printed (messages, dry runs, help) goes through this module, and shows ``***`` instead. A
secret is the value of a key whose name is one (``token``, ``api_key``, ``password``), all values of an environment
(``env_vars``), the login in a URL, and what looks like the key of a well-known service.

Better is a secret that is in no configuration: the keys that end in ``api_key_env`` name an environment variable.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"
ENVIRONMENTS = {"env", "envs", "env_vars", "environ", "environment", "environment_variables"}
ENDS = {
    *("token", "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd", "apikey", "auth"),
    *("authorization", "authentication", "credential", "credentials", "cookie", "cookies", "bearer", "jwt"),
    *("signature", "sig", "sas", "accesskey", "privatekey", "secretkey", "apitoken", "accesstoken", "authtoken"),
}
WITHIN = {"secret", "password", "passwd", "passphrase", "apikey", "authorization", "credential", "credentials"}
OF_KEYS = {"api", "access", "private", "secret", "account", "auth", "signing", "encryption", "subscription", "license"}
# A name that ends so tells where a secret is, or how large it may be
HARMLESS = {"env", "var", "variable", "file", "path", "dir", "folder", "name", "type", "length", "limit", "count"}
# Of a tokenizer or of a limit: eos_token and max_token are no secrets
OF_TEXT = {
    *("pad", "eos", "bos", "unk", "sep", "cls", "mask", "image", "video", "audio", "stop", "start", "end", "begin"),
    *("think", "special", "additional", "max", "min", "num", "per", "new", "len", "next", "first", "last"),
}
FOLDERS = {"PWD", "OLDPWD"}  # variables of every shell: here pwd is no password
OF_URLS = {"key", "code"}  # parameters of a URL that hold a secret, beside those that are secrets anywhere

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_USER = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*://)"
    r"(?P<user>[^/\s?#'\"]*|[^/\s?#@'\"]*:(?!\d*(?:[/?#]|$))[^\s@'\"]*)@",  # the second: a slash in the password
    re.IGNORECASE,
)
_BARE_USER = re.compile(r"(?!mailto:)[\w.%+-]+:[^\s@/]+@(?:[\w-]+\.[\w.-]+|[\w-]+(?=[:/]))(?::\d+)?(?:/\S*)?")
_PARAMETER = re.compile(r"(?P<before>[?&#;])(?P<name>[\w.%-]+)=(?P<value>[^&#;\s'\"]+)")
_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
    r"|(?<=bearer )[\w.~+/=-]{8,}",
    re.IGNORECASE,
)
_VALUE = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|(?:bearer|basic|token)\s+[^\s,;&}\]'\"]+"
_PAIR = re.compile(
    rf"(?P<name>[A-Za-z_][\w.-]*)(?P<mark>['\"]?\s*[:=]\s*)(?P<value>{_VALUE}|[^\s,;&}}\]'\"{{\[]+)", re.IGNORECASE
)
_PAIR_OF_WORD = re.compile(rf"(?P<name>[A-Za-z_][\w.-]*)(?P<mark>['\"]?\s*[:=]\s*)(?P<value>{_VALUE}|[^,&}}\]{{\[]+)")
_ENVIRONMENT = re.compile(
    r"(?P<name>\b(?:env|envs|env_vars|environ|environment))(?P<mark>['\"]?\s*[:=]\s*)\{[^{}]*\}?", re.IGNORECASE
)
_seen: set[str] = set()  # secrets that were hidden: a later message may hold one of them without its key


def is_secret(key: str) -> bool:
    """Return whether the value of a key is a secret, by its name: of ``a.b.token`` by the last part, and by ``env``."""
    *parents, last = re.split(r"[./]", key)
    if ENVIRONMENTS & {parent.lower() for parent in parents}:
        return True
    words = [word.lower() for word in _WORDS.findall(last)]
    if not words or words[-1] in HARMLESS:
        return False
    if words[-1] in {"token", "tokens"} and OF_TEXT & {*words[:-1]}:
        return False
    pairs = {*zip(words, words[1:], strict=False)}
    return words[-1] in ENDS or bool(WITHIN & {*words}) or any((one, "key") in pairs for one in OF_KEYS)


def redacted(value: Any, key: str = "") -> Any:
    """Return a value (a tree of mappings and lists) with ``***`` in place of each secret. ``key`` is that of the value.

    What is no secret is equal to what was given; a second time changes nothing.
    """
    if isinstance(value, Mapping):
        if key.rpartition(".")[2].lower() in ENVIRONMENTS:
            return {name: HIDDEN for name in value}
        hide = is_secret(key)
        return {name: redacted(item, key if hide else f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(redacted(item, key) for item in value)
    if value is None or isinstance(value, bool) or value == "":
        return value
    if key and is_secret(key):
        return _hidden(value)
    if isinstance(value, str) and key.rpartition(".")[2] == "command":  # of a manifest
        return _of_command(value)
    return _of_text(value) if isinstance(value, str) else value


def redacted_text(text: str) -> str:
    """Return a message or a file's text with ``***`` in place of secrets: by name, in URLs, and those hidden before."""
    text = _ENVIRONMENT.sub(lambda found: f"{found['name']}{found['mark']}{{{HIDDEN}}}", text)
    text = _PAIR.sub(_pair, _of_text(text))
    for secret in sorted({*_seen, *_of_environment()}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def redacted_command(words: Sequence[str]) -> str:
    """Return a command line, quoted for a shell, with ``***`` in place of secrets."""
    shown, hide = [], False
    for word in words:
        text = _ENVIRONMENT.sub(lambda found: f"{found['name']}{found['mark']}{{{HIDDEN}}}", _of_text(word))
        shown.append(HIDDEN if hide else _PAIR_OF_WORD.sub(_pair, text))
        hide = word.startswith("-") and "=" not in word and is_secret(word.lstrip("-"))  # --token abc
    return shlex.join(shown)


def without_hidden(tree: Any) -> Any:
    """Return what was recorded without the entries whose value was not: a program must not take ``***`` for a value."""
    if isinstance(tree, Mapping):
        return {name: without_hidden(item) for name, item in tree.items() if item != HIDDEN}
    if isinstance(tree, list):
        return [without_hidden(item) for item in tree if item != HIDDEN]
    return tree


def login_in(url: str) -> str | None:
    """Return what of a URL is a login, in words; None where it holds none.

    A user's name alone is one in http URLs, where it is mostly a token; ``sftp://jane@host`` and
    ``abfs://container@account`` hold none.
    """
    if not _SCHEME.match(url):
        return "a user and a password" if _BARE_USER.fullmatch(url) else None
    if (match := _USER.match(url)) and _is_login(match):
        return "a user and a password" if ":" in match["user"] else "a user or token"
    return next((f"the parameter {one['name']}" for one in _PARAMETER.finditer(url) if _is_parameter(one)), None)


def _is_login(match: re.Match[str]) -> bool:
    return bool(match["user"]) and (":" in match["user"] or "http" in match["scheme"].lower())


def _is_parameter(match: re.Match[str]) -> bool:
    return match["name"].lower() in OF_URLS or is_secret(match["name"])


def _of_text(text: str) -> str:
    """Hide what is a secret without a key: logins in URLs, and keys of well-known services."""

    def user(match: re.Match[str]) -> str:
        if not _is_login(match) or match["user"] == HIDDEN:
            return match[0]
        return f"{match['scheme']}{_hidden(match['user'])}@"

    def parameter(match: re.Match[str]) -> str:
        return f"{match['before']}{match['name']}={_hidden(match['value'])}" if _is_parameter(match) else match[0]

    if _BARE_USER.fullmatch(text):
        return f"{HIDDEN}@{text.rpartition('@')[2]}"
    if "://" in text:
        text = _PARAMETER.sub(parameter, _USER.sub(user, text))
    return _KNOWN.sub(HIDDEN, text)


def _of_command(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError:
        return redacted_text(text)
    shown = redacted_command(words)
    return text if shown == shlex.join(words) else shown  # as it was quoted, where nothing is hidden


def _pair(match: re.Match[str]) -> str:
    value = match["value"]
    if value.lower() in ("null", "none", "true", "false", "''", '""') or not is_secret(match["name"].lstrip("-")):
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{match['name']}{match['mark']}{quote}{HIDDEN}{quote}"


def _hidden(value: Any) -> str:
    if isinstance(value, str) and len(value) >= 8 and value != HIDDEN:
        _seen.add(value)
    return HIDDEN


def _of_environment() -> set[str]:
    known = ((name, value) for name, value in os.environ.items() if name not in FOLDERS)
    return {value for name, value in known if len(value) >= 8 and is_secret(name)}
