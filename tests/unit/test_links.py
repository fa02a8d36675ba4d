"""Bytes of payloads per link, within and between nodes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np

from gcore.clients import EngineClient
from gcore.content.tokens import Tokens
from gcore.generation.pool import EnginePool
from gcore.observe.links import Links, link_row
from gcore.observe.page import page_model
from gcore.observe.page_data import read_recording
from gcore.runtime.local import LocalHandle
from gcore.types import Completion, Request, SamplingParams


class Engine:
    async def generate(self, requests: list[Request], ticket: str) -> list[Completion]:
        three = np.zeros(3, np.int32)
        return [Completion(Tokens.steps(three), three.astype(np.float32), three, "stop") for _ in requests]


def test_a_pool_counts_the_payloads_of_near_and_far_engines():
    """Controller 1 is on node 1 with engine 1. A request has 5 tokens, a response 3 with logprobs and versions."""

    async def main() -> EnginePool:
        engines = [EngineClient(LocalHandle(f"engine-{i}", Engine())) for i in range(2)]
        pool = EnginePool.for_controller(engines, 1, 2, max_concurrent=2, nodes=((0, 1), (0, 1)))
        request = Request(Tokens(np.zeros(5, np.int32)), SamplingParams(3), 7)
        await asyncio.gather(*(pool.generate([request]) for _ in range(4)))  # room for 3 at the own engine
        return pool

    links = asyncio.run(main()).links
    assert link_row([links.take()]) == {
        "link/requests_between_mb": 20e-6,
        "link/requests_within_mb": 60e-6,
        "link/responses_between_mb": 36e-6,
        "link/responses_within_mb": 108e-6,
    }
    assert link_row([links.take()]) == {}


def test_controllers_add_up_and_one_machine_has_no_links_between_nodes():
    one, two = Links(0, ((0, 1), (0, 1, 1))), Links(0, ((), ()))
    one.add("samples", 2, 3_000_000)
    one.add("samples", 0, 1_000_000)
    two.add("samples", 2, 1_000_000)
    assert link_row([one.take(), two.take()]) == {"link/samples_between_mb": 3.0, "link/samples_within_mb": 2.0}


def test_the_report_draws_them(tmp_path: Path):
    rows = [{"step": step, "reward/mean": 0.5, "link/samples_between_mb": 2.0 * step} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    charts = {chart["title"]: chart for chart in page_model([read_recording(tmp_path)])["charts"]}
    series = charts["Payloads through controllers, MB per step"]["series"][0]
    assert series["y"] == [2.0, 4.0] and "to ranks, between nodes" in series["name"]
