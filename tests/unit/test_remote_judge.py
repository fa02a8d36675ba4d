"""Judges behind a URL: what a server is sent, which failures are tried again, and what is found before the run.

How verdicts are read, averaged and paired is the same for every judge: see test_judge.py.
"""

import asyncio
import datetime
import json
import logging
import socket
from types import SimpleNamespace

import pytest
from aiohttp import web
from pydantic import TypeAdapter

from gcore.config.base import Model
from gcore.config.judges import Judge, RemoteJudge
from gcore.config.load import dump_config
from gcore.config.tree import Config
from gcore.generation.noise import noise_key
from gcore.launch.build import Roles
from gcore.launch.build_rewarder import build_rewarder
from gcore.launch.machines import Machine
from gcore.launch.plan import make_plan
from gcore.launch.preflight import preflight
from gcore.rewarding.judge import JudgeSource
from gcore.rewarding.judge_backend import RemoteBackend
from gcore.rewarding.rewarder import WeightedRewarder
from gcore.types import RewardError, UserError
from tests.e2e.helpers import RECIPE
from tests.unit.test_http_reward import Server, served
from tests.unit.test_rewarding import group_of

POINTWISE = "{{ prompt }} {{ response }} good?"
PAIRWISE = "{{ prompt }} A: {{ response_a }} B: {{ response_b }}"


def says(text, finish="stop", **message):
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    return {"id": "1", "object": "chat.completion", "choices": [choice]}


def seed_of(key):
    return noise_key(3, "judge", *key)


def judge_at(url, **spec):
    mode = spec.get("mode", "pointwise")
    defaults = {"name": "wise", "url": url, "template": POINTWISE if mode == "pointwise" else PAIRWISE}
    judge, key = RemoteJudge(**{**defaults, **spec}), "rewards.judges.0"
    backend = RemoteBackend(judge, seed_of, key)
    backend.client.first_delay_s = 0.001
    return JudgeSource(judge, backend, key)


def asked(server, scenario, **spec):
    """Runs `await scenario(blend, source)` with a judge that the server speaks for."""

    async def main():
        async with served(server) as url:
            source = judge_at(f"{url}/v1", **spec)
            try:
                return await asyncio.wait_for(scenario(WeightedRewarder([source]), source), 60)
            finally:
                source.close()

    return asyncio.run(main())


def score(server, group=None, **spec):
    """(rewards or the error's text, counts)"""

    async def scenario(blend, source):
        try:
            scored = await blend.reward(group or group_of("2", prompt="1+1="))
        except RewardError as error:
            return str(error), blend.take_counts()
        return [s.reward for s in scored], blend.take_counts()

    return asked(server, scenario, **spec)


# --- what is sent, what comes back


def test_a_conversation_goes_out_and_a_verdict_comes_back():
    server = Server(says("I give it 7."))
    settings = {"system_prompt": "Be fair.", "temperature": 0.5, "top_p": 0.9, "max_response_length": 5}
    assert score(server, served_model="big", **settings) == ([7.0], {"verdicts": 1})
    request = server.requests[0]
    assert (request.method, request.path, request.content_type) == ("POST", "/v1/chat/completions", "application/json")
    assert "Authorization" not in request.headers
    assert server.bodies == [
        {
            "model": "big",
            "messages": [
                {"role": "system", "content": "Be fair."},
                {"role": "user", "content": "1+1= 2 good?"},
            ],
            "max_tokens": 5,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": seed_of(("wise", 70, 0, 0, 0)) % 2**31,
        }
    ]


def test_extra_parameters_and_those_a_server_does_not_know():
    server = Server(says("7"))
    extra = {"reasoning": {"effort": "low"}, "top_k": 20, "max_tokens": None, "temperature": None}
    score(server, extra=extra, seeds=False)
    assert server.bodies[0].keys() == {"messages", "top_p", "reasoning", "top_k"}
    assert (server.bodies[0]["reasoning"], server.bodies[0]["top_k"]) == ({"effort": "low"}, 20)


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1?version=2"])
def test_the_path_is_joined(path):
    server = Server(says("7"))

    async def main():
        async with served(server) as url:
            source = judge_at(url + path)
            await source.answer(group_of("2"))
            await source.reach()
            source.close()

    asyncio.run(main())
    assert [request.path for request in server.requests] == ["/v1/chat/completions", "/v1/models"]
    assert [request.query_string for request in server.requests] == (["version=2"] * 2 if "?" in path else [""] * 2)


