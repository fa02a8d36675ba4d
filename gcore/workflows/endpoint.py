"""An endpoint of the policy by HTTP, for agents that only know HTTP: `ctx.serve(prompt)` of a workflow.

    workflow ──base_url, api_key──> agent ──POST BASE_URL/chat/completions──> Session ──> engines of the policy
                                                                                 └── records tokens and logprobs
    workflow <── session.rollout

A session is one sample (session.py): its identity is in its address, its token in api_key. The paths and bodies of an
address are those of the dialects (dialects/). Every controller has a server. By default it listens on a free port of
the loopback interface, while sessions are open. With `endpoint.port` the first controller of each node also listens on
that port, for the whole run, and passes requests on to the controllers of their sessions:

    agent ──HOST:PORT/c3-p70-s0-9f3c/v1/...──> first controller of the node ──loopback──> controller 3
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Sequence

import aiohttp
import psutil
from aiohttp import web

from gcore.config.run import EndpointSettings
from gcore.protocols import ControllerGroup
from gcore.types import SessionLeft, UserError
from gcore.workflows.dialects import ROUTES
from gcore.workflows.dialects.form import Ask, BadRequest, Body, Deltas, Route, Turn, encoded
from gcore.workflows.session import Session

LOOPBACK = "127.0.0.1"
MAX_BODY = 32 * 2**20  # bytes
OF_A_HOP = ("host", "connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade")  # not passed on
MODEL = {
    **{"id": "policy", "object": "model", "created": 0, "owned_by": "gcore"},
    **{"type": "model", "display_name": "policy", "created_at": "1970-01-01T00:00:00Z"},
}
MODELS = {"object": "list", "data": [MODEL], "has_more": False, "first_id": "policy", "last_id": "policy"}
EXPECTED = ", ".join(f"POST {path}" for path in ROUTES) + " or GET models, at session.base_url"


class Endpoint:
    """The server of one controller. Without `endpoint.port` it runs while at least one session is open."""

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0  # of this server; the sessions' address may have another one
        self._lock = asyncio.Lock()
        self._rank = 0
        self._peers: dict[int, int] = {}  # of the controllers of this node: the ports of their servers
        self._http: aiohttp.ClientSession | None = None  # to pass requests on

    # ---- addresses ------------------------------------------------------------------------------------------------

    async def join(self, group: ControllerGroup) -> None:
        """Call once before the first session, on every controller. With `endpoint.port` the server starts here."""
        self._rank = group.rank
        if not self._settings.port:
            return
        await self._start(LOOPBACK, 0, None)
        nodes = await group.all_gather("servers of endpoints", (socket.gethostname(), self._port))
        self._peers = {rank: port for rank, (node, port) in enumerate(nodes) if node == nodes[self._rank][0]}
        error = ""
        if self._rank == min(self._peers):
            try:
                assert self._runner is not None
                await self._listen(self._runner, self._host(), self._settings.port, self._tls())
            except UserError as unable:
                error = str(unable)
        errors = await group.all_gather("ports of endpoints", error)
        if error := next(filter(None, errors), ""):
            await self.close()
            raise UserError(error)

    async def close(self) -> None:
        runner, self._runner, http, self._http = self._runner, None, self._http, None
        if http is not None:
            await http.close()
        if runner is not None:
            await runner.cleanup()

    def _host(self) -> str:
        """The address of the interface."""
        addresses = psutil.net_if_addrs().get(self._settings.host)
        if addresses is None:
            return self._settings.host
        found = [address.address for address in addresses if address.family == socket.AF_INET]
        if not found:
            raise UserError(f"endpoint.host={self._settings.host}: this interface has no IPv4 address; expected one")
        return found[0]

    def _tls(self) -> ssl.SSLContext | None:
        certificate, key = self._settings.tls_certificate, self._settings.tls_key
        if certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(certificate, key)
        except (OSError, ValueError) as error:
            raise UserError(
                f"endpoint.tls_certificate={certificate}, endpoint.tls_key={key}: {error}; expected files in PEM"
            ) from None
        return context

    # ---- sessions -------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def open(self, sessions: Sequence[Session]) -> AsyncIterator[None]:
        names = [f"c{self._rank}-p{s.prompt.id}-s{s.sibling}-{secrets.token_hex(4)}" for s in sessions]
        watch: asyncio.Task[None] | None = None
        try:
            async with self._lock:
                self._sessions |= dict(zip(names, sessions, strict=True))
                if self._runner is None:
                    await self._start(self._host(), 0, self._tls())
            scheme = "http" if self._settings.tls_certificate is None else "https"
            host, port = self._host(), self._settings.port or self._port
            for name, session in zip(names, sessions, strict=True):
                session.base_url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/{name}/v1"
                session.api_key = secrets.token_urlsafe(24)
            async with asyncio.timeout(None) as scope:
                watch = asyncio.create_task(self._watch(sessions, scope))
                yield
        except Exception as error:
            for session in sessions:
                if session.failure is not None:  # what the agent raised is a consequence of it
                    raise session.failure from error
            raise
        finally:
            if watch is not None:
                watch.cancel()
            for name in names:
                self._sessions.pop(name, None)
            async with self._lock:
                if not self._sessions and not self._settings.port:
                    await self.close()
        for session in sessions:
            if session.failure is not None:
                raise session.failure

    async def _watch(self, sessions: Sequence[Session], scope: asyncio.Timeout) -> None:
        """Ends the block of the workflow if a session was left by its agent."""
        limit = self._settings.idle_timeout_s
        while True:
            longest = max(sessions, key=Session.idle_s, default=None)
            if longest is None:
                return
            if (left := limit - longest.idle_s()) > 0:
                await asyncio.sleep(left)
                continue
            longest.failure = SessionLeft(
                f"sample {longest.sibling}: its agent has sent no request for {limit:g} s "
                f"(endpoint.idle_timeout_s, prompt {longest.prompt.id})"
            )
            scope.reschedule(asyncio.get_running_loop().time())
            return

    async def _start(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{session}/{path:.*}", self._serve)
        app.router.add_route("*", "/{path:.*}", self._serve)
        # A request that its client gave up is cancelled.
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        try:
            await runner.setup()
            await self._listen(runner, host, port, tls)
        except BaseException:  # also if the workflow is cancelled: the next one starts it again
            await runner.cleanup()
            raise
        self._runner, self._port = runner, runner.addresses[0][1]

    async def _listen(self, runner: web.AppRunner, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        try:
            await web.TCPSite(runner, host, port, ssl_context=tls).start()
        except OSError as error:
            what = f"endpoint.host={self._settings.host}, endpoint.port={port}"
            raise UserError(f"{what}: cannot listen there: {error.strerror or error}") from None

    # ---- requests -------------------------------------------------------------------------------------------------

    async def _pass_on(self, request: web.Request, port: int) -> web.StreamResponse:
        """To another controller of this node, which checks the token."""
        if self._http is None:
            without_limits = aiohttp.ClientTimeout(total=None)
            connector = aiohttp.TCPConnector(limit=0)
            self._http = aiohttp.ClientSession(timeout=without_limits, connector=connector, auto_decompress=False)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in OF_A_HOP}
        url = f"http://{LOOPBACK}:{port}{request.raw_path}"
        body = request.content if request.body_exists else None
        try:
            async with self._http.request(request.method, url, headers=headers, data=body) as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in OF_A_HOP}
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
        except aiohttp.ClientConnectionError as error:
            return _error(None, 502, f"the controller of this session does not answer: {error}", "server_error")
        await response.write_eof()
        return response

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        rank = request.match_info.get("session", "").partition("-")[0].removeprefix("c")
        if rank.isdecimal() and int(rank) != self._rank and int(rank) in self._peers:
            return await self._pass_on(request, self._peers[int(rank)])
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
        session = self._sessions.get(request.match_info.get("session", ""))
        if session is None:
            return _error(route, 404, "no such session: its workflow has ended", "session_not_found")
        headers = request.headers
        given = headers.get("x-api-key") or headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not secrets.compare_digest(given.encode(errors="surrogateescape"), session.api_key.encode()):
            return _error(route, 401, "the token (api_key) does not belong to this base_url", "invalid_api_key")
        return session

    async def _answer(self, request: web.Request, session: Session, route: Route) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            body, ask = await _read(request, route)
            if route.counts:
                return web.json_response(route.answer(session.count(ask), body))
            if not ask.stream or route.stream is None:
                return web.json_response(route.answer(await session.turn(ask), body))
            deltas = Deltas(route.stream(body))

            async def so_far(turn: Turn) -> None:
                if not response.prepared:  # errors before the first piece have a status of their own
                    await response.prepare(request)
                await response.write(encoded(deltas.so_far(turn)))

            turn = await session.turn(ask, so_far)
            if not response.prepared:
                await response.prepare(request)
            await response.write(encoded(deltas.end(turn)))
        except web.HTTPException:  # a body that is too large
            raise
        except ConnectionError:  # the agent has gone; what was sampled for it is recorded
            return response
        except UserError as error:
            return _error(route, 400, str(error), getattr(error, "code", "invalid_request_error"))
        except Exception as error:  # an engine died, or an error in G-Core: the workflow raises it
            session.failure = session.failure or error
            if response.prepared:
                return response
            return _error(route, 500, f"{type(error).__name__}: {error}", "server_error")
        await response.write_eof()
        return response


async def _read(request: web.Request, route: Route) -> tuple[Body, Ask]:
    """What an agent's library makes wrong is its own error, wherever it is noticed."""
    try:
        body: Body = json.loads(await request.read())
        if not isinstance(body, dict):
            raise BadRequest("expected a JSON object")
        json.dumps(body, ensure_ascii=False).encode()  # half a character is no text
        return body, route.read(body)
    except (UserError, web.HTTPException):
        raise
    except Exception as error:
        raise BadRequest(f"the body is not valid: {type(error).__name__}: {error}") from error


def _error(route: Route | None, status: int, message: str, code: str) -> web.Response:
    if route is not None and route.error is not None:
        return web.json_response(route.error(status, message, code), status=status)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "code": code}}, status=status)
