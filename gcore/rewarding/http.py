"""A reward server: the siblings of a prompt go out in one POST, their rewards come back.

    group ──{"prompts", "completions", columns}──> POST ──{"rewards", ...}──> Answer
                                      ├── slow, busy (429), broken (5xx), unreachable, garbage: a pause, then again
                                      └── any other status: RewardError at once, with what the server said

Which failures are worth another try is known here alone, so the tries are made here and the blend makes none.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Collection, Sequence
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gcore.config.tree import HttpReward
from gcore.rewarding.functions import OWN, adapt
from gcore.rewarding.source import Answer, BadAnswer, short
from gcore.types import RewardError, Rollout, UserError

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

# names a column sent along cannot have: they are sent already, or mean another thing
RESERVED = OWN["trl"] | {"prompt", "completion"}


class Busy(RuntimeError):
    """429 or 5xx; `after_s` is what its Retry-After asks for, 0 without one."""

    def __init__(self, said: str, after_s: float):
        super().__init__(said)
        self.after_s = after_s


class Refused(RuntimeError):
    """Asking again would not help."""


class HttpSource:
    """Implements source.Source. To the adapter the server is one more function of TRL's signature."""

    attempts = 1

    def __init__(
        self,
        spec: HttpReward,
        key: str = "rewards.http.0",
        *,
        backoff_s: float = 0.25,  # the first pause; each further one is twice as long
        longest_backoff_s: float = 10.0,
        longest_retry_after_s: float = 60.0,
    ):
        self.spec, self.key = spec, key
        self.name, self.weight = spec.name, spec.weight
        self.counts: Counter[str] = Counter()
        self.backoff_s, self.longest_backoff_s = backoff_s, longest_backoff_s
        self.longest_retry_after_s = longest_retry_after_s
        self._call = adapt(self._post)
        self._random = random.Random()  # of its own: pauses must neither follow nor move the run's seeds
        self._session: ClientSession | None = None
        self._slots: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def check(self, columns: Collection[str]) -> None:
        _checked_url(self.spec.url, f"{self.key}.url")
        self._token()
        for name in self.spec.columns:
            if name in RESERVED:
                raise UserError(f"{self.key}.columns: {name} is a name of G-Core's own; expected other columns")
            if name not in columns:
                raise UserError(f"{self.key}.columns: no column {name}; the dataset has {', '.join(sorted(columns))}")

    async def answer(self, group: Sequence[Rollout], attempt: int) -> Answer:
        """Tries up to `attempts` times. A slot is held while the server works, not during the pauses."""
        prompt = group[0].prompt
        where = f"reward {self.name!r}, prompt {prompt.id}"
        if missing := [name for name in self.spec.columns if name not in prompt.columns]:
            raise RewardError(f"{where}: the row has no column {', '.join(missing)} (key: {self.key}.columns)")
        said, after_s = "", 0.0
        for turn in range(self.spec.attempts):
            if turn:
                self.counts["http_retries"] += 1
                await asyncio.sleep(self._pause(turn, after_s))
            after_s = 0.0
            try:
                return await self._call(group)
            except (Refused, UserError) as error:
                raise RewardError(f"{where}: {error} (not tried again)") from None
            except TimeoutError:
                self.counts["timeouts"] += 1
                said = f"no answer from {self._shown} in {self.spec.timeout_s:g} s (key: {self.key}.timeout_s)"
            except Busy as error:
                said, after_s = str(error), error.after_s
            except BadAnswer as error:
                said = f"{self._shown} {error}"
            except Exception as error:  # no connection, a broken one, ...
                said = f"{self._shown}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise RewardError(f"{where}: {said} (tried {self.spec.attempts} times)")

    def close(self) -> None:
        """Closes the connections now. aiohttp would then wait for the other side, which nobody does here."""
        if self._session is not None:
            closing = self._session.close()
            try:
                closing.send(None)
            except StopIteration:
                pass
            else:
                closing.close()
        self._session = None

    async def _post(self, prompts: list[Any], completions: list[Any], **columns: list[Any]) -> Any:
        """One try. Redirects are not followed: POST would become GET, and the token might go elsewhere."""
        names = self.spec.columns or [name for name in ("answer",) if name in columns]
        body = _body({"prompts": prompts, "completions": completions} | {name: columns[name] for name in names})
        headers = {"Content-Type": "application/json"}
        if token := self._token():
            headers["Authorization"] = f"Bearer {token}"
        session, slots = self._line()
        async with slots, session.post(self.spec.url, data=body, headers=headers, allow_redirects=False) as response:
            text = (await response.read()).decode("utf-8", "replace")
        self._check_status(response, text)
        try:
            return _without(token, json.loads(text))
        except (ValueError, RecursionError):
            raise BadAnswer(f"returned {short(_without(token, text))}; expected JSON") from None

    def _check_status(self, response: ClientResponse, text: str) -> None:
        status = response.status
        if 200 <= status < 300:
            return
        said = f"{self._shown} answered {status}: {short(_without(self._token(), text))}"
        if status == 429 or status >= 500:
            raise Busy(said, _seconds(response.headers.get("Retry-After", "")))
        raise Refused(f"{said} (key: {self.key}.url)")

    def _line(self) -> tuple[ClientSession, asyncio.Semaphore]:
        """The session of the running loop, and its slots. Who waits for a slot is not on the clock yet."""
        import aiohttp

        loop = asyncio.get_running_loop()
        if self._session is None or self._slots is None or self._loop is not loop:
            self.close()
            self._loop, self._slots = loop, asyncio.Semaphore(self.spec.max_concurrent)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # the slots are the limit
                timeout=aiohttp.ClientTimeout(total=self.spec.timeout_s),
            )
        return self._session, self._slots

    def _pause(self, turn: int, after_s: float) -> float:
        """What the server asked for, and a jittered pause on top: those it sent away should not return all at once."""
        step = min(self.longest_backoff_s, self.backoff_s * 2.0 ** min(turn - 1, 30))
        return min(after_s, self.longest_retry_after_s) + step * self._random.uniform(0.5, 1.0)

    def _token(self) -> str | None:
        """Read when needed and never kept. UserError when the variable holds nothing that can be sent."""
        name = self.spec.token_env
        if name is None:
            return None
        token = os.environ.get(name, "").strip()
        if not token:
            raise UserError(f"{self.key}.token_env: the environment variable {name} is not set; expected a token in it")
        if not (token.isascii() and token.isprintable()):
            raise UserError(f"{self.key}.token_env: {name} has characters that no header can hold; expected a token")
        return token

    @property
    def _shown(self) -> str:
        """The address without its query: keys are often passed there."""
        return self.spec.url.partition("?")[0]


