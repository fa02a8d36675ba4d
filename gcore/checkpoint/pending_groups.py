"""Saves and loads the groups that were ready but not yet trained on when a checkpoint was made.

    controller RANK ──write──> pending-RANK.safetensors (arrays), pending-RANK.json (all other fields) ──load──> all

Every controller writes its own files and reads the files of all controllers, so a run can be resumed with another
number of controllers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from gcore.checkpoint.store import write_file
from gcore.content.media import ArrayRef
from gcore.types import FileEntry, Prompt, Rollout, Scored

STEP_REWARDS = "step_rewards_S"  # of teachers, if there are any
COLUMNS = ("logprobs_S", "mask_S", "versions_S")  # one value per step; the content adds its own arrays


def write_pending_groups(folder: Path, rank: int, groups: Sequence[Sequence[Scored]]) -> dict[str, FileEntry]:
    """Returns the files. Each array in the file is the concatenation over all samples; the JSON file has the lengths of
    the parts."""
    samples = [segment for group in groups for s in group for segment in _segments(s)]
    if not samples:
        return {}
    arrays = [_arrays(s) for s, _ in samples]
    names = sorted({name for part in arrays for name in part})
    joined = {name: np.concatenate([part[name] for part in arrays if name in part]) for name in names}
    about = [
        {
            "prompt": s.rollout.prompt.id,
            "sibling": s.rollout.sibling,
            "lengths": {name: len(array) for name, array in part.items()},
            "output": _saved(s.rollout.output),
            "finish": s.rollout.finish,
            "temperature": s.rollout.temperature,
            "reward": s.reward,
            "parts": dict(s.parts),
            "notes": {name: list(texts) for name, texts in s.notes.items()},
            "baseline": s.baseline,
            "segment_rewards": [*s.segment_rewards],
            "shared": s.rollout.shared,
            "is_segment": is_segment,
        }
        for (s, is_segment), part in zip(samples, arrays, strict=True)
    ]
    text = json.dumps(about, default=float)  # a workflow's rewards may be numbers of NumPy
    contents = {f"pending-{rank}.safetensors": save(joined), f"pending-{rank}.json": text.encode()}
    return {name: write_file(folder / name, [content]) for name, content in contents.items()}


def pending_bytes(groups: Sequence[Sequence[Scored]]) -> int:
    """Of the arrays."""
    segments = (segment for group in groups for s in group for segment, _ in _segments(s))
    return sum(array.nbytes for segment in segments for array in _arrays(segment).values())


def load_pending_groups(folder: Path, prompt_at: Callable[[int], Prompt]) -> list[list[Scored]]:
    """The groups of all controllers. `prompt_at`: prompt number -> prompt."""
    groups: dict[int, list[Scored]] = {}
    for file in sorted(folder.glob("pending-*.json")):
        arrays, starts = load_file(file.with_suffix(".safetensors")), Counter[str]()
        for about in json.loads(file.read_text()):
            number = about["prompt"]
            prompt = groups[number][0].rollout.prompt if groups.get(number) else prompt_at(number)
            own: dict[str, Any] = {}
            for name, length in about["lengths"].items():
                own[name] = arrays[name][starts[name] : starts[name] + length]
                starts[name] += length
            steps = {name: own.pop(name) for name in COLUMNS}
            rewards_S = own.pop(STEP_REWARDS, None)
            rollout = Rollout(
                prompt=prompt,
                sibling=about["sibling"],
                content=prompt.content.with_steps(own),
                output=_loaded(about["output"]),
                finish=about["finish"],
                temperature=about["temperature"],
                shared=about.get("shared", 0),
                **steps,
            )
            group = groups.setdefault(number, [])
            if about.get("is_segment"):  # of the sample before it
                whole = replace(group[-1].rollout, segments=(*group[-1].rollout.segments, rollout))
                group[-1] = replace(group[-1], rollout=whole)
                continue
            texts = about["parts"], about["notes"]
            own_rewards = about.get("segment_rewards", ())
            group.append(Scored(rollout, about["reward"], *texts, about.get("baseline"), rewards_S, own_rewards))
    return list(groups.values())


def _segments(scored: Scored) -> list[tuple[Scored, bool]]:
    """The sample, and its other segments as samples: only their rollouts are read."""
    others = (Scored(segment, scored.reward) for segment in scored.rollout.segments)
    return [(scored, False), *((segment, True) for segment in others)]


def _saved(output: Any) -> Any:
    """A text as it is; a reference to a picture as an object."""
    return asdict(output) if isinstance(output, ArrayRef) else output


def _loaded(output: Any) -> Any:
    return ArrayRef(output["path"], tuple(output["shape"]), output["dtype"]) if isinstance(output, dict) else output


def _arrays(scored: Scored) -> dict[str, np.ndarray]:
    rollout, rewards_S = scored.rollout, scored.step_rewards_S
    found = {**rollout.content.step_arrays(), **{name: getattr(rollout, name) for name in COLUMNS}}
    return found if rewards_S is None else {**found, STEP_REWARDS: rewards_S}
