"""Who reaches the endpoint: one address for all controllers of a node, tokens, TLS, and sessions that agents leave."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import ValidationError

from bench import sessions
from gcore.config.advice import warnings
from gcore.config.run import EndpointSettings
from gcore.controller.prompt_ledger import FAILURES
from gcore.controller.run_prompts import reason_of, run_workflow
from gcore.protocols import Rendezvous
from gcore.runtime.local import Hub, LocalGroup
from gcore.types import SessionLeft, UserError, WorkflowError
from gcore.workflows.dialects import ROUTES
from tests.unit.test_endpoint import World, post, streamed, user
from tests.unit.test_evaluation import config_of


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_controllers(work: Any, *worlds: World) -> Any:
    """`work` after all of them have joined."""

    async def main() -> Any:
        hub = Hub(len(worlds))
        groups = [LocalGroup(Rendezvous(rank, len(worlds), None, hub)) for rank in range(len(worlds))]
        try:
            await asyncio.gather(*(w.endpoint.join(g) for w, g in zip(worlds, groups, strict=True)))
            return await work(*worlds)
        finally:
            for world in worlds:
                await world.endpoint.close()

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_the_sessions_of_all_controllers_have_one_address():
    port = free_port()
    worlds = [World(text, port=port) for text in ("1", "2", "3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8")]
    worlds[2].long(100)

    async def work(*worlds: World) -> None:
        async with contextlib_of(worlds) as sessions, aiohttp.ClientSession() as http:
            assert [s.base_url.split("-")[0] for s in sessions] == [f"http://127.0.0.1:{port}/c{i}" for i in range(3)]
            for i, text in enumerate("12"):
                status, answer = await post(http, sessions[i], messages=[user("5")])
                assert (status, answer["choices"][0]["message"]["content"]) == (200, text)
            _, events = await streamed(http, sessions[2], messages=[user("5")])
            deltas = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
            assert "".join(deltas) == worlds[2].engines.texts[0] and len([d for d in deltas if d]) > 1
            assert [s.rollout.text for s in sessions[:2]] == ["1", "2"]
            assert len({s.api_key for s in sessions}) == 3
            for session in sessions:
                for other in sessions:
                    status, answer = await post(http, session, token=other.api_key, messages=[])
                    assert status == (400 if other is session else 401)
            sessions[1].base_url = sessions[1].base_url.replace("/c1-", "/c7-")
            assert (await post(http, sessions[1], messages=[user("5")]))[0] == 404

    on_controllers(work, *worlds)


class contextlib_of:
    """One session of each world."""

    def __init__(self, worlds: Any) -> None:
        self._contexts = [world.ctx.serve(world.prompt, 1) for world in worlds]

    async def __aenter__(self) -> list[Any]:
        return [(await context.__aenter__())[0] for context in self._contexts]

    async def __aexit__(self, *error: Any) -> None:
        for context in self._contexts:
            await context.__aexit__(None, None, None)


def test_a_request_that_was_passed_on_is_cancelled_with_its_client():
    port = free_port()
    worlds = [World("1", port=port), World("2", port=port)]
    worlds[1].engines.hold = asyncio.Event()

    async def work(*worlds: World) -> None:
        async with contextlib_of(worlds) as sessions, aiohttp.ClientSession() as http:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(post(http, sessions[1], messages=[user("5")]), 0.3)
            while not worlds[1].engines.cancelled:
                await asyncio.sleep(0.01)
            worlds[1].engines.hold.set()
            assert (await post(http, sessions[1], messages=[user("5")]))[0] == 200
            assert sessions[1].rollout.segments == ()

    on_controllers(work, *worlds)


def test_a_port_in_use_ends_the_start_on_every_controller():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        worlds = [World("1", port=port), World("1", port=port)]

        async def main() -> list[Any]:
            hub = Hub(2)
            groups = [LocalGroup(Rendezvous(rank, 2, None, hub)) for rank in range(2)]
            joined = (w.endpoint.join(g) for w, g in zip(worlds, groups, strict=True))
            return await asyncio.gather(*joined, return_exceptions=True)

        errors = asyncio.run(main())
    for error in errors:
        assert isinstance(error, UserError) and f"endpoint.port={port}: cannot listen there" in str(error)


def test_an_interface_by_its_name():
    world = World("1", host="lo")

    async def agent(http: Any, session: Any) -> None:
        assert session.base_url.startswith("http://127.0.0.1:")
        assert (await post(http, session, messages=[user("5")]))[0] == 200

    world.run(agent)
    with pytest.raises(UserError, match=r"endpoint.host=nowhere.invalid.*cannot listen there"):
        World("1", host="nowhere.invalid").run(agent)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate")
@pytest.mark.parametrize("has_port", [False, True])
def test_tls(tmp_path: Path, has_port: bool):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*made, *names, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    files = {"tls_certificate": str(certificate), "tls_key": str(key)}
    worlds = [World("1", **files, port=free_port() if has_port else 0) for _ in range(2 if has_port else 1)]
    for world in worlds[1:]:
        world.endpoint._settings = worlds[0].endpoint._settings

    async def work(*worlds: World) -> None:
        trust = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(certificate)))
        async with contextlib_of(worlds) as sessions, aiohttp.ClientSession(connector=trust) as http:
            for session in sessions:
                assert session.base_url.startswith("https://127.0.0.1:")
                assert (await post(http, session, messages=[user("5")]))[0] == 200
                session.base_url = session.base_url.replace("https", "http")
                with pytest.raises(aiohttp.ClientError):
                    await post(http, session, messages=[user("5")])

    on_controllers(work, *worlds)
    bad = World("1", tls_certificate=str(key), tls_key=str(key))
    with pytest.raises(UserError, match=r"endpoint.tls_certificate=.*expected files in PEM"):
        bad.run(lambda *_: asyncio.sleep(0))


# --- sessions that their agents leave


def test_a_session_that_its_agent_leaves_is_a_failure_with_a_name():
    """The workflow waits for an agent that never comes back."""
    world = World("1", idle_timeout_s=0.2)
    ended = []

    async def workflow(ctx: Any, prompt: Any) -> Any:
        async with ctx.serve(prompt, 2) as sessions, aiohttp.ClientSession() as http:
            await post(http, sessions[0], messages=[user("5")])
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(len(world.endpoint._sessions))

    async def main() -> None:
        await run_workflow(workflow, world.shared, world.prompt)

    with pytest.raises(SessionLeft, match=r"no request for 0.2 s \(endpoint.idle_timeout_s, prompt 7\)") as found:
        asyncio.run(asyncio.wait_for(main(), 30))
    assert ended == [2] and not world.endpoint._sessions
    assert reason_of(found.value) == "session_left" and reason_of(found.value) in FAILURES
    assert reason_of(WorkflowError("x")) == "workflow_error"


def test_a_session_whose_request_takes_long_or_whose_rollout_was_taken_is_not_left():
    world = World("1", idle_timeout_s=0.15)
    world.engines.hold = asyncio.Event()

    async def agent(http: Any, session: Any) -> str:
        asyncio.get_running_loop().call_later(0.5, world.engines.hold.set)
        assert (await post(http, session, messages=[user("5")]))[0] == 200
        text = session.rollout.text
        await asyncio.sleep(0.5)  # a slow reward
        return text

    text, _ = world.run(agent)
    assert text == "1"


def test_a_workflow_that_swallows_the_end_of_a_session_fails_all_the_same():
    world = World("1", idle_timeout_s=0.1)

    async def agent(http: Any, session: Any) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "done"

    with pytest.raises(SessionLeft):
        world.run(agent)


# --- keys


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_an_endpoint_is_at_one_interface(host: str):
    with pytest.raises(ValidationError, match="expected the address or name of one interface"):
        EndpointSettings(host=host)


def test_keys_that_belong_together():
    with pytest.raises(ValidationError, match="expected both or none"):
        EndpointSettings(tls_key="key.pem")
    config = config_of()
    assert not [line for line in warnings(config) if "endpoint" in line]
    (line,) = [line for line in warnings(config.changed("endpoint", host="eth0")) if "endpoint" in line]
    assert "cross the network unencrypted" in line
    secure = config.changed("endpoint", host="eth0", tls_certificate="a", tls_key="b")
    assert not [line for line in warnings(secure) if "endpoint" in line]


def test_the_bench_of_sessions():
    """Without HTTP, in this process: all histories are recognised, and every token is counted."""
    args = argparse.Namespace(sessions=3, turns=2, tokens=20, think_s=0.0, step_s=0.001, clients=1)
    row = asyncio.run(sessions.serve("without HTTP", args, None))  # type: ignore[arg-type]
    assert (row["turns"], row["requests"]) == (6, 6) and row["kb_per_session"] is not None
    assert {v.get("path", "chat/completions") for v in sessions.VARIANTS.values()} <= set(ROUTES)
