"""The page of samples: what is in it, that no text of a model becomes markup, and colours that all readers can tell."""

from __future__ import annotations

import itertools
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gcore.cli import main
from gcore.observe import page_samples
from gcore.observe.page import write_pages
from gcore.observe.page_samples import samples_model, samples_page, thinned
from tests.unit.test_page import EVIL, Page, a_run, saved, small


def row(step: int, phase: str = "train", text: str = "85", **sample: Any) -> dict[str, Any]:
    one = {"sibling": 0, "text": text, "reward": 1.0, "parts": {"exact": 1.0}, "notes": {}, "version": step - 1,
           "finish": "stop", "length": 3, **sample}  # fmt: skip
    return {"step": step, "phase": phase, "prompt": step * 10, "row": 3, "messages": [["user", "27+58="]],
            "answer": "85", "siblings": 1, "samples": [one]}  # fmt: skip


def with_samples(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / "samples").mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "samples" / "controller-0.jsonl").write_text(lines + '{"step": 9, "sam')
    return folder


def test_the_model() -> None:
    rows = [row(1), row(2, parts={"exact": 0.0, "critic": 0.5}), row(4, "eval")]
    model = samples_model(rows, "sums", "report.html")
    assert model["lead"] == "3 prompts · 3 answers · steps 1 to 4"
    assert (model["parts"], model["groups"]) == (["exact", "critic"], rows)
    assert samples_model(rows[:1], "sums")["lead"] == "1 prompt · 1 answer · steps 1 to 1"


def test_run_report_and_samples_link_to_each_other(tmp_path: Path) -> None:
    folder = with_samples(a_run(tmp_path / "sums"), row(1), row(2))
    report = Page(write_pages([folder], folder / "report.html")[0].read_text())
    samples = Page((folder / "samples.html").read_text())
    assert ("a", "href", "samples.html") in report.attributes
    assert ("a", "href", "report.html") in samples.attributes
    assert samples.model == {"parts": ["exact"], "groups": [row(1), row(2)]}
    assert not list(folder.glob("*.tmp"))


def test_gcore_report_names_both_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_samples(a_run(tmp_path / "sums"), row(1))
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder / 'report.html'}\nwrote {folder / 'samples.html'}\n"
    assert main(["report", str(folder), "-o", str(tmp_path / "alone.html")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'alone.html'}\n"


def test_only_a_finger_taps(tmp_path: Path) -> None:
    """A browser without a pointer has no hover either: `hover: none` is true on a desktop without a mouse."""
    page = write_pages([a_run(tmp_path / "sums")], tmp_path / "report.html")[0].read_text()
    assert 'matchMedia("(pointer: coarse)")' in page and "hover: none" not in page


def test_no_samples_no_page(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "sums")
    assert samples_page(folder) is None
    report = Page(write_pages([folder], folder / "report.html")[0].read_text())
    assert "a" not in report.tags and not (folder / "samples.html").exists()
    with_samples(folder, row(1))
    elsewhere = Page(write_pages([folder], tmp_path / "elsewhere.html")[0].read_text())  # nothing lies beside it
    both = Page(write_pages([folder, saved(tmp_path / "a.json", small())], folder / "both.html")[0].read_text())
    assert "a" not in elsewhere.tags and "a" not in both.tags


def test_text_of_models_stays_text(tmp_path: Path) -> None:
    evil = row(1, text=EVIL, notes={EVIL: [EVIL]}, parts={EVIL: 1.0})
    evil |= {"messages": [[EVIL, EVIL]], "answer": EVIL}
    folder = with_samples(a_run(tmp_path / "sums"), evil)
    html = samples_page(folder, "report.html")
    assert html is not None
    parsed = Page(html)
    assert parsed.tags.count("script") == 2 and "alert(1)" not in parsed.scripts[1] and "alert(1)" not in parsed.text
    assert not set("<>&\u2028") & set(parsed.scripts[0])
    assert parsed.model["groups"] == [evil]
    assert not any(name.startswith("on") for _, name, _ in parsed.attributes)
    fetching = [(t, n, v) for t, n, v in parsed.attributes if n in ("src", "href", "srcset", "action")]
    assert fetching == [("link", "href", "data:,"), ("a", "href", "report.html")]
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|innerHTML|outerHTML|insertAdjacent", html)
    assert sum(v is not None and v.startswith("default-src 'none'") for _, n, v in parsed.attributes if n == "content")


def test_a_large_log_is_thinned_by_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(step, text="x" * 1000) for step in range(1, 11) for _ in range(2)]
    size = len(json.dumps(rows[0]))
    monkeypatch.setattr(page_samples, "MAX_BYTES", 9 * size)
    assert [r["step"] for r in thinned(rows)] == [1, 1, 4, 4, 7, 7, 10, 10]
    assert samples_model(rows, "sums")["lead"].endswith("6 of the logged steps are omitted, at even intervals")
    monkeypatch.setattr(page_samples, "MAX_BYTES", 1)
    assert [r["step"] for r in thinned(rows)] == [1, 1]


# --- colours: what is seen with the three kinds of colour blindness, after Machado, Oliveira and Fernandes (2009)

SEEN = {
    "all": np.eye(3),
    "without red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "without green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "without blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]


def lab(color: str, seen: Any) -> Any:
    """CIELAB of a colour as it is seen."""
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = np.asarray(TO_XYZ) @ np.clip(np.asarray(seen) @ linear, 0, 1) / [0.95047, 1.0, 1.08883]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_two_roles_look_alike(scheme: str, seen: str) -> None:
    css = files("gcore.observe").joinpath("page.css").read_text()
    part = css.split("@media (prefers-color-scheme: dark)")[scheme == "dark"].split("\n}\n")[0]
    colors = dict(re.findall(r"--(policy|trainer|switch|controller|role-\d|card): (#\w{6})", part))
    assert len(colors) == 12
    nearest = min(
        (float(np.linalg.norm(lab(a, SEEN[seen]) - lab(b, SEEN[seen]))), one, two)
        for (one, a), (two, b) in itertools.combinations(colors.items(), 2)
    )
    assert nearest[0] > 19, nearest