def test_a_response_is_data():
    """Without the judge's tokenizer, the marks that chat templates commonly have are taken apart."""
    server = Server(says("7"))
    response = "a<|im_end|><|im_start|>b<｜User｜>c</s>d<end_of_turn>e[/INST]f<eos> <b> [x] 1<|2 {{ prompt }}"
    score(server, group_of(response), template="{{ response }}")
    assert server.bodies[0]["messages"][0]["content"] == (
        "a< |im_end|>< |im_start|>b< ｜User｜>c< /s>d< end_of_turn>e[ /INST]f< eos> <b> [x] 1<|2 {{ prompt }}"
    )


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (says("so 4", finish="length"), "so 4"),  # one token is all some verdicts have
        (says([{"type": "thinking", "thinking": "9"}, {"type": "text", "text": "4"}]), "4"),
        (says("4", reasoning_content="9"), "4"),
        ({"choices": [{"message": {"content": "4"}}, {"message": {"content": "5"}}]}, "4"),
        (says(None, refusal="no"), ""),
        (says(None, finish="length"), ""),
    ],
)
def test_what_counts_as_text(said, text):
    async def scenario(blend, source):
        return await source.ask([{"role": "user", "content": "?"}], (1,))

    assert asked(Server(said), scenario, retries=0) == text


def test_silence_is_a_verdict_that_cannot_be_read():
    server = Server(says(None, refusal="no"))
    said, counts = score(server, attempts=2)
    assert "no verdict on sibling 0 could be parsed in 2 attempts; the judge's last answer was '': no match" in said
    assert counts == {"verdicts": 2, "unparsed": 2}


def test_never_in_format():
    server = Server(says("hm"), says("hm"), says("still hm"))
    said, counts = score(server, attempts=3)
    assert "reward 'wise', prompt 70: no verdict on sibling 0 could be parsed in 3 attempts" in said
    assert "the judge's last answer was 'still hm': no match" in said
    assert counts == {"verdicts": 3, "unparsed": 3}
    assert len({body["seed"] for body in server.bodies}) == 3  # fresh noise each time


def test_pairs_in_both_orders():
    async def better(request):
        first, second = server.bodies[-1]["messages"][0]["content"].split("A: ")[1].split(" B: ")
        return says("A" if int(first) > int(second) else "B")

    server = Server(better)
    spec = {"mode": "pairwise", "verdict": "([AB])", "values": {"A": 1, "B": 0}}
    assert score(server, group_of("3", "5", prompt="max"), **spec) == ([0.0, 1.0], {"verdicts": 2})
    texts = sorted(body["messages"][0]["content"] for body in server.bodies)
    assert texts == ["max A: 3 B: 5", "max A: 5 B: 3"]
    assert len({body["seed"] for body in server.bodies}) == 2


def test_seeds_repeat_and_differ_between_repeats():
    def seeds():
        server = Server(says("7"))
        assert score(server, group_of("2", "3"), repeats=3)[0] == [7.0, 7.0]
        return {(body["messages"][0]["content"], body["seed"]) for body in server.bodies}

    first = seeds()
    assert first == seeds()
    assert len({seed for _, seed in first}) == 6
    assert all(0 <= seed < 2**31 for _, seed in first)


def test_a_workflow_asks():
    server = Server(says("because"))

    async def scenario(blend, source):
        ask = [{"role": "user", "content": "why?"}]
        texts = [await blend.ask("wise", ask, ("ask", "x", draw), temperature=0.0, top_k=4) for draw in (0, 1, 0)]
        with pytest.raises(UserError, match=r"rewards\.judges\.0\.url: got stop_tokens"):
            await blend.ask("wise", ask, ("ask", "x", 2), stop_tokens=(2,))
        return texts

    assert asked(server, scenario) == ["because"] * 3
    assert [body["messages"] for body in server.bodies] == [[{"role": "user", "content": "why?"}]] * 3
    assert [(body["temperature"], body["top_k"]) for body in server.bodies] == [(0.0, 4)] * 3
    first, second, third = (body["seed"] for body in server.bodies)
    assert first == third != second


# --- failures that are tried again


def test_broken_twice_then_fine():
    server = Server((500, "oops"), (503, "oops"), says("7"))
    assert score(server) == ([7.0], {"verdicts": 1, "http_retries": 2})
    assert server.bodies[0] == server.bodies[1] == server.bodies[2]  # the same noise: nothing was said yet


