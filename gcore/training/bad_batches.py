"""Dumps of the samples whose gradients were NaN or infinite, as JSON in runs/NAME/bad_batches/.

step_12_update_1_rank_0.json:

    [{"prompt_id": 70, "sibling": 3, "reward": 1.0, "tokens": [...], "mask": [...], "advantages": [...],
      "rollout_logprobs": [...], "logprobs": [...], "old_logprobs": [...], "ref_logprobs": [...]}, ...]

`tokens` starts with the prompt; the other lists have one entry per response token. NaN and Infinity are
written as NaN and Infinity, which Python's `json` can read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from gcore.content.tokens import tokens_of
from gcore.observe.files import replacing, told
from gcore.types import Key, Sample

FOLDER = "bad_batches"
MAX_FILES = 8  # per rank and run


def dump(
    folder: Path,
    name: tuple[int, int, int],
    samples: Sequence[Sample],
    columns: Mapping[str, Mapping[Key, Tensor]],
) -> None:
    """`name`: step, mini-batch of the step, rank; `columns`: more values per response token, for some samples."""
    step, number, rank = name
    if len(list((folder / FOLDER).glob(f"*_rank_{rank}.json"))) >= MAX_FILES:
        return
    path = folder / FOLDER / f"step_{step}_update_{number}_rank_{rank}.json"
    rows = [
        {
            "prompt_id": s.prompt_id,
            "sibling": s.sibling,
            "reward": s.reward,
            "temperature": s.temperature,
            "tokens": tokens_of(s.content).tokens_T.tolist(),
            "mask": s.mask_S.tolist(),
            "rollout_logprobs": s.rollout_logprobs_S.tolist(),
            **{name: values[s.key].tolist() for name, values in columns.items() if s.key in values},
        }
        for s in samples
    ]
    with told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(f"{json.dumps(rows)}\n".encode())
