"""The control planes of bench/controllers.py deliver the same samples to the ranks, and what they count is right."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import controllers as lab
from bench.control_planes import Plane
from bench.control_roles import Payload, Remote, Workload, pickled_bytes, resolved
from gcore.content.tokens import Tokens
from gcore.preparation import balance
from gcore.types import Sample

WORKLOADS = {
    "text": replace(lab.TEXT, prompts=4, siblings=2, tokens=48),
    "images": replace(lab.IMAGES, prompts=4, siblings=2, tokens=16, image_bytes=5000),
    "reward-heavy": replace(lab.REWARDS, prompts=4, siblings=2, tokens=32),
}
PLANES = [
    Plane("classic"),
    Plane("metadata"),
    Plane("parallel", 1),
    Plane("parallel", 3),
    Plane("parallel", 2, media=False),
]


def run(plane: Plane, workload: Workload, folder: Path) -> dict[str, Any]:
    return asyncio.run(lab.run_locally(plane, workload, 4, rounds=1, media=str(folder), step_s=1e-6))


def test_parts_of_a_layout_by_several_controllers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "PART", 2)  # 4 ranks: two parts
    rows = [run(Plane("parallel", size), WORKLOADS["text"], tmp_path) for size in (1, 2, 3)]
    assert len({row["digest"] for row in rows}) == 1 and rows[0]["samples"] == 8


@pytest.mark.parametrize("name", WORKLOADS)
def test_all_planes_deliver_the_same_samples(name: str, tmp_path: Path) -> None:
    workload = WORKLOADS[name]
    rows = [run(plane, workload, tmp_path) for plane in PLANES]
    assert {row["samples"] for row in rows} == {workload.samples}
    assert len({row["digest"] for row in rows}) == 1, {row["plane"]: row["digest"] for row in rows}
    other = run(PLANES[0], replace(workload, tokens=workload.tokens + 16), tmp_path)
    assert other["digest"] != rows[0]["digest"]  # the digest sees the content


def test_images_pass_only_through_planes_that_send_them_inline(tmp_path: Path) -> None:
    workload = WORKLOADS["images"]
    whole = workload.samples * workload.images * workload.image_bytes
    moved = {}
    for plane in PLANES:
        reports = run(plane, workload, tmp_path)["steps"][0]["reports"]
        moved[plane.name] = sum(report["bytes_in"] + report["bytes_out"] for report in reports)
    assert moved["classic"] > 4 * whole  # in once; out for two passes and the update
    assert 2 * whole < moved["parallel N=2, inline"] < 3 * whole
    assert max(moved["metadata"], moved["parallel N=1"], moved["parallel N=3"]) < whole / 2


def test_a_rank_that_gets_other_tokens_has_another_digest() -> None:
    async def digest(last: int) -> bytes:
        from bench.control_roles import Piece, digest_of, put

        payload = Payload(Tokens.steps(np.array([5, last], np.int32)), np.zeros(2, np.float32))
        content = Remote(Tokens(np.array([1], np.int32)), (Piece(2, b"", put(payload)),))
        sample = Sample(0, 0, content, np.ones(1, np.bool_), np.zeros(1, np.float32), reward=1.0)
        found = await resolved(sample)
        assert found.mask_S.tolist() == [True, True]
        assert found.content.size == content.size == 3
        return digest_of(found)

    assert asyncio.run(digest(6)) == asyncio.run(digest(6)) != asyncio.run(digest(7))


def test_bytes_are_those_of_the_arrays_and_little_more() -> None:
    array = np.zeros(10_000, np.float32)
    assert 40_000 < pickled_bytes([array]) < 40_400
    assert pickled_bytes([array, array]) < 40_400  # sent once