def _checked_url(url: str, key: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not close
        good = False
    if not good:
        raise UserError(f"{key}: got {url!r}; expected http://HOST:PORT/PATH or https://")
    if parts.username is not None or parts.password is not None:
        raise UserError(f"{key}: expected no user name or password in it (put a token in a variable, see token_env)")


def _body(payload: dict[str, list[Any]]) -> bytes:
    """The payload as JSON. What has no form there (an image, a NaN) is named by its column."""
    parts = []
    for name, values in payload.items():
        try:
            parts.append(f"{json.dumps(name)}: {json.dumps(values, allow_nan=False)}")
        except (TypeError, ValueError, RecursionError) as error:
            raise Refused(f"{name} cannot be sent as JSON: {error}") from None
    return f"{{{', '.join(parts)}}}".encode()


def _seconds(retry_after: str) -> float:
    """Retry-After is a number of seconds or a date."""
    if retry_after.isdecimal():
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _without(token: str | None, value: Any) -> Any:
    """A server may quote the token it was sent; our messages do not. Numbers are left alone."""
    if not token:
        return value
    match value:
        case str():
            return value.replace(token, "***")
        case list():
            return [_without(token, item) for item in value]
        case dict():
            return {_without(token, name): _without(token, item) for name, item in value.items()}
    return value
