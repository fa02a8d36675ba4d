"""Pictures of logged samples: the files of a few are copied when a step is logged, and become part of the pages later.

    Rollout.output: ArrayRef ──keep: copies the file──> samples/pictures ──data_uri──> samples.html, report.html

A controller copies files; it does not open them. The process that writes the pages reads them.
"""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gcore.content.media import ArrayRef
from gcore.observe.files import told
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
            shutil.copyfile(ref.path, partial := target.with_name(f"{target.name}.partial"))
            partial.replace(target)
    return target.name


def data_uri(file: Path) -> str | None:
    """The picture as PNG inside a URI; of a video the frame in the middle. None: there is no such file."""
    from PIL import Image

    if not file.is_file():
        return None
    pixels: np.ndarray = np.load(file)
    image = Image.fromarray(pixels[len(pixels) // 2] if pixels.ndim == 4 else pixels)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    written = io.BytesIO()
    image.save(written, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()


def with_pictures(rows: Sequence[Row], folder: Path) -> list[Row]:
    """Logged groups with their pictures as URIs. `folder`: of the logged samples."""

    def shown(sample: Row) -> Row:
        name = sample.get("picture")
        return sample if name is None else {**sample, "picture": data_uri(folder / FOLDER / Path(str(name)).name)}

    return [{**row, "samples": [shown(sample) for sample in row["samples"]]} for row in rows]


def before_and_after(rows: Sequence[Row], folder: Path) -> list[dict[str, Any]]:
    """The pictures of the first and of the last evaluation, for the report. Empty for a run without pictures."""
    held_out = [row for row in rows if row.get("phase") == "eval" and row["samples"][0].get("picture")]
    steps = sorted({step_of(row) for row in held_out})
    found = []
    for step in dict.fromkeys(steps[:1] + steps[-1:]):
        chosen = [row for row in held_out if step_of(row) == step][:MAX_GRID]
        pictures = [
            {"prompt": row["messages"][-1][1], "uri": sample["picture"], "reward": sample["reward"]}
            for row in with_pictures(chosen, folder)
            for sample in row["samples"][:1]
            if sample["picture"]
        ]
        found.append({"title": "Before training" if step == 0 else f"After step {step}", "pictures": pictures})
    return [grid for grid in found if grid["pictures"]]
