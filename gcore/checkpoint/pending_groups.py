"""Groups that wait for a later step, on disk: arrays as safetensors, the rest as JSON.

Every controller writes its own file and reads the files of all, so their number may change in between.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from gcore.types import Kept, Prompt, Rollout, Scored

ARRAYS = {"tokens_S": np.int32, "logprobs_S": np.float32, "mask_S": np.bool_, "versions_S": np.int32}


def save_pending_groups(folder: Path, rank: int, groups: Sequence[Sequence[Scored]]) -> None:
    """pool-RANK.safetensors holds the steps of all samples one after another, pool-RANK.json says whose they are."""
    samples = [s for group in groups for s in group]
    if not samples:
        return
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(s.rollout, name) for s in samples]).astype(kind) for name, kind in ARRAYS.items()
    }
    if kept := Kept.joined(*((s.rollout.kept, len(s.rollout.tokens_S)) for s in samples)):
        arrays |= {"kept_ids": kept.ids_K, "kept_counts": kept.counts_S}
    save_file(arrays, folder / f"pool-{rank}.safetensors")
    about = [
        {
            "prompt": s.rollout.prompt.id,
            "sibling": s.rollout.sibling,
            "steps": len(s.rollout.tokens_S),
            "text": s.rollout.text,
            "finish": s.rollout.finish,
            "temperature": s.rollout.temperature,
            "kept": len(s.rollout.kept.ids_K) if s.rollout.kept else 0,
            "reward": s.reward,
            "parts": dict(s.parts),
            "notes": {name: list(texts) for name, texts in s.notes.items()},
        }
        for s in samples
    ]
    (folder / f"pool-{rank}.json").write_text(json.dumps(about))


def load_pending_groups(folder: Path, prompt_at: Callable[[int], Prompt]) -> list[list[Scored]]:
    groups: dict[int, list[Scored]] = {}
    for file in sorted(folder.glob("pool-*.json")):
        arrays, start, kept = load_file(file.with_suffix(".safetensors")), 0, 0
        for about in json.loads(file.read_text()):
            part = slice(start, start + about["steps"])
            start = part.stop
            number = about["prompt"]
            prompt = groups[number][0].rollout.prompt if number in groups else prompt_at(number)
            ids = slice(kept, kept + (about.get("kept") or 0))
            kept = ids.stop
            steps: dict[str, Any] = {name: arrays[name][part] for name in ARRAYS}
            rollout = Rollout(
                prompt=prompt,
                sibling=about["sibling"],
                text=about["text"],
                finish=about["finish"],
                temperature=about["temperature"],
                kept=Kept(arrays["kept_ids"][ids], arrays["kept_counts"][part]) if about.get("kept") else None,
                **steps,
            )
            groups.setdefault(number, []).append(
                Scored(rollout, about["reward"], about["parts"], about.get("notes", {}))
            )
    return list(groups.values())
