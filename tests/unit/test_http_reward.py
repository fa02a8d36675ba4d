"""Reward servers: what is sent, which failures are tried again, and that none becomes a zero."""

import asyncio
import contextlib
import gc
import json
import math
import random
import socket
import warnings
import zlib
from email.utils import formatdate
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web

from gcore.config.rewards import HttpReward
from gcore.rewarding.http import HttpSource, _retry_after_s
from gcore.rewarding.rewarder import WeightedRewarder
from gcore.types import RewardError, UserError
from tests.unit.test_rewarding import group_of

GOOD = {"rewards": [1.0, 0.0]}


class Server:
    """Answers with one script item a request, the last one for ever: JSON, (status, text, headers) or a coroutine."""

    def __init__(self, *script):
        self.script = list(script)
        self.requests: list[web.Request] = []
        self.bodies: list[dict] = []
        self.peers: list[tuple] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append(request)
        self.peers.append(request.transport.get_extra_info("peername"))
        self.bodies.append(json.loads(await request.read() or "null"))
        item = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if callable(item):
            item = await item(request)
        if isinstance(item, web.StreamResponse):
            return item
        if isinstance(item, tuple):
            status, text, *headers = item
            return web.Response(status=status, text=text, headers=headers[0] if headers else None)
        return web.Response(text=json.dumps(item), content_type="application/json")


@contextlib.asynccontextmanager
async def served(server: Server):
    """Its address."""
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def http(server: Server, scenario, path="/score", **spec):
    """Runs `await scenario(blend, source)` against the server; the source is closed at the end."""

    async def main():
        longest_retry_after_s = spec.pop("longest_retry_after_s", 60.0)
        async with served(server) as url:
            source = HttpSource(HttpReward(name="remote", url=f"{url}{path}", **spec))
            source.client.first_delay_s, source.client.longest_retry_after_s = 0.001, longest_retry_after_s
            try:
                return await asyncio.wait_for(scenario(WeightedRewarder([source]), source), 60)
            finally:
                source.close()

    return asyncio.run(main())


def score(server: Server, group=None, **spec):
    """(rewards or the error's text, counts)"""

    async def scenario(blend, source):
        try:
            scored = await blend.reward(group or group_of("2", "3", answer="2"))
        except RewardError as error:
            return str(error), blend.take_counts()
        return [s.reward for s in scored], blend.take_counts()

    return http(server, scenario, **spec)


# --- servers that send without end


def endless(sent: list[int], status: int = 200):
    """A body that ends only when the client closes the connection. `sent`: its bytes, by request."""

    async def handle(request):
        response = web.StreamResponse(status=status, headers={"Content-Type": "application/json"})
        await response.prepare(request)
        sent.append(0)
        with contextlib.suppress(ConnectionError):
            while sent[-1] < 1 << 30:
                await response.write(b"[" * (1 << 20))
                sent[-1] += 1 << 20
        return response

    return handle


def test_an_endless_body_is_retried_and_then_an_error():
    sent: list[int] = []
    said, counts = score(Server(endless(sent)), attempts=2)
    assert "/score sent more than 8 MB; expected JSON of at most that size (tried 2 times)" in said
    assert counts == {"http_retries": 1}
    assert len(sent) == 2 and max(sent) < 64 << 20  # what fits in the buffers of the connection is sent, too
    assert score(Server(endless([]), GOOD), attempts=2) == ([1.0, 0.0], {"http_retries": 1})


def test_a_small_body_that_expands_is_read_up_to_the_limit(monkeypatch):
    """A gigabyte in a megabyte: only a part of it is ever in memory."""
    pack = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = b"".join(pack.compress(bytes(1 << 24)) for _ in range(64)) + pack.flush()
    longest: list[int] = []
    read = aiohttp.StreamReader.feed_data
    monkeypatch.setattr(aiohttp.StreamReader, "feed_data", lambda *args: longest.append(len(args[1])) or read(*args))

    async def handle(request):
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    said, _ = score(Server(handle), attempts=1)
    assert "/score sent more than 8 MB; expected JSON of at most that size (tried 1 times)" in said
    assert len(packed) < 2 << 20 and max(longest) < 300 << 20 and sum(longest) < 600 << 20


@pytest.mark.parametrize(("status", "tries"), [(500, 2), (404, 1)])
def test_an_endless_error_is_an_error(status, tries):
    sent: list[int] = []
    said, _ = score(Server(endless(sent, status)), attempts=2)
    assert f"answered {status}, with more than 8 MB" in said
    assert len(sent) == tries and max(sent) < 64 << 20


