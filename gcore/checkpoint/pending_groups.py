"""Saves and loads the groups that were ready but not yet trained on when a checkpoint was made.

    controller RANK ──write──> pending-RANK.safetensors (arrays), pending-RANK.json (all other fields) ──load──> all

Every controller writes its own files and reads the files of all controllers, so a run can be resumed with another
number of controllers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from gcore.checkpoint.store import write_file
from gcore.types import FileEntry, Prompt, Rollout, Scored

COLUMNS = ("logprobs_S", "mask_S", "versions_S")  # one value per step; the content adds its own arrays


def write_pending_groups(folder: Path, rank: int, groups: Sequence[Sequence[Scored]]) -> dict[str, FileEntry]:
    """Returns the files. Each array in the file is the concatenation over all samples; the JSON file has the lengths of
    the parts."""
    samples = [s for group in groups for s in group]
    if not samples:
        return {}
    arrays = [_arrays(s.rollout) for s in samples]
    names = sorted({name for part in arrays for name in part})
    joined = {name: np.concatenate([part[name] for part in arrays if name in part]) for name in names}
    about = [
        {
            "prompt": s.rollout.prompt.id,
            "sibling": s.rollout.sibling,
            "lengths": {name: len(array) for name, array in part.items()},
            "output": s.rollout.output,
            "finish": s.rollout.finish,
            "temperature": s.rollout.temperature,
            "reward": s.reward,
            "parts": dict(s.parts),
            "notes": {name: list(texts) for name, texts in s.notes.items()},
        }
        for s, part in zip(samples, arrays, strict=True)
    ]
    contents = {f"pending-{rank}.safetensors": save(joined), f"pending-{rank}.json": json.dumps(about).encode()}
    return {name: write_file(folder / name, [content]) for name, content in contents.items()}


def pending_bytes(groups: Sequence[Sequence[Scored]]) -> int:
    """Of the arrays."""
    return sum(array.nbytes for group in groups for s in group for array in _arrays(s.rollout).values())


def load_pending_groups(folder: Path, prompt_at: Callable[[int], Prompt]) -> list[list[Scored]]:
    """The groups of all controllers. `prompt_at`: prompt number -> prompt."""
    groups: dict[int, list[Scored]] = {}
    for file in sorted(folder.glob("pending-*.json")):
        arrays, starts = load_file(file.with_suffix(".safetensors")), Counter[str]()
        for about in json.loads(file.read_text()):
            number = about["prompt"]
            prompt = groups[number][0].rollout.prompt if number in groups else prompt_at(number)
            own: dict[str, Any] = {}
            for name, length in about["lengths"].items():
                own[name] = arrays[name][starts[name] : starts[name] + length]
                starts[name] += length
            steps = {name: own.pop(name) for name in COLUMNS}
            rollout = Rollout(
                prompt=prompt,
                sibling=about["sibling"],
                content=prompt.content.with_steps(own),
                output=about["output"],
                finish=about["finish"],
                temperature=about["temperature"],
                **steps,
            )
            groups.setdefault(number, []).append(Scored(rollout, about["reward"], about["parts"], about["notes"]))
    return list(groups.values())


def _arrays(rollout: Rollout) -> dict[str, np.ndarray]:
    return {**rollout.content.step_arrays(), **{name: getattr(rollout, name) for name in COLUMNS}}
