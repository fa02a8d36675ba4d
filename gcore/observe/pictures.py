"""Pictures of logged samples, as data URIs inside the pages, which then need no files.

    Rollout.output: ArrayRef ──keep: copies the file──> samples/pictures ──> samples.html, report.html
    media of a prompt ──content.media.shown_media: small copies──> the log of samples ──> samples.html

A controller copies the files of outputs; it does not open them. The process that writes the pages reads them.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gcore.content.media import ArrayRef, picture_url
from gcore.observe.files import replacing, told
from gcore.observe.values import Row, step_of

FOLDER = "pictures"
MAX_SIDE = 512  # pixels of a picture in a page
MAX_GRID = 40  # pictures of an evaluation in the report


def keep(ref: ArrayRef, folder: Path) -> str:
    """Copy the file of a picture to `folder`/pictures; returns its name. Engines remove theirs after some steps."""
    target = folder / FOLDER / Path(ref.path).name
    if not target.is_file():
        with told(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(ref.path, "rb") as picture, replacing(target) as file:
                shutil.copyfileobj(picture, file)
    return target.name


def with_pictures(rows: Sequence[Row], folder: Path) -> list[Row]:
    """Logged groups with their pictures as URIs. `folder`: of the logged samples."""

    def shown(sample: Row) -> Row:
        if (name := sample.get("picture")) is None:
            return sample
        file = folder / FOLDER / Path(str(name)).name
        return {**sample, "picture": picture_url(np.load(file), MAX_SIDE) if file.is_file() else None}

    return [{**row, "samples": [shown(sample) for sample in row["samples"]]} for row in rows]


def before_and_after(rows: Sequence[Row], folder: Path) -> list[dict[str, Any]]:
    """The pictures of the first and of the last evaluation, for the report. Empty for a run without pictures."""
    held_out = [row for row in rows if row.get("phase") == "eval" and row["samples"][0].get("picture")]
    steps = sorted({step_of(row) for row in held_out})
    grids = []
    for step in dict.fromkeys(steps[:1] + steps[-1:]):
        chosen = [row for row in held_out if step_of(row) == step][:MAX_GRID]
        pictures = [
            {"prompt": row["messages"][-1][1], "uri": sample["picture"], "reward": sample["reward"]}
            for row in with_pictures(chosen, folder)
            for sample in row["samples"][:1]
            if sample["picture"]
        ]
        if pictures:
            grids.append({"title": "Before training" if step == 0 else f"After step {step}", "pictures": pictures})
    return grids