def test_an_answer_below_the_limit_is_read():
    big = {**GOOD, "note": "x" * (7 << 20)}
    assert score(Server(big)) == ([1.0, 0.0], {})


def test_an_endless_body_before_the_run_is_an_answer():
    sent: list[int] = []
    http(Server(endless(sent)), lambda blend, source: source.reach())
    assert len(sent) == 1 and sent[0] < 64 << 20


# --- what is sent, what comes back


def test_prompts_completions_and_the_answer_are_sent():
    server = Server(GOOD)
    rewards, counts = score(server, group_of("2", "3", prompt="1+1=", answer="2", level=4))
    assert (rewards, counts) == ([1.0, 0.0], {})
    assert server.bodies == [{"prompts": ["1+1=", "1+1="], "completions": ["2", "3"], "answer": ["2", "2"]}]
    assert server.requests[0].method == "POST"
    assert server.requests[0].content_type == "application/json"
    assert "Authorization" not in server.requests[0].headers


def test_named_columns_alone_are_sent():
    server = Server(GOOD)
    score(server, group_of("2", "3", prompt="1+1=", answer="2", level=4, other=[5]), columns=["level", "other"])
    assert server.bodies[0].keys() == {"prompts", "completions", "level", "other"}
    assert (server.bodies[0]["level"], server.bodies[0]["other"]) == ([4, 4], [[5], [5]])


def test_no_answer_column_nothing_sent_along():
    server = Server(GOOD)
    score(server, group_of("2", "3", prompt="1+1="))
    assert server.bodies[0].keys() == {"prompts", "completions"}


def test_messages_in_messages_out():
    server = Server([0.5])
    messages = [{"role": "user", "content": "1+1="}]
    assert score(server, group_of("2", prompt=messages)) == ([0.5], {})  # a bare list is an answer, too
    assert server.bodies[0]["prompts"] == [messages]
    assert server.bodies[0]["completions"] == [[{"role": "assistant", "content": "2"}]]


def test_other_lists_are_logged_and_null_does_not_apply():
    server = Server({"rewards": [1, None], "length": [3, 4], "note": ["a", "b"], "version": 7, "short": [1]})

    async def scenario(blend, source):
        return await source.answer(group_of("2", "3"))

    answer = http(server, scenario)
    assert answer.values == [1.0, None]
    assert answer.extras == [{"length": 3.0}, {"length": 4.0}]


# --- failures that are tried again


def test_broken_twice_then_fine():
    server = Server((500, "oops"), (503, "oops"), GOOD)
    assert score(server) == ([1.0, 0.0], {"http_retries": 2})
    assert len(server.requests) == 3
    assert server.bodies[0] == server.bodies[1] == server.bodies[2]


def test_broken_for_good():
    server = Server((502, "bad\ngateway"))
    said, counts = score(server, attempts=3)
    assert "reward 'remote', prompt 70: http://127.0.0.1:" in said
    assert "/score answered 502: 'bad\\ngateway' (tried 3 times)" in said
    assert counts == {"http_retries": 2}
    assert len(server.requests) == 3


