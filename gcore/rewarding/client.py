"""JSON to a server and back, for reward servers and for judges behind a URL: which failures are worth another try.

    payload ──> POST ──> JSON, read by the caller
                  ├── slow, busy (429), broken (5xx), unreachable, garbage: a pause, then again
                  └── any other status: RewardError at once, with what the server said

The token is read from the environment when needed, never kept, and taken out of whatever a server says.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from gcore.rewarding.source import BadAnswer, short
from gcore.types import RewardError, UserError

if TYPE_CHECKING:
    from aiohttp import ClientSession

T = TypeVar("T")
REACH_S = 5.0  # how long a server may take to say that it is there


@dataclass(frozen=True, slots=True)
class Pauses:
    """Between two tries: Pauses(first_s=0.25), each twice as long as the one before, with jitter."""

    first_s: float = 0.25
    longest_s: float = 10.0
    longest_retry_after_s: float = 60.0  # of what a server asks for with Retry-After


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered, as it is: Reply(status=429, text="slow down", retry_after="2")"""

    status: int
    text: str
    retry_after: str


class Busy(RuntimeError):
    """429 or 5xx; `after_s` is what its Retry-After asks for, 0 without one."""

    def __init__(self, said: str, after_s: float):
        super().__init__(said)
        self.after_s = after_s


class Refused(RuntimeError):
    """Asking again would not help."""