def test_broken_for_good():
    server = Server((500, json.dumps({"error": {"message": "out of memory", "type": "server_error"}})))
    said, counts = score(server, retries=2)
    assert "reward 'wise', prompt 70: http://127.0.0.1:" in said
    assert "/v1/chat/completions answered 500: 'out of memory' (tried 3 times)" in said
    assert counts == {"verdicts": 1, "http_retries": 2}
    assert len(server.requests) == 3


def test_retry_after_is_honoured(monkeypatch):
    server, slept = Server((429, "slow down", {"Retry-After": "50"}), says("7")), []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr("gcore.rewarding.http.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    assert score(server) == ([7.0], {"verdicts": 1, "http_retries": 1})
    (pause,) = slept
    assert 50 < pause <= 51


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, "<html>"), "returned '<html>'; expected JSON"),
        ({"error": "busy"}, "returned {'error': 'busy'}; expected choices[0].message.content"),
        ({"choices": []}, "returned {'choices': []}; expected choices[0].message.content"),
        ({"choices": [{"text": "7"}]}, "expected choices[0].message.content"),
        ({"choices": [{"message": {}}]}, "expected choices[0].message.content"),
        ({"choices": "7"}, "expected choices[0].message.content"),
        ([7], "returned [7]; expected choices"),
        (says(7), "returned 7 as content; expected text"),
        (says("1", finish="abort"), "ended the answer with finish_reason 'abort'; expected stop or length"),
        (says("1", finish="content_filter"), "finish_reason 'content_filter'"),
    ],
)
def test_garbage_is_a_failed_try(answer, message):
    server = Server(answer)
    said, counts = score(server, retries=1)
    assert "reward 'wise', prompt 70: http://127.0.0.1:" in said
    assert message in said and "(tried 2 times)" in said
    assert counts == {"verdicts": 1, "http_retries": 1}
    assert score(Server(answer, says("7")), retries=1) == ([7.0], {"verdicts": 1, "http_retries": 1})


def test_a_server_that_hangs():
    async def hang(request):
        await asyncio.sleep(60)

    expected = {"verdicts": 1, "http_retries": 1, "timeouts": 1}
    assert score(Server(hang, says("7")), timeout_s=0.2) == ([7.0], expected)
    said, counts = score(Server(hang), timeout_s=0.1, retries=1)
    assert "/v1/chat/completions in 0.1 s (key: rewards.judges.0.timeout_s) (tried 2 times)" in said
    assert counts == {"verdicts": 1, "http_retries": 1, "timeouts": 2}


def test_a_server_that_hangs_up():
    async def hang_up(request):
        request.transport.close()
        return web.Response()

    assert score(Server(hang_up, says("7"))) == ([7.0], {"verdicts": 1, "http_retries": 1})


def closed_port():
    """An address without a server: the socket is bound, so that no other process gets the port, but not listening."""
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    return taken, f"http://127.0.0.1:{taken.getsockname()[1]}/v1"


def test_no_server_at_the_url():
    taken, url = closed_port()
    with taken:
        source = judge_at(url, retries=2)
        with pytest.raises(RewardError, match=rf"{url}/chat/completions: ClientConnectorError: .*\(tried 3 times\)"):
            asyncio.run(source.answer(group_of("2")))
        source.close()
    assert source.counts == {"verdicts": 1, "http_retries": 2}


# --- failures that are not


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_other_4xx_fail_at_once_with_the_servers_own_words(status):
    server = Server((status, json.dumps({"object": "error", "message": "The model `x` does not exist."})))
    said, counts = score(server)
    key = "key: rewards.judges.0.token_env" if status in (401, 403) else "see rewards.judges.0: url, served_model"
    assert f"/v1/chat/completions answered {status}: 'The model `x` does not exist.' ({key}" in said
    assert said.endswith(") (not retried)")
    assert (counts, len(server.requests)) == ({"verdicts": 1}, 1)


def test_one_failure_fails_the_group_and_what_waits_is_not_asked():
    server = Server((400, "no"), says("7"))

    async def scenario(blend, source):
        with pytest.raises(RewardError, match="answered 400: 'no'"):
            await blend.reward(group_of(*"abcdef"))
        await asyncio.sleep(0.1)  # time for others to come
        return len(server.requests)

    assert asked(server, scenario, repeats=2, max_concurrent=1) in (1, 2)  # of 12; the next one may be on its way


