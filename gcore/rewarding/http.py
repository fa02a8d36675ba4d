"""A reward server, and the JSON client that judges behind a URL use too: it decides which failures are retried.

    group ──{"prompts", "completions", columns}──> JsonClient ──{"rewards", ...}──> Answer
    payload ──> POST ──> JSON, parsed by the caller
                  ├── timeout, 429, 5xx, no connection, invalid JSON, too much of it: wait, then retry
                  └── any other status: RewardError immediately, with the server's message

The token is read from the environment for each request and never stored. It is removed from quoted server messages.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from gcore.config.judges import RemoteJudge
from gcore.config.rewards import HttpReward
from gcore.http_body import JSON_BYTES, read_body
from gcore.rewarding.functions import trl_arguments
from gcore.rewarding.signatures import OWN
from gcore.rewarding.source import Answer, BadAnswer, Source, short
from gcore.rewarding.worker import read_batch
from gcore.types import RewardError, Rollout, UserError

if TYPE_CHECKING:
    from aiohttp import ClientSession

T = TypeVar("T")
REACH_S = 5.0  # timeout of the reachability check before the run
# names that `columns` must not contain: G-Core sends them itself, or they have another meaning
RESERVED = OWN["trl"] | {"prompt", "completion"}


@dataclass(frozen=True, slots=True)
class Reply:
    """The response of a server, unparsed: Reply(status=429, text="slow down", retry_after="2")"""

    status: int
    text: str | None  # None: larger than the limit
    retry_after: str


class ServerBusy(RuntimeError):
    """Status 429 or 5xx. `after_s` is the value of Retry-After, 0 without that header."""

    def __init__(self, message: str, after_s: float):
        super().__init__(message)
        self.after_s = after_s


class RequestRejected(RuntimeError):
    """The request failed, and a retry would fail too."""


class HttpSource(Source):
    """The server gets the arguments of a function in the style of TRL, and answers what such a function returns. Only
    the client knows which failures are worth a retry. So it retries, and the rewarder does not."""

    def __init__(self, spec: HttpReward, key: str = "rewards.http.0"):
        super().__init__(spec.name, spec.weight)
        self.spec, self.key = spec, key
        self.client = JsonClient(spec, key, spec.attempts, self.counts)

    def check(self, columns: Collection[str]) -> None:
        self.client.check()
        for name in self.spec.columns:
            if name in RESERVED:
                raise UserError(f"{self.key}.columns: {name} is reserved by G-Core; expected other columns")
            if name not in columns:
                raise UserError(f"{self.key}.columns: no column {name}; the dataset has {', '.join(sorted(columns))}")

    async def reach(self) -> None:
        """Checks that a server answers. Any answer to a GET is enough."""
        await self.client.reach("")

    async def answer(self, group: Sequence[Rollout]) -> Answer:
        prompt = group[0].prompt
        where = f"reward {self.name!r}, prompt {prompt.id}"
        if missing := [name for name in self.spec.columns if name not in prompt.columns]:
            raise RewardError(f"{where}: the row has no column {', '.join(missing)} (key: {self.key}.columns)")
        given = trl_arguments(group)
        names = self.spec.columns or [name for name in ("answer",) if name in given]
        payload = {name: given[name] for name in ("prompts", "completions", *names)}
        return await self.client.post(payload, lambda answer: read_batch(answer, len(group)), where)

    def close(self) -> None:
        self.client.close()


@dataclass(eq=False)
class JsonClient:
    """One controller's client of one server: JsonClient(RemoteJudge(...), "rewards.judges.0", tries=4, counts=...)

    `path` is appended to the url of the server. `hint` names the keys to check when the server rejects a request.
    """

    server: HttpReward | RemoteJudge
    key: str
    tries: int
    counts: Counter[str]
    path: str = ""
    hint: str = ""  # default: the key of the url
    first_delay_s: float = 0.25  # the next ones are each twice the one before, with jitter
    longest_delay_s: float = 10.0
    longest_retry_after_s: float = 60.0  # upper limit for a server's Retry-After
    # separate: delays must neither use nor advance the run's random state
    _random: random.Random = field(default_factory=random.Random, init=False)
    _session: ClientSession | None = field(default=None, init=False)
    _slots: asyncio.Semaphore | None = field(default=None, init=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)

    def address(self, path: str) -> str:
        """`path` appended to the url, in front of the url's query."""
        base, mark, query = self.server.url.partition("?")
        return f"{base.rstrip('/')}/{path}{mark}{query}" if path else self.server.url

    @property
    def public_address(self) -> str:
        """The address without its query, which often contains keys."""
        return self.address(self.path).partition("?")[0]

    def check(self) -> None:
        """The url is valid, and the environment variable holds a token that can be sent. Raises UserError."""
        _checked_url(self.server.url, f"{self.key}.url")
        self._token()

    async def post(self, payload: Mapping[str, Any], read: Callable[[Any], T], where: str) -> T:
        """What `read` makes of the server's answer, in up to `tries` attempts. A slot is held during a request, not
        during the delays. RewardError, beginning with `where`, after the last one."""
        failure, after_s = "", 0.0
        for attempt in range(self.tries):
            if attempt:
                self.counts["http_retries"] += 1
                await asyncio.sleep(self.delay_s(attempt, after_s))
            after_s = 0.0
            try:
                return read(await self._attempt(payload))
            except (RequestRejected, UserError) as error:
                raise RewardError(f"{where}: {error} (not retried)") from None
            except TimeoutError:
                self.counts["timeouts"] += 1
                limit = f"{self.server.timeout_s:g} s (key: {self.key}.timeout_s)"
                failure = f"no answer from {self.public_address} in {limit}"
            except ServerBusy as error:
                failure, after_s = str(error), error.after_s
            except BadAnswer as error:
                failure = f"{self.public_address} {error}"
            except Exception as error:  # no connection, connection lost, ...
                failure = f"{self.public_address}: {self.describe_error(error)}"
        raise RewardError(f"{where}: {failure} (tried {self.tries} times)")

    async def _attempt(self, payload: Mapping[str, Any]) -> Any:
        """The server's answer, parsed as JSON. Raises ServerBusy, RequestRejected or BadAnswer."""
        reply = await self.exchange("POST", self.address(self.path), _body(payload))
        if not 200 <= reply.status < 300:
            failure = f"{self.public_address} answered {self.quote(reply)}"
            if reply.status == 429 or reply.status >= 500:
                raise ServerBusy(failure, _retry_after_s(reply.retry_after))
            hint = f"key: {self.key}.token_env" if reply.status in (401, 403) else self.hint or f"key: {self.key}.url"
            raise RequestRejected(f"{failure} ({hint})")
        if reply.text is None:
            raise BadAnswer(f"sent more than {JSON_BYTES >> 20} MB; expected JSON of at most that size")
        try:
            return _redact(self._token(), json.loads(reply.text))
        except (ValueError, RecursionError):
            raise BadAnswer(f"returned {short(_redact(self._token(), reply.text))}; expected JSON") from None

    async def exchange(self, method: str, url: str, body: bytes | None = None) -> Reply:
        """Redirects are not followed: POST would become GET, and the token might reach another server."""
        headers = {"Content-Type": "application/json"}
        if token := self._token():
            headers["Authorization"] = f"Bearer {token}"
        session, slots = self.connection()
        async with slots, session.request(method, url, data=body, headers=headers, allow_redirects=False) as response:
            data = await read_body(response, JSON_BYTES)
        text = None if data is None else data.decode("utf-8", "replace")
        return Reply(response.status, text, response.headers.get("Retry-After", ""))

    async def reach(self, path: str) -> Reply:
        """Before the run, one GET: any answer shows that the server is up. Raises UserError without an answer."""
        address, timeout_s = self.address(path).partition("?")[0], min(REACH_S, self.server.timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await self.exchange("GET", self.address(path))
        except TimeoutError:
            raise UserError(f"{self.key}.url: no answer from {address} in {timeout_s:g} s") from None
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{self.key}.url: no server answers at {address}: {self.describe_error(error)}") from None

    def quote(self, reply: Reply) -> str:
        """Status and error message in one line. Most servers wrap the message in JSON; common wrappers are removed."""
        if reply.text is None:
            return f"{reply.status}, with more than {JSON_BYTES >> 20} MB"
        try:
            message = json.loads(reply.text)
        except (ValueError, RecursionError):
            message = None
        for name in ("error", "message", "detail"):
            if isinstance(message, dict) and isinstance(message.get(name), dict | str):
                message = message[name]
        text = repr(_redact(self._token(), message if isinstance(message, str) and message else reply.text))
        return f"{reply.status}: {text if len(text) <= 240 else text[:237] + '...'}"

    def describe_error(self, error: BaseException) -> str:
        """Type and message, without the url's query, which some errors quote."""
        text = _redact(self._token(), _redact(self.server.url.partition("?")[2], str(error)))
        return f"{type(error).__name__}: {' '.join(text.split())[:200]}"

    def connection(self) -> tuple[ClientSession, asyncio.Semaphore]:
        """The session of the running loop, and its slots. The timeout starts after a slot is acquired."""
        import aiohttp

        loop = asyncio.get_running_loop()
        if self._session is None or self._slots is None or self._loop is not loop:
            self.close()
            self._loop, self._slots = loop, asyncio.Semaphore(self.server.max_concurrent)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # the slots are the limit
                timeout=aiohttp.ClientTimeout(total=self.server.timeout_s),
            )
        return self._session, self._slots

    def delay_s(self, attempt: int, after_s: float) -> float:
        """Retry-After plus a jittered delay, so that rejected requests do not all return at once."""
        step = min(self.longest_delay_s, self.first_delay_s * 2.0 ** min(attempt - 1, 30))
        return min(after_s, self.longest_retry_after_s) + step * self._random.uniform(0.5, 1.0)

    def close(self) -> None:
        """Closes the connections without waiting for the server, as aiohttp's close would."""
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
        """Read for each request and never stored. UserError if the variable has no token that can be sent."""
        name = self.server.token_env
        if name is None:
            return None
        token = os.environ.get(name, "").strip()
        if not token:
            raise UserError(f"{self.key}.token_env: the environment variable {name} is not set; expected a token in it")
        if not (token.isascii() and token.isprintable()):
            raise UserError(
                f"{self.key}.token_env: {name} has characters that are invalid in a header; expected a token"
            )
        return token


