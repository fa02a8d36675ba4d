"""Groups that wait for a later step survive a checkpoint bit by bit, for any number of writers and readers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gcore.checkpoint.pending_groups import load_pending_groups, write_pending_groups
from gcore.content.media import ArrayRef, Media
from gcore.content.tokens import Tokens
from gcore.types import Prompt, Rollout, Scored

ARRAYS = ("logprobs_S", "mask_S", "versions_S")


def prompt_at(number: int) -> Prompt:
    return Prompt(number, number % 7, (), f"<{number}>", Tokens(np.arange(number, dtype=np.int32)))


def group_of(number: int, siblings: int, seed: int = 0) -> list[Scored]:
    """Lengths, masks (tools speak in between) and versions of all kinds."""
    rng = np.random.default_rng((number, seed))
    found = []
    for sibling in range(siblings):
        n = int(rng.integers(1, 9))
        rollout = Rollout(
            prompt_at(number),
            sibling * 2**40,  # as branches have it
            prompt_at(number).content.extended(Tokens.steps(rng.integers(0, 2**31 - 1, n).astype(np.int32))),
            -rng.random(n).astype(np.float32) * 1e-3,
            rng.random(n) > 0.3,
            f"ein „Wort“\n{sibling}",
            rng.integers(0, 100, n).astype(np.int32),
            ("stop", "length", "abort")[sibling % 3],  # type: ignore[arg-type]
            0.1 * (1 + sibling),
        )
        found.append(Scored(rollout, float(rng.normal()) / 3, {"exact": 1 / 3, "judge/verdicts": 2.0}))
    return found


def plain(group: list[Scored]) -> list[Any]:
    return [
        (
            (
                s.rollout.prompt.id,
                s.rollout.prompt.row,
                s.rollout.prompt.text,
                s.rollout.prompt.content.tokens_P.tolist(),
            ),
            (s.rollout.content.tokens_T.dtype, s.rollout.content.tokens_T.tobytes()),
            *((getattr(s.rollout, name).dtype, getattr(s.rollout, name).tobytes()) for name in ARRAYS),
            (s.rollout.sibling, s.rollout.text, s.rollout.finish, s.rollout.temperature),
            (s.reward, dict(s.parts)),
        )
        for s in group
    ]


def test_what_is_read_is_what_was_written(tmp_path: Path):
    groups = [group_of(12, 4), group_of(3, 1), group_of(40, 5)]
    write_pending_groups(tmp_path, 0, groups)
    found = load_pending_groups(tmp_path, prompt_at)
    assert [plain(group) for group in found] == [plain(group) for group in groups]
    assert [s.rollout.version for s in found[0]] == [s.rollout.version for s in groups[0]]
    found[0][0].rollout.content.tokens_S[0] += 1  # arrays of one's own, to be changed
    assert all(s.rollout.prompt is group[0].rollout.prompt for group in found for s in group)


def test_rewards_of_a_workflow_may_be_numbers_of_numpy(tmp_path: Path):
    (scored,) = group_of(12, 1)
    found = dataclasses.replace(scored, reward=np.float32(0.5), parts={"exact": np.float32(0.25), "n": np.int64(3)})
    write_pending_groups(tmp_path, 0, [[found]])
    ((read,),) = load_pending_groups(tmp_path, prompt_at)
    assert (read.reward, dict(read.parts)) == (0.5, {"exact": 0.25, "n": 3.0})


def test_everyone_writes_and_everyone_reads_all(tmp_path: Path):
    written = {rank: [group_of(100 * rank + i, 2, rank) for i in range(rank % 3)] for rank in range(12)}
    for rank, groups in written.items():
        write_pending_groups(tmp_path, rank, groups)
    asked: list[int] = []

    def at(number: int) -> Prompt:
        asked.append(number)
        return prompt_at(number)

    found = load_pending_groups(tmp_path, at)
    expected = sorted((group for groups in written.values() for group in groups), key=lambda g: g[0].rollout.prompt.id)
    found.sort(key=lambda group: group[0].rollout.prompt.id)
    assert [plain(group) for group in found] == [plain(group) for group in expected]
    assert sorted(asked) == [group[0].rollout.prompt.id for group in expected]  # a prompt is made once a group


def test_nothing_waits_nothing_is_written(tmp_path: Path):
    write_pending_groups(tmp_path, 0, [])
    assert list(tmp_path.iterdir()) == [] and load_pending_groups(tmp_path, prompt_at) == []


@pytest.mark.parametrize("reward", [float("inf"), float("-inf"), 1e-300, -0.0, 3])
def test_rewards_come_back_exactly(tmp_path: Path, reward: float):
    (sample, *_) = group_of(1, 1)
    write_pending_groups(tmp_path, 0, [[Scored(sample.rollout, reward, {})]])
    (((found,),)) = load_pending_groups(tmp_path, prompt_at)
    assert (found.reward, np.signbit(found.reward), found.parts) == (reward, np.signbit(reward), {})


def test_pictures_that_a_tool_gave_a_conversation_of_its_own(tmp_path: Path):
    """A workflow made the messages (`own_context`), and a later turn has an image: both come back."""
    media = Media("image", "9f3c", ArrayRef("media/9f3c.npy", (480, 640, 3), "uint8"), places=np.array([6], np.int32))
    content = Tokens(np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int32), None, (media,), own_context=True)
    columns = np.zeros(3, np.float32), np.ones(3, np.bool_), "", np.zeros(3, np.int32)
    write_pending_groups(tmp_path, 0, [[Scored(Rollout(prompt_at(9), 0, content, *columns, "stop"), 1.0)]])
    ((scored,),) = load_pending_groups(tmp_path, prompt_at)
    found: Any = scored.rollout.content
    assert found.own_context and found.tokens_T.tolist() == content.tokens_T.tolist()
    assert [(one.key, one.array, one.places.tolist()) for one in found.media] == [("9f3c", media.array, [6])]
