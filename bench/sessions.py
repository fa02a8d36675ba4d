"""Cost of agents by HTTP in a controller: CPU per turn and memory per session, with thousands of sessions open at once.

    python bench/sessions.py --json sessions.json

One controller, one core (the process is pinned to it, agents run in other processes), `--sessions` sessions, all open
until the last turn. Each agent asks `--turns` times with its whole history, `--tokens` tokens per turn, and thinks a
random time of `--think-s` seconds on average between two turns. The engine is emulated: it sleeps. Everything else is
production code: server, dialect, session, chat template and tokenizer, EnginePool.

The CPU time is that of the controller's process, from the first request to the last answer. The emulated engine's part
is measured separately, with the same requests, and subtracted. Memory is the growth of the resident set until all
trajectories are complete: tokens, logprobs, messages and connections of all sessions.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import gc
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import write_json  # noqa: E402
from bench.workflow import make_config, make_engine  # noqa: E402

PATHS = {  # path -> fields of the history and of the length
    "chat/completions": ("messages", "max_tokens"),
    "responses": ("input", "max_output_tokens"),
    "messages": ("messages", "max_tokens"),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "without HTTP": {"http": False},
    "Chat Completions": {},
    "Chat Completions, streamed": {"stream": True},
    "Responses": {"path": "responses"},
    "Anthropic Messages": {"path": "messages"},
}


def said(path: str, answer: dict[str, Any]) -> str:
    match path:
        case "chat/completions":
            text: str = answer["choices"][0]["message"]["content"]
        case "responses":
            text = answer["output"][0]["content"][0]["text"]
        case _:
            text = answer["content"][0]["text"]
    return text


# ---- agents, in processes of their own -------------------------------------------------------------------------------


def agents(addresses: list[tuple[str, str]], variant: str, args: argparse.Namespace) -> list[float]:
    """Seconds of each turn, as the agents see them."""
    return asyncio.run(_agents(addresses, variant, args))


async def _agents(addresses: list[tuple[str, str]], variant: str, args: argparse.Namespace) -> list[float]:
    import aiohttp

    import gcore.launch.build  # noqa: F401  # as long as the controller, so that all are ready at about the same time

    path, stream = VARIANTS[variant].get("path", "chat/completions"), VARIANTS[variant].get("stream", False)
    seconds = list[float]()

    async def agent(base_url: str, api_key: str, number: int) -> None:
        async def ask(history: list[dict[str, str]]) -> str:
            messages, length = PATHS[path]
            body = {messages: history, length: args.tokens, "model": "policy"}
            headers = {"Authorization": f"Bearer {api_key}"}
            async with http.post(f"{base_url}/{path}", json=body | {"stream": stream}, headers=headers) as answer:
                if not stream:
                    return said(path, await answer.json())
                text = ""
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        delta = json.loads(line[6:])["choices"][0]["delta"]
                        text += delta.get("content", "")
                return text

        await converse(ask, number, args, seconds)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        await asyncio.gather(*(agent(*address, i) for i, address in enumerate(addresses)))
    return seconds


async def converse(ask: Any, number: int, args: argparse.Namespace, seconds: list[float]) -> None:
    history, draw = list[dict[str, str]](), random.Random(number)
    for turn in range(args.turns):
        await asyncio.sleep(draw.uniform(0, 2 * args.think_s))
        history.append({"role": "user", "content": f"{number}+{turn}="})
        started = time.perf_counter()
        history.append({"role": "assistant", "content": await ask(history)})
        seconds.append(time.perf_counter() - started)


# ---- one row, in a separate process ----------------------------------------------------------------------------------


def measure(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    from gcore.launch.build import quiet

    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.clients, mp_context=context) as clients:
        if len(cores) > 1:
            os.sched_setaffinity(0, set(cores[1:]))  # of the agents, which are started now
        list(clients.map(abs, range(args.clients)))
        os.sched_setaffinity(0, {cores[0]})
        quiet()
        small = argparse.Namespace(**{**vars(args), "sessions": 8, "turns": 2, "think_s": 0.0})
        asyncio.run(serve(variant, small, clients))  # imports, compiled templates
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)  # as controllers have it
        return {"variant": variant, **asyncio.run(serve(variant, args, clients))}


async def serve(
    variant: str, args: argparse.Namespace, clients: concurrent.futures.ProcessPoolExecutor
) -> dict[str, Any]:
    import numpy as np
    import psutil

    from gcore.clients import EngineClient
    from gcore.content.text import TextModality
    from gcore.content.tokens import Tokens
    from gcore.generation.pool import EnginePool
    from gcore.prompts.tokenizer import load_tokenizer
    from gcore.runtime.local import LocalHandle
    from gcore.types import Prompt
    from gcore.workflows.context import SampleContext, SharedContext

    room = args.turns * (args.tokens + 24)
    config = make_config(0, 1, room, endpoint={"idle_timeout_s": 1e6})
    tokenizer = load_tokenizer(config.model)
    requests = []

    def pool_of_engine() -> EnginePool:
        endless = argparse.Namespace(**{**vars(args), "tokens": 10 * room, "sigma": 0.0})
        return EnginePool([EngineClient(LocalHandle("engine-0", make_engine(endless)))])

    async def recorded(given: Any, **line: Any) -> Any:
        requests.extend(given)
        return await pool.generate(given, **line)

    pool = pool_of_engine()
    generation = config.generation.model_copy(update={"max_response_length": room})
    modality = TextModality(generation, tokenizer, ())
    shared = SharedContext(config, SimpleNamespace(generate=recorded), None, modality)  # type: ignore[arg-type]
    ctx = SampleContext(shared)
    gc.collect()
    process, loop = psutil.Process(), asyncio.get_running_loop()
    before = process.memory_info().rss
    seconds: list[float] = []
    async with ctx.serve(Prompt(0, 0, (), "", Tokens(np.zeros(1, np.int32))), args.sessions) as sessions:
        cpu, wall = time.process_time(), time.perf_counter()
        if VARIANTS[variant].get("http", True):
            addresses = [(session.base_url, session.api_key) for session in sessions]
            parts = [addresses[i :: args.clients] for i in range(args.clients)]
            jobs = [loop.run_in_executor(clients, agents, part, variant, args) for part in parts]
            seconds = [one for job in await asyncio.gather(*jobs) for one in job]
        else:

            async def alone(session: Any, number: int) -> None:
                async def ask(history: list[dict[str, str]]) -> str:
                    body = {"messages": history, "max_tokens": args.tokens}
                    return said("chat/completions", await session.post("chat/completions", body))

                await converse(ask, number, args, seconds)

            await asyncio.gather(*(alone(session, i) for i, session in enumerate(sessions)))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        gc.collect()
        growth = process.memory_info().rss - before
        rollouts = [session.rollout for session in sessions]
    turns = args.sessions * args.turns
    assert all(not rollout.segments for rollout in rollouts), "a history was not recognised"
    made = sum(int(rollout.mask_S.sum()) for rollout in rollouts)
    assert made == turns * args.tokens, f"{made} sampled tokens, expected {turns * args.tokens}"
    alone_cpu, pool = time.process_time(), pool_of_engine()
    await asyncio.gather(*(pool.generate([request]) for request in requests))
    alone_cpu = time.process_time() - alone_cpu
    return {
        "turns": turns,
        "requests": len(requests),
        "cpu_us_per_turn": (cpu - alone_cpu) / turns * 1e6,
        "engine_us_per_turn": alone_cpu / turns * 1e6,
        "turns_per_cpu_s": turns / (cpu - alone_cpu),
        "busy": cpu / wall,
        "kb_per_session": growth / 1024 / args.sessions,
        "median_s": statistics.median(seconds),
        "p99_s": sorted(seconds)[int(len(seconds) * 0.99)],
        "wall_s": wall,
    }


# ---- the experiment --------------------------------------------------------------------------------------------------


def main() -> None:
    args = parse()
    results = []
    for variant in VARIANTS:
        if args.only is not None and args.only not in variant:
            continue
        rounds = []
        for number in range(args.rounds):
            print(f"{variant}: round {number + 1}/{args.rounds}", file=sys.stderr, flush=True)
            context = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as fresh:
                rounds.append(fresh.submit(measure, variant, args).result())
        names = [name for name in rounds[0] if name != "variant"]
        results.append({"variant": variant, **{name: statistics.median(row[name] for row in rounds) for name in names}})
    print(
        f"{args.sessions:,} sessions, {args.turns} turns each, {args.tokens} tokens per turn, {args.think_s:g} s "
        f"between turns; one controller on one core; median of {args.rounds} rounds"
    )
    print("| | µs of CPU per turn | emulated engine | KB per session | seconds of a turn, median | 99th percentile |")
    print("|---|---|---|---|---|---|")
    for row in results:
        print(
            f"| {row['variant']} | {row['cpu_us_per_turn']:,.0f} | {row['engine_us_per_turn']:,.0f} | "
            f"{row['kb_per_session']:.0f} | {row['median_s']:.2f} | {row['p99_s']:.2f} |"
        )
    write_json(args.json, {"settings": vars(args), "results": results})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="per turn")
    parser.add_argument("--think-s", type=float, default=5.0, help="of an agent between two turns, on average")
    parser.add_argument("--step-s", type=float, default=0.01, help="of the emulated engine per token")
    parser.add_argument("--clients", type=int, default=1, help="processes of agents")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", help="variants whose name contains this")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
