"""The samples of a run as one HTML page next to its report: runs/NAME/samples.html.

    samples/controller-N.jsonl ──read_samples──> groups ──samples_model──> samples.html, whose script filters them

Texts of models and datasets are never markup: they are escaped JSON in the page, and textContent in the script.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gcore.observe.page_html import render, thinned_steps
from gcore.observe.pictures import with_pictures
from gcore.observe.samples import FOLDER, read_samples
from gcore.observe.values import Row, step_of

PARTS = ("page_samples.html", "page.css", "page_samples.css", "page_base.js", "page_samples.js")
FILE = "samples.html"
MAX_BYTES = 12_000_000  # of a page's data; above this, whole steps are omitted at even intervals


def samples_page(folder: Path, report: str | None = None) -> str | None:
    """The page's HTML; None for a run without samples. `report`: the page to link back to."""
    if not (rows := read_samples(folder)):
        return None
    model = samples_model(rows, folder.resolve().name, report)
    groups = with_pictures(model["groups"], folder / FOLDER)
    return render(PARTS, {**model, "groups": groups}, ("parts", "groups"))


def samples_model(rows: Sequence[Row], name: str, report: str | None = None) -> dict[str, Any]:
    kept = thinned(rows)
    steps, num_steps = {step_of(row) for row in kept}, len({step_of(row) for row in rows})
    answers = sum(len(row["samples"]) for row in kept)
    lead = [_count(len(kept), "prompt"), _count(answers, "answer"), f"steps {min(steps)} to {max(steps)}"]
    if len(steps) < num_steps:
        lead.append(f"{num_steps - len(steps)} of the logged steps are omitted, at even intervals")
    parts = dict.fromkeys(part for row in kept for sample in row["samples"] for part in sample.get("parts") or {})
    return {"name": name, "lead": " · ".join(lead), "report": report, "parts": list(parts), "groups": kept}


def thinned(rows: Sequence[Row]) -> list[Row]:
    """At most MAX_BYTES, but at least one step: every n-th step, complete."""
    sizes: Counter[int] = Counter()
    for row in rows:
        sizes[step_of(row)] += len(json.dumps(row))
    kept = thinned_steps(sizes, MAX_BYTES)
    return [row for row in rows if step_of(row) in kept]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