class JsonClient:
    """One server, as one controller asks it: JsonClient("http://h:8000/v1", "rewards.judges.0", tries=4, ...)

    `url` is the user's, `path` what is asked below it; `hint` are the keys to look at when the server refuses.
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        tries: int,
        timeout_s: float,
        max_concurrent: int,
        token_env: str | None,
        counts: Counter[str],
        path: str = "",
        hint: str = "",
        pauses: Pauses | None = None,
    ):
        self.url, self.path, self.key, self.hint = url, path, key, hint or f"key: {key}.url"
        self.tries, self.timeout_s, self.max_concurrent, self.token_env = tries, timeout_s, max_concurrent, token_env
        self.counts, self.pauses = counts, pauses or Pauses()
        self._random = random.Random()  # of its own: pauses must neither follow nor move the run's seeds
        self._session: ClientSession | None = None
        self._slots: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def address(self, path: str) -> str:
        """`path` below the url; the url's query stays behind it."""
        base, mark, query = self.url.partition("?")
        return f"{base.rstrip('/')}/{path}{mark}{query}" if path else self.url

    @property
    def shown(self) -> str:
        """The address without its query: keys are often passed there."""
        return self.address(self.path).partition("?")[0]

    def check(self) -> None:
        """The url is one, and the variable of the token holds something that can be sent. Raises UserError."""
        _checked_url(self.url, f"{self.key}.url")
        self._token()

    async def tried(self, once: Callable[[], Awaitable[T]], where: str) -> T:
        """`once()`, up to `tries` times. A slot is held while the server works, not during the pauses."""
        said, after_s = "", 0.0
        for turn in range(self.tries):
            if turn:
                self.counts["http_retries"] += 1
                await asyncio.sleep(self.pause_s(turn, after_s))
            after_s = 0.0
            try:
                return await once()
            except (Refused, UserError) as error:
                raise RewardError(f"{where}: {error} (not tried again)") from None
            except TimeoutError:
                self.counts["timeouts"] += 1
                said = f"no answer from {self.shown} in {self.timeout_s:g} s (key: {self.key}.timeout_s)"
            except Busy as error:
                said, after_s = str(error), error.after_s
            except BadAnswer as error:
                said = f"{self.shown} {error}"
            except Exception as error:  # no connection, a broken one, ...
                said = f"{self.shown}: {self.named(error)}"
        raise RewardError(f"{where}: {said} (tried {self.tries} times)")

    async def post(self, payload: Mapping[str, Any]) -> Any:
        """One try: what the server answers, as JSON. Raises Busy, Refused or BadAnswer."""
        reply = await self.exchange("POST", self.address(self.path), _body(payload))
        if not 200 <= reply.status < 300:
            said = f"{self.shown} answered {self.quoted(reply)}"
            if reply.status == 429 or reply.status >= 500:
                raise Busy(said, _seconds(reply.retry_after))
            hint = f"key: {self.key}.token_env" if reply.status in (401, 403) else self.hint
            raise Refused(f"{said} ({hint})")
        try:
            return _without(self._token(), json.loads(reply.text))
        except (ValueError, RecursionError):
            raise BadAnswer(f"returned {short(_without(self._token(), reply.text))}; expected JSON") from None

    async def exchange(self, method: str, url: str, body: bytes | None = None) -> Reply:
        """Redirects are not followed: POST would become GET, and the token might go elsewhere."""
        headers = {"Content-Type": "application/json"}
        if token := self._token():
            headers["Authorization"] = f"Bearer {token}"
        session, slots = self.connection()
        async with slots, session.request(method, url, data=body, headers=headers, allow_redirects=False) as response:
            text = (await response.read()).decode("utf-8", "replace")
        return Reply(response.status, text, response.headers.get("Retry-After", ""))

    async def reach(self, path: str, most_s: float = REACH_S) -> Reply:
        """Before the run, one GET: any answer shows that a server is there. Raises UserError where there is none."""
        address, most_s = self.address(path).partition("?")[0], min(most_s, self.timeout_s)
        try:
            async with asyncio.timeout(most_s):
                return await self.exchange("GET", self.address(path))
        except TimeoutError:
            raise UserError(f"{self.key}.url: no answer from {address} in {most_s:g} s") from None
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{self.key}.url: no server answers at {address}: {self.named(error)}") from None

    def quoted(self, reply: Reply) -> str:
        """Status and complaint in one line. Most servers wrap it in JSON, each in its own way; the words are enough."""
        try:
            said = json.loads(reply.text)
        except (ValueError, RecursionError):
            said = None
        for name in ("error", "message", "detail"):
            if isinstance(said, dict) and isinstance(said.get(name), dict | str):
                said = said[name]
        words = repr(_without(self._token(), said if isinstance(said, str) and said else reply.text))
        return f"{reply.status}: {words if len(words) <= 240 else words[:237] + '...'}"

    def named(self, error: BaseException) -> str:
        """Some errors quote the address with its query."""
        text = _without(self._token(), _without(self.url.partition("?")[2], str(error)))
        return f"{type(error).__name__}: {' '.join(text.split())[:200]}"

    def connection(self) -> tuple[ClientSession, asyncio.Semaphore]:
        """The session of the running loop, and its slots. Who waits for a slot is not on the clock yet."""
        import aiohttp

        loop = asyncio.get_running_loop()
        if self._session is None or self._slots is None or self._loop is not loop:
            self.close()
            self._loop, self._slots = loop, asyncio.Semaphore(self.max_concurrent)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # the slots are the limit
                timeout=aiohttp.ClientTimeout(total=self.timeout_s),
            )
        return self._session, self._slots

    def pause_s(self, turn: int, after_s: float) -> float:
        """What the server asked for, and a jittered pause on top: those it sent away should not return all at once."""
        step = min(self.pauses.longest_s, self.pauses.first_s * 2.0 ** min(turn - 1, 30))
        return min(after_s, self.pauses.longest_retry_after_s) + step * self._random.uniform(0.5, 1.0)

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

    def _token(self) -> str | None:
        """Read when needed and never kept. UserError when the variable holds nothing that can be sent."""
        name = self.token_env
        if name is None:
            return None
        token = os.environ.get(name, "").strip()
        if not token:
            raise UserError(f"{self.key}.token_env: the environment variable {name} is not set; expected a token in it")
        if not (token.isascii() and token.isprintable()):
            raise UserError(f"{self.key}.token_env: {name} has characters that no header can hold; expected a token")
        return token


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


def _body(payload: Mapping[str, Any]) -> bytes:
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