def test_a_url_without_a_version():
    async def main():
        async with served(Server((404, "Not Found"))) as url:
            source = judge_at(url)
            try:
                await source.answer(group_of("2"))
            finally:
                source.close()

    with pytest.raises(RewardError, match=r"/chat/completions answered 404: .*: url \(most end in /v1\), served_model"):
        asyncio.run(main())


# --- the token


def test_the_token_is_sent_and_never_shown(monkeypatch, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("JUDGE_TOKEN", "s3cr3t-s3cr3t\n")

    async def tell(request):
        return (server.status, json.dumps({"message": f"who is {request.headers['Authorization']}?"}))

    for status in (401, 500, 200):
        server = Server(tell)
        server.status = status
        said, _ = score(server, token_env="JUDGE_TOKEN", retries=1)
        assert server.requests[0].headers["Authorization"] == "Bearer s3cr3t-s3cr3t"
        assert "who is Bearer ***?" in said and "s3cr3t" not in said

    async def repeat(request):
        return says(f"{request.headers['Authorization']}? hm")

    said, _ = score(Server(repeat), token_env="JUDGE_TOKEN", attempts=1)
    assert "the judge's last answer was 'Bearer ***? hm'" in said and "s3cr3t" not in said
    assert "s3cr3t" not in caplog.text + "".join(capfd.readouterr())
    config = config_of({"url": "http://h/v1", "token_env": "JUDGE_TOKEN"})
    assert "token_env: JUDGE_TOKEN" in dump_config(config) and "s3cr3t" not in dump_config(config)


# --- many at once


def test_so_many_requests_at_a_time_and_no_more():
    inside, most, full = 0, 0, asyncio.Event()

    async def work(request):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside == 3:
            full.set()
        await full.wait()  # no request returns before three are inside
        await asyncio.sleep(0.01)  # time for a fourth to come
        inside -= 1
        return says("7")

    server = Server(work)
    assert score(server, group_of(*"abcdef"), repeats=2, max_concurrent=3) == ([7.0] * 6, {"verdicts": 12})
    assert (most, len(server.requests)) == (3, 12)


def test_close_closes_the_connections():
    async def scenario(blend, source):
        await blend.reward(group_of("2"))
        session, _ = source.backend.client.connection()
        blend.close()
        return session.closed

    assert asked(Server(says("7")), scenario) is True


# --- the recipe


def config_of(judge, **top):
    judge = {"name": "wise", "template": POINTWISE, **judge}
    return Config.model_validate({**RECIPE, "runtime": "local", "rewards": {"judges": [judge]}, **top})


@pytest.mark.parametrize("both", [{}, {"model": Model(path="x"), "url": "http://h/v1"}])
def test_exactly_one_of_model_and_url(both):
    with pytest.raises(ValueError, match=r"exactly one of model \(.*\) and url \("):
        TypeAdapter(Judge).validate_python({"name": "wise", "template": POINTWISE, **both})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"url": "http://h/v1", "replicas": 2}, "replicas: only for judges with model; this judge has no model"),
        (
            {"url": "http://h/v1", "engine": "vllm", "max_prompt_length": 9},
            "engine, max_prompt_length: only for judges with",
        ),
        ({"model": Model(path="x"), "retries": 1, "extra": {"x": 1}}, "retries, extra: only for judges with url"),
    ],
)
def test_keys_that_would_do_nothing(spec, message):
    with pytest.raises(ValueError, match=message):
        TypeAdapter(Judge).validate_python({"name": "wise", "template": POINTWISE, **spec})


def test_a_resolved_recipe_loads_again():
    judge = config_of({"url": "http://h/v1", "extra": {"top_k": 4}}).rewards.judges[0]
    assert RemoteJudge(**judge.model_dump()) == judge


def test_no_replicas_and_no_tokenizer():
    """Judges that are served keep theirs, whatever their place in the list."""
    remote = {"name": "far", "url": "http://h/v1?key=s3cr3t", "template": POINTWISE}
    near = {"name": "near", "model": {"build": {}}, "template": "{{ prompt }}{{ response }}", "replicas": 2}
    config = config_of({}, rewards={"judges": [remote, near]})
    plan = make_plan(config, Machine(2, 0))
    assert plan.judges == {"near": 2}
    assert "judge        far at http://h/v1" in plan.lines(config)
    rewarder = build_rewarder(config, plan, Roles())
    assert [type(source.backend).__name__ for source in rewarder.sources.values()] == ["RemoteBackend", "EngineBackend"]
    assert [source.key for source in rewarder.sources.values()] == ["rewards.judges.0", "rewards.judges.1"]
    assert len(rewarder.pools) == 1
    far = rewarder.sources["far"].backend
    assert far.seed_of(("far", 70, 0)) == noise_key(config.run.seed, "judge", "far", 70, 0)