def test_retry_after_is_honoured(monkeypatch):
    """The pause that the client sleeps is what the server asked for and at most its own first pause on top."""
    server, slept = Server((429, "slow down", {"Retry-After": "50"}), GOOD), []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr("gcore.rewarding.http.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    assert score(server) == ([1.0, 0.0], {"http_retries": 1})
    (pause,) = slept
    assert 50 < pause <= 51


def test_retry_after_has_a_cap():
    server = Server((429, "", {"Retry-After": "3600"}), GOOD)
    assert score(server, longest_retry_after_s=0.01) == ([1.0, 0.0], {"http_retries": 1})
    server = Server((429, "quota"))
    said, counts = score(server, attempts=2)
    assert "answered 429: 'quota' (tried 2 times)" in said
    assert counts == {"http_retries": 1}


def test_retry_after_counts_once():
    server = Server((429, "", {"Retry-After": "3600"}), (200, "garbage"), (503, "", {"Retry-After": "7"}), GOOD)
    asked = []

    async def scenario(blend, source):
        pause = source.client.delay_s
        source.client.delay_s = lambda turn, after_s: asked.append((turn, after_s)) or pause(turn, after_s)
        await blend.reward(group_of("2", "3"))

    http(server, scenario, longest_retry_after_s=0.001)
    assert asked == [(1, 3600.0), (2, 0.0), (3, 7.0)]


def test_retry_after_in_seconds_or_as_a_date(monkeypatch):
    assert _retry_after_s("7") == 7.0
    monkeypatch.setattr("gcore.rewarding.http.time", SimpleNamespace(time=lambda: 1000.0))
    assert _retry_after_s(formatdate(1060, usegmt=True)) == 60.0
    assert [_retry_after_s(text) for text in ("", "soon", "-3", formatdate(0), "nan")] == [0.0] * 5


def test_a_server_that_hangs():
    async def hang(request):
        await asyncio.sleep(60)

    server = Server(hang, GOOD)
    assert score(server, timeout_s=0.2) == ([1.0, 0.0], {"http_retries": 1, "timeouts": 1})
    server = Server(hang)
    said, counts = score(server, timeout_s=0.1, attempts=2)
    assert "no answer from http://127.0.0.1:" in said and "/score in 0.1 s (key: rewards.http.0.timeout_s)" in said
    assert "(tried 2 times)" in said
    assert counts == {"http_retries": 1, "timeouts": 2}
    assert len(server.requests) == 2


def test_a_body_that_never_ends_is_a_time_out():
    async def trickle(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(600):
            await response.write(b"[")
            await asyncio.sleep(0.05)
        return response

    said, counts = score(Server(trickle), timeout_s=0.2, attempts=1)
    assert "in 0.2 s" in said
    assert counts == {"timeouts": 1}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, "<html>hello"), "returned '<html>hello'; expected JSON"),
        ((200, ""), "returned ''; expected JSON"),
        ((200, "[" * 100_000), "expected JSON"),
        ({"rewards": [1.0]}, "returned 1 rewards for 2 completions: {'rewards': [1.0]}"),
        ([1.0, 2.0, 3.0], "returned 3 rewards for 2 completions"),
        ({"rewards": [1.0, math.nan]}, "returned nan in {'rewards': [1.0, nan]}; expected finite numbers"),
        ((200, '{"rewards": [1e999, 1]}'), "returned inf in"),
        ((200, f"[1, {'9' * 400}]"), "OverflowError"),
        ({"rewards": ["1", "0"]}, "returned '1' in {'rewards': ['1', '0']}; expected numbers"),
        ({"rewards": "10"}, "returned {'rewards': '10'}; expected a list of 2 numbers"),
        ({"scores": [1.0, 0.0]}, "returned {'scores': [1.0, 0.0]}; expected a list, or a dict with 'rewards'"),
        (1.0, "returned 1.0; expected a list of 2 numbers"),
        (None, "returned None; expected a list of 2 numbers"),
    ],
)
def test_garbage_is_a_failed_try(answer, message):
    server = Server(answer)
    said, counts = score(server, attempts=2)
    assert "reward 'remote', prompt 70: http://127.0.0.1:" in said
    assert message in said and "(tried 2 times)" in said
    assert counts == {"http_retries": 1}
    assert len(server.requests) == 2
    assert score(Server(answer, GOOD)) == ([1.0, 0.0], {"http_retries": 1})


def test_no_server_at_the_url():
    with socket.socket() as taken:  # bound, so that no other process gets the port, but not listening
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/score"
        source = HttpSource(HttpReward(name="remote", url=url, attempts=3))
        source.client.first_delay_s = 0.001
        blend = WeightedRewarder([source])

        async def main():
            with pytest.raises(RewardError, match=rf"{url}: ClientConnectorError: .*\(tried 3 times\)"):
                await blend.reward(group_of("2"))
            source.close()

        asyncio.run(main())
    assert blend.take_counts() == {"http_retries": 2}


def test_a_server_that_hangs_up():
    async def hang_up(request):
        request.transport.close()
        return web.Response()

    assert score(Server(hang_up, GOOD)) == ([1.0, 0.0], {"http_retries": 1})


def test_pauses_grow_with_jitter_up_to_a_cap():
    source = HttpSource(HttpReward(name="remote", url="http://h"))
    for turn, most in ((1, 0.25), (2, 0.5), (3, 1.0), (6, 8.0), (7, 10.0), (5000, 10.0)):
        delays = [source.client.delay_s(turn, 0.0) for _ in range(200)]
        assert all(most / 2 <= pause <= most for pause in delays)
        assert len(set(delays)) == 200
    assert 5.125 <= source.client.delay_s(1, 5.0) <= 5.25
    assert 60.125 <= source.client.delay_s(1, 3600.0) <= 60.25
    random.seed(0)
    first = source.client.delay_s(1, 0.0)
    random.seed(0)
    assert source.client.delay_s(1, 0.0) != first  # the run's seeds have no part in it


