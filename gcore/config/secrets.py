"""Secrets are not written to files: config.yaml, checkpoints, logs, samples, events, trackers.

    tree of a configuration ──redacted──> the same tree with <redacted> in the place of secrets
                            ──learn─────> secrets that this process knows ──hide──> any text without them

What is a secret: below `args` and `extra`, whose keys are the user's, a value whose key says so; in any text a value of
a known form (`hf_...`, `Bearer ...`, a JWT, a PEM key), the user and password of a URL, and parameters of a URL whose
names say so, keys in HTTP headers; in a configuration also options of commands (`--api-key=...`) and `NAME=value`. A
name says so by its words, not by parts of them: `api_key`, but not `tokenizer` or `answer_key`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gcore.config.leaves import leaves_of

REDACTED = "<redacted>"
FREE_FORM = ("args", "extra")  # sections without keys of our own
MIN_LENGTH = 8  # of a secret that `hide` searches for: a shorter one is a part of other words

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
ENDS = "token|secret|password|passwd|passphrase|pwd|credential|authorization|cookie|jwt|apikey|accesskey|secretkey"
STRONG = re.compile(rf"(?:{ENDS}|privatekey|accountkey|bearer)s?$|^creds?$")  # of a word at any place of a name
CODES = ("passcode", "pin", "otp")  # also of digits
WEAK = frozenset(
    (
        *("auth", "oauth", "authentication", "session", "signature", "sig", "sas", "pass", "pat", "key", "keys"),
        *("pw", "psk", *CODES),
    )
)
AFTER_WEAK = frozenset(("id", "value", "header", "headers", "string", "base", "b", "json", "pem"))  # access_key_id
ABOUT = frozenset(  # last words: what is said about a secret is none
    (
        *("env", "file", "path", "folder", "dir", "name", "names", "column", "columns", "field", "type", "kind"),
        *("method", "mode", "scheme", "format", "limit", "budget", "count", "size", "length", "timeout", "ttl"),
        *("ids", "index"),
    )
)
PLAIN_KEYS = frozenset(  # words before `key`: the name of a column or of an entry
    (
        *("answer", "column", "sort", "primary", "foreign", "public", "label", "field", "dict", "json", "prompt"),
        *("output", "response", "input", "reward", "score", "metric", "group", "cache", "partition", "join", "row"),
        *("text", "image"),
    )
)
OPAQUE = re.compile(r"(?=[^\d]*\d)(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9+/_=.-]{16,}")
FORMS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|[sr]k_(?:live|test)_\w{8,}|(?:AKIA|ASIA)[0-9A-Z]{12,}"
    r"|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}|AIza[\w-]{30,}"
    r"|gsk_[A-Za-z0-9]{16,}|r8_[A-Za-z0-9]{16,}|npm_[A-Za-z0-9]{16,}|pypi-[\w-]{24,}|SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|nvapi-[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?)"
    r"|(?<=hooks\.slack\.com/services/)[\w/]{16,}|(?<=/api/webhooks/)\d+/[\w-]{16,}"
    r"|(?<=/bot)\d+:[\w-]{16,}|(?<=\bBearer )[\w.~+/=-]{8,}|(?<=\bBasic )[A-Za-z0-9+/]{8,}={0,2}",
    re.DOTALL,
)
MARKS: tuple[str, ...] = (  # one of them is in any text of these forms, or in a URL
    *("-----BEGIN", "hf_", "sk-", "k_", "AKIA", "ASIA", "gh", "glpat-", "xox", "AIza", "nvapi-", "eyJ"),
    *("r8_", "npm_", "pypi-", "SG.", "/bot", "Bearer ", "Basic ", "://"),
    *("uthorization", "UTHORIZATION", "-key", "-Key", "-KEY", "-token", "-Token", "curl "),
)
USER = re.compile(  # of a URL. A password may contain @, and also / if it cannot be a port
    r"(?<=://)(?:[^\s/?#@:\[]*:([^\s/?#]*|(?!\d+\b)[^\s\"'<>]{0,200})|[^\s/?#@:]{16,})(?=@)"
)
HEADER = re.compile(  # and the password of curl: what is before the secret, the secret
    r"(\b(?:authorization|(?:x-[\w-]{0,30}|api-)(?:key|token))[\"']?: *[\"']?(?:(?:token|apikey|bearer|basic) +)?"
    r"(?=[^\s\"',;]{8})(?=[^\s\"',;]*\d)|\bcurl (?:[^\n]{0,200}? )?(?:-u|--user)[ =][\"']?[^\s:\"']*:)([^\s\"',;]+)",
    re.IGNORECASE,
)
PARAMETER = re.compile(r"(?<![\w.-])([\w.-]+)=([^\s&;#\"'<>\\]+)")
IN_URLS = ("key", "code")  # parameters that are secrets only there
To = Callable[[str], str]

_known: set[str] = set()


def redacted(tree: Any) -> Any:
    """A tree of JSON values without its secrets. Nothing else changes."""
    return _mapped(tree, lambda secret: REDACTED)


def learn(tree: Any) -> None:
    """Remember the secrets of a configuration, for `hide` in this process; also those in environment variables that it
    names."""

    def remember(secret: str) -> str:
        if len(secret) >= MIN_LENGTH and REDACTED not in secret:
            _known.update((secret, json.dumps(secret)[1:-1]))  # also as a part of a line of JSON
        return REDACTED

    _mapped(tree, remember)
    for path, value in leaves_of(tree):
        if path.rpartition(".")[2] == "token_env" and isinstance(value, str):
            remember(os.environ.get(value, ""))


def hide(text: str) -> str:
    """The text without secrets of known forms, and without those that this process has learned."""
    return _without(text, lambda secret: REDACTED, sorted(_known, key=len, reverse=True))


def mask(data: bytes) -> bytes:
    """The same for a part of a file, which keeps its length."""
    known = [secret.encode().decode("latin-1") for secret in sorted(_known, key=len, reverse=True)]
    return _without(data.decode("latin-1"), lambda secret: "*" * len(secret), known).encode("latin-1")


def places(tree: Any) -> list[str]:
    """The keys whose values a run has not saved: ["rewards.functions.0.args.api_key"]."""
    return [path for path, value in leaves_of(tree) if isinstance(value, str) and REDACTED in value]


def _mapped(value: Any, to: To, is_free: bool = False, is_secret: bool = False) -> Any:
    """`is_free`: below a section without keys of our own; `is_secret`: below a key that says so."""
    if isinstance(value, Mapping):
        return {
            k: _mapped(v, to, is_free or k in FREE_FORM, is_secret or (is_free and _says_so(str(k), v)))
            for k, v in value.items()
        }
    if isinstance(value, list):
        before = [None, *value]  # ["--token", "..."]
        return [_mapped(v, to, is_free, is_secret or _is_option(b, v)) for b, v in zip(before, value, strict=False)]
    if is_secret and value is not None and not isinstance(value, bool):
        return to(str(value))
    return _without(value, to) if isinstance(value, str) else value


def _says_so(name: str, value: Any) -> bool:
    """Whether a value of this name is a secret."""
    words = [word.lower() for word in WORD.findall(name)]
    if not words or words[-1] in ABOUT:
        return False
    if isinstance(value, int | float):  # max_completion_tokens, session_weight; but also a password of digits
        if words[-1] in CODES:
            return True
        return words[-1] == "key" != name.lower() or (STRONG.search(words[-1]) is not None and words[-1][-1] != "s")
    if any(STRONG.search(word) for word in words):
        return True
    while len(words) > 1 and words[-1] in AFTER_WEAK:
        words.pop()
    if words[-1] not in WEAK and not words[-1].endswith("key"):
        return False
    is_plain = words[-1] not in WEAK or (words[-1].startswith("key") and PLAIN_KEYS.issuperset(words[-2:-1]))
    return not is_plain or (isinstance(value, str) and OPAQUE.fullmatch(value) is not None)


def _without(text: str, to: To, known: list[str] | None = None) -> str:
    for secret in known or ():
        text = text.replace(secret, to(secret))
    if any(mark in text for mark in MARKS):
        text = FORMS.sub(lambda match: to(match[0]), text)
        text = HEADER.sub(lambda match: match[1] + to(match[2]), text)
        text = USER.sub(lambda match: (to(match[1] or ""), to(match[0]))[1], text)
    if "=" in text and (known is None or "?" in text or "&" in text):
        is_secret = partial(_is_parameter, in_config=known is None)
        text = PARAMETER.sub(lambda match: f"{match[1]}={to(match[2])}" if is_secret(match) else match[0], text)
    return text


def _is_parameter(match: re.Match[str], in_config: bool) -> bool:
    """`in_config`: elsewhere, such as in a program of a sample, `token=x` is an argument of a function."""
    name, value = match[1], match[2]
    if match.start() and match.string[match.start() - 1] in "?&;":
        return name.lower() in IN_URLS or _says_so(name, "")
    return in_config and not value.isdecimal() and _says_so(name, value)


def _is_option(before: Any, value: Any) -> bool:
    if not (isinstance(before, str) and before.startswith("-") and isinstance(value, str)):
        return False
    if before in ("-u", "--user"):  # of curl: name:password
        return ":" in value and not value.replace(":", "").isdecimal()
    return not value.isdecimal() and _says_so(before, value)
