"""An endpoint of the policy by HTTP, for agents that only know HTTP: `ctx.serve(prompt)` of a workflow.

    workflow ──base_url, api_key──> agent ──POST BASE_URL/chat/completions──> Session ──> engines of the policy
                                                                                 └── records tokens and logprobs
    workflow <── session.rollout

A session is one sample (session.py): its identity is in its address. The paths and bodies of an address are those of
the dialects (dialects/). The server runs in the controller, listens on the loopback interface only, while sessions are
open, and asks for a token that is made for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence

from aiohttp import web

from gcore.types import UserError
from gcore.workflows.dialects import ROUTES
from gcore.workflows.dialects.form import Ask, BadRequest, Body, Deltas, Route, Turn, encoded
from gcore.workflows.session import Session

HOST = "127.0.0.1"
MAX_BODY = 32 * 2**20  # bytes
MODEL = {
    **{"id": "policy", "object": "model", "created": 0, "owned_by": "gcore"},
    **{"type": "model", "display_name": "policy", "created_at": "1970-01-01T00:00:00Z"},
}
MODELS = {"object": "list", "data": [MODEL], "has_more": False, "first_id": "policy", "last_id": "policy"}
EXPECTED = ", ".join(f"POST {path}" for path in ROUTES) + " or GET models, at session.base_url"


class Endpoint:
    """The server of one controller. It runs while at least one session is open."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._token = ""
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def open(self, sessions: Sequence[Session]) -> AsyncIterator[None]:
        names = [f"p{s.prompt.id}-s{s.sibling}-{secrets.token_hex(4)}" for s in sessions]
        try:
            async with self._lock:
                self._sessions |= dict(zip(names, sessions, strict=True))
                if self._runner is None:
                    await self._start()
            for name, session in zip(names, sessions, strict=True):
                session.base_url, session.api_key = f"http://{HOST}:{self._port}/{name}/v1", self._token
            yield
        except Exception as error:
            for session in sessions:
                if session.failure is not None:  # what the agent raised is a consequence of it
                    raise session.failure from error
            raise
        finally:
            for name in names:
                self._sessions.pop(name, None)
            async with self._lock:
                if not self._sessions and self._runner is not None:
                    runner, self._runner = self._runner, None
                    await runner.cleanup()
        for session in sessions:
            if session.failure is not None:
                raise session.failure

    async def _start(self) -> None:
        self._token = secrets.token_urlsafe(24)
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{session}/{path:.*}", self._serve)
        app.router.add_route("*", "/{path:.*}", self._serve)
        # A request that its client gave up is cancelled.
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        try:
            await runner.setup()
            await web.TCPSite(runner, HOST, 0).start()
        except BaseException:  # also if the workflow is cancelled: the next one starts it again
            await runner.cleanup()
            raise
        self._runner, self._port = runner, runner.addresses[0][1]

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        # Some clients put /v1 before their paths, even if it is the end of base_url.
        version, _, path = request.match_info["path"].rstrip("/").replace("v1/v1/", "v1/", 1).partition("/")
        route = ROUTES.get(path) if version == "v1" else None
        if (request.method, version, path) == ("GET", "v1", "models"):
            session = self._session(request, None)
            return session if isinstance(session, web.Response) else web.json_response(MODELS)
        if route is None or request.method != "POST":
            asked = path if version == "v1" else request.path
            message = f"{request.method} {asked} is not supported; expected {EXPECTED}"
            return _error(route, 404, message, "unsupported_route")
        session = self._session(request, route)
        return session if isinstance(session, web.Response) else await self._answer(request, session, route)

    def _session(self, request: web.Request, route: Route | None) -> Session | web.Response:
        headers = request.headers
        given = headers.get("x-api-key") or headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not secrets.compare_digest(given.encode(), self._token.encode()):
            return _error(route, 401, "the token (api_key) does not belong to this base_url", "invalid_api_key")
        session = self._sessions.get(request.match_info.get("session", ""))
        return session or _error(route, 404, "no such session: its workflow has ended", "session_not_found")

    async def _answer(self, request: web.Request, session: Session, route: Route) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            body: Body = await request.json()
            if not isinstance(body, dict):
                raise BadRequest("expected a JSON object")
            ask = _read(route, body)
            if route.counts:
                return web.json_response(route.answer(session.count(ask), body))
            if not ask.stream or route.stream is None:
                return web.json_response(route.answer(await session.turn(ask), body))
            deltas = Deltas(route.stream(body), ask)

            async def so_far(head: Turn, text: str, thinks: bool) -> None:
                if not response.prepared:  # errors before the first piece have a status of their own
                    await response.prepare(request)
                await response.write(encoded(deltas.so_far(head, text, thinks)))

            turn = await session.turn(ask, so_far)
            if not response.prepared:
                await response.prepare(request)
            await response.write(encoded(deltas.end(turn)))
        except ConnectionError:  # the agent has gone; what was sampled for it is recorded
            return response
        except UserError as error:
            return _error(route, 400, str(error), getattr(error, "code", "invalid_request_error"))
        except ValueError as error:
            return _error(route, 400, f"the body is not valid: {error}", "invalid_request_error")
        except Exception as error:  # an engine died, or an error in G-Core: the workflow raises it
            session.failure = session.failure or error
            if response.prepared:
                return response
            return _error(route, 500, f"{type(error).__name__}: {error}", "server_error")
        await response.write_eof()
        return response


def _read(route: Route, body: Body) -> Ask:
    """What an agent's library makes wrong is its own error, wherever the dialect notices it."""
    try:
        return route.read(body)
    except UserError:
        raise
    except Exception as error:
        raise BadRequest(f"the body is not valid: {type(error).__name__}: {error}") from error


def _error(route: Route | None, status: int, message: str, code: str) -> web.Response:
    if route is not None and route.error is not None:
        return web.json_response(route.error(status, message, code), status=status)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "code": code}}, status=status)