# --- failures that are not


@pytest.mark.parametrize("status", [400, 401, 404, 408, 422])
def test_other_4xx_fail_at_once(status):
    server = Server((status, "no such model " + "x" * 1000))
    said, counts = score(server)
    assert f"/score answered {status}: 'no such model xxx" in said and "xxx..." in said
    key = "token_env" if status == 401 else "url"
    assert f"(key: rewards.http.0.{key}) (not retried)" in said
    assert len(said) < 400
    assert counts == {}
    assert len(server.requests) == 1


def test_redirects_are_not_followed(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "s3cr3t")
    server = Server((307, "", {"Location": "/elsewhere"}), GOOD)
    said, _ = score(server, token_env="REWARD_TOKEN")
    assert "answered 307" in said
    assert len(server.requests) == 1


@pytest.mark.parametrize("value", [{1, 2}, math.nan, b"x", object()])
def test_columns_that_json_cannot_hold(value):
    server = Server(GOOD)
    said, counts = score(server, group_of("2", "3", picture=value), columns=["picture"])
    assert "reward 'remote', prompt 70: picture cannot be sent as JSON" in said
    assert (counts, server.requests) == ({}, [])


def test_a_row_without_the_column():
    server = Server(GOOD)
    said, counts = score(server, group_of("2", "3", answer="2"), columns=["level"])
    assert "the row has no column level (key: rewards.http.0.columns)" in said
    assert (counts, server.requests) == ({}, [])


# --- the token


def test_the_token_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "s3cr3t-s3cr3t\n")

    async def tell(request):
        return (int(request.path[1:]), f"who is {request.headers['Authorization']}?")

    for status, message in ((403, "answered 403"), (500, "answered 500"), (200, "expected JSON")):
        server = Server(tell)
        said, _ = score(server, path=f"/{status}", token_env="REWARD_TOKEN", attempts=2)
        assert server.requests[0].headers["Authorization"] == "Bearer s3cr3t-s3cr3t"
        assert message in said and "who is Bearer ***?" in said and "s3cr3t" not in said

    async def repeat(request):
        return {"rewards": [request.headers["Authorization"]], "Bearer s3cr3t-s3cr3t": 1}

    said, _ = score(Server(repeat), token_env="REWARD_TOKEN", attempts=1)
    assert "returned 1 rewards for 2 completions: {'rewards': ['Bearer ***'], 'Bearer ***': 1}" in said


def test_a_token_that_is_a_number_leaves_rewards_alone(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "25")
    assert score(Server({"rewards": [0.25, 25]}), token_env="REWARD_TOKEN") == ([0.25, 25.0], {})


def test_a_token_that_is_gone_is_not_tried_again(monkeypatch):
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    server = Server(GOOD)
    said, counts = score(server, token_env="REWARD_TOKEN")
    assert "the environment variable REWARD_TOKEN is not set" in said and "(not retried)" in said
    assert (counts, server.requests) == ({}, [])


def test_the_query_is_sent_and_not_shown():
    server = Server((404, "gone"))
    said, _ = score(server, path="/score?key=s3cr3t")
    assert server.requests[0].query["key"] == "s3cr3t"
    assert "/score answered 404" in said and "s3cr3t" not in said

    async def babble(request):
        request.transport.write(b"hm\r\n\r\n")
        await asyncio.sleep(0.05)
        request.transport.close()
        return (200, "")

    said, _ = score(Server(babble), path="/score?key=s3cr3t", attempts=1)
    assert "/score: ClientResponseError: 400" in said and "s3cr3t" not in said  # aiohttp quotes the address


@pytest.mark.parametrize(
    "body",
    [
        "no such model",
        {"error": {"message": "no such model", "type": "x"}},
        {"error": "no such model", "code": 404},
        {"object": "error", "message": "no such model"},
        {"detail": "no such model"},
    ],
)
def test_a_complaint_in_json_is_unwrapped(body):
    said, _ = score(Server((404, body if isinstance(body, str) else json.dumps(body))))
    assert "/score answered 404: 'no such model' (key: rewards.http.0.url)" in said


@pytest.mark.parametrize("body", ['{"detail": [{"loc": 3}]}', '{"error": ""}', "7", '["x"]', '{"error": {"code": 1}}'])
def test_a_complaint_in_other_json_is_shown_as_it_is(body):
    assert f"/score answered 404: {body!r} (key" in score(Server((404, body)))[0]