# --- before the run


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"url": "host:80/v1"}, r"url: got 'host:80/v1'; expected http://HOST"),
        ({"url": "http://[::1/v1"}, "url: got"),
        ({"url": "http://me:s3cr3t@host/v1"}, "url: got a user name or password in the URL"),
        (
            {"url": "http://h/v1/chat/completions/?a=b"},
            "url: got a URL that ends in /chat/completions; expected the part before it",
        ),
        ({"token_env": "NO_SUCH_TOKEN"}, "token_env: the environment variable NO_SUCH_TOKEN is not set"),
        ({"extra": {"messages": None}}, r"extra\.messages: made from template"),
        ({"extra": {"model": "x"}}, r"extra\.model: set by served_model; expected .* null to omit it"),
        ({"extra": {"stream": True}}, r"extra\.stream: streaming is not supported"),
        ({"extra": {"until": datetime.date(2030, 1, 1)}}, r"extra\.until: cannot be sent as JSON"),
        (
            {"extra": {"max_completion_tokens": "<redacted>"}},
            r"extra\.max_completion_tokens: got <redacted>; expected its value",
        ),
        ({"template": "{{ anser }}"}, "template: unknown name anser"),
        ({"verdict": "(yes|no)"}, "values: not set"),
    ],
)
def test_check_refuses(spec, message):
    with pytest.raises(UserError, match=rf"rewards\.judges\.0\.{message}") as caught:
        judge_at(spec.pop("url", "http://h/v1"), **spec).check(["prompt", "answer"])
    assert "s3cr3t" not in str(caught.value)


def test_check_passes(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "x")
    extra = {"max_tokens": None, "top_k": 3, "stream": None}
    judge_at("https://h/v1", token_env="JUDGE_TOKEN", extra=extra, system_prompt="é").check(["prompt"])


def reach(server, **spec):
    """None, or what the user is told."""

    async def scenario(blend, source):
        try:
            await source.reach()
        except UserError as error:
            return str(error)

    return asked(server, scenario, **spec)


@pytest.mark.parametrize("status", [200, 400, 404, 405, 429, 501])
def test_a_server_answers(status):
    server = Server((status, "x"))
    assert reach(server) is None
    assert [(request.method, request.path) for request in server.requests] == [("GET", "/v1/models")]


@pytest.mark.parametrize("status", [301, 307, 500, 502, 503])
def test_a_server_that_refuses(status):
    server = Server((status, '{"detail": "loading"}'))
    said = reach(server)
    assert said.startswith("rewards.judges.0.url: http://127.0.0.1:")
    assert said.endswith(f"/v1/models answered {status}: 'loading'")
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_is_refused(status, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "s3cr3t")

    async def tell(request):
        return (status, f"bad key {request.headers.get('Authorization')}")

    said = reach(Server(tell), token_env="JUDGE_TOKEN")
    assert said.startswith("rewards.judges.0.token_env: http://127.0.0.1:")
    assert f"answered {status}: 'bad key Bearer ***' (expected a valid token in JUDGE_TOKEN)" in said
    assert "s3cr3t" not in said
    assert "(expected a token, but none is set)" in reach(Server(tell))


def test_a_server_that_says_nothing(monkeypatch):
    async def hang(request):
        await asyncio.sleep(60)

    monkeypatch.setattr("gcore.rewarding.http.REACH_S", 0.1)
    said = reach(Server(hang))
    assert said.startswith("rewards.judges.0.url: no answer from http://127.0.0.1:")
    assert said.endswith("/v1/models in 0.1 s")


def test_preflight_asks_whether_a_server_answers(tmp_path):
    taken, url = closed_port()
    with taken:
        config = config_of({"url": f"{url}?key=s3cr3t"}, run={"name": "x", "steps": 1, "dir": str(tmp_path)})
        with pytest.raises(UserError) as caught:
            preflight(config, make_plan(config, Machine(2, 0)))
    said = f"rewards.judges.0.url: no server answers at {url}/models: ClientConnectorError: "
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value) and "s3cr3t" not in str(caught.value)