def _checked_url(url: str, key: str) -> None:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number, unbalanced brackets
        valid = False
    if not valid:
        raise UserError(f"{key}: got {url!r}; expected http://HOST:PORT/PATH or https://")
    if parts.username is not None or parts.password is not None:
        raise UserError(
            f"{key}: got a user name or password in the URL; expected none "
            "(put a token in an environment variable, see token_env)"
        )


def _body(payload: Mapping[str, Any]) -> bytes:
    """The payload as JSON. The error for a value that JSON cannot hold (an image, a NaN) names its column."""
    parts = []
    for name, values in payload.items():
        try:
            parts.append(f"{json.dumps(name)}: {json.dumps(values, allow_nan=False)}")
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestRejected(f"{name} cannot be sent as JSON: {error}") from None
    return f"{{{', '.join(parts)}}}".encode()


def _retry_after_s(retry_after: str) -> float:
    """Retry-After is a number of seconds or a date."""
    if retry_after.isdecimal():
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _redact(token: str | None, value: Any) -> Any:
    """Replaces the token in strings. A server may quote the token; our messages must not show it."""
    if not token:
        return value
    match value:
        case str():
            return value.replace(token, "***")
        case list():
            return [_redact(token, item) for item in value]
        case dict():
            return {_redact(token, name): _redact(token, item) for name, item in value.items()}
    return value