# --- before the run


def checked(dataset=("prompt", "answer"), **spec):
    HttpSource(HttpReward(**{"name": "remote", "url": "https://host/score", **spec}), "rewards.http.1").check(dataset)


def test_check_passes():
    checked()
    checked(("answer", "level"), url="http://[::1]:8000", columns=["level"])


@pytest.mark.parametrize("url", ["host:80/score", "ftp://host/x", "http://", "http://host:port", "http://[::1", ""])
def test_check_refuses_urls(url):
    with pytest.raises(UserError, match=r"rewards\.http\.1\.url: got .*; expected http://HOST"):
        checked(url=url)


def test_check_refuses_passwords_in_the_url():
    with pytest.raises(UserError, match=r"rewards\.http\.1\.url: got a user name or password in the URL") as caught:
        checked(url="http://me:s3cr3t@host/")
    assert "s3cr3t" not in str(caught.value)


def test_check_refuses_a_token_that_is_not_there(monkeypatch):
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    with pytest.raises(UserError, match=r"rewards\.http\.1\.token_env: the environment variable REWARD_TOKEN is not"):
        checked(token_env="REWARD_TOKEN")
    monkeypatch.setenv("REWARD_TOKEN", "  ")
    with pytest.raises(UserError, match="is not set"):
        checked(token_env="REWARD_TOKEN")
    monkeypatch.setenv("REWARD_TOKEN", "s3c\nr3t")
    with pytest.raises(UserError, match="invalid in a header") as caught:
        checked(token_env="REWARD_TOKEN")
    assert "s3c" not in str(caught.value)
    monkeypatch.setenv("REWARD_TOKEN", "s3cr3t")
    checked(token_env="REWARD_TOKEN")


def test_check_refuses_columns():
    with pytest.raises(UserError, match=r"rewards\.http\.1\.columns: no column level; the dataset has answer, prompt"):
        checked(columns=["level"])
    with pytest.raises(UserError, match=r"columns: completions is reserved by G-Core"):
        checked(("prompt", "completions"), columns=["completions"])


# --- many at once, and the end


def test_so_many_requests_at_a_time_and_no_more():
    inside, most = 0, 0
    full = asyncio.Event()

    async def work(request):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside == 3:
            full.set()
        await full.wait()  # no request returns before three are inside
        await asyncio.sleep(0.01)  # time for a fourth to come
        inside -= 1
        return [1.0]

    server = Server(work)

    async def scenario(blend, source):
        return await asyncio.gather(*(blend.reward(group_of("2")) for _ in range(12)))

    assert [scored[0].reward for scored in http(server, scenario, max_concurrent=3)] == [1.0] * 12
    assert most == 3
    assert len(server.requests) == 12


def test_a_pause_holds_no_slot():
    """With one slot, the second request is served while the first waits for its second try."""
    order = []

    async def work(request):
        completion = server.bodies[-1]["completions"][0]
        order.append(completion)
        return (503, "", {"Retry-After": "1"}) if order == ["a"] else [1.0]

    server = Server(work)

    async def scenario(blend, source):
        return await asyncio.gather(*(blend.reward(group_of(text)) for text in "ab"))

    http(server, scenario, max_concurrent=1)
    assert order == ["a", "b", "a"]


def test_one_session_closed_in_silence():
    server = Server([1.0])
    sessions = []

    async def scenario(blend, source):
        for _ in range(3):
            await blend.reward(group_of("2"))
            sessions.append(source.client._session)
        problems = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        source.close()
        source.close()
        assert sessions[0].closed and sessions[0] is sessions[1] is sessions[2]
        sessions.clear()
        gc.collect()
        await asyncio.sleep(0.01)
        assert problems == []
        assert (await blend.reward(group_of("2")))[0].reward == 1.0  # closed is not the end: it opens again
        return len(set(server.peers[:3])), len(set(server.peers))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert http(server, scenario) == (1, 2)  # connections
        gc.collect()


def test_another_loop_gets_a_session_of_its_own():
    source = HttpSource(HttpReward(name="remote", url="http://127.0.0.1:9/"))

    async def session():
        return source.client.connection()[0]

    first, second = asyncio.run(session()), asyncio.run(session())
    assert first is not second
    assert first.closed and not second.closed
    source.close()
    assert second.closed


def test_close_before_any_request():
    HttpSource(HttpReward(name="remote", url="http://h")).close()
