"""The log of samples: the same groups for any number of controllers, bounded size, rewound at a resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from gcore.content.tokens import Tokens
from gcore.observe import samples
from gcore.observe.metrics import rewind
from gcore.observe.samples import SampleLog, read_samples, shortened
from gcore.types import Prompt, Rollout, Scored


def group_of(number: int, siblings: int = 2, text: str = "85") -> list[Scored]:
    prompt = Prompt(
        number, number % 7, ({"role": "user", "content": "27+58="},), "<s>27+58=", Tokens(np.arange(3)), {"answer": 85}
    )
    steps = np.array([4, 5, 2], np.int32)
    made = Rollout(prompt, 0, Tokens.steps(steps), steps * 0.1, steps > 0, text, np.array([4, 3, 4], np.int32), "stop")
    notes = {"critic": ["Right. Score: 9"]}
    return [Scored(replace(made, sibling=i), i / 2, {"exact": 1.0, "critic": 0.9}, notes) for i in range(siblings)]


def test_a_row(tmp_path: Path) -> None:
    SampleLog(tmp_path, rank=0, seed=0, per_step=1, steps=5).write(4, [70], [group_of(70, 1)])
    assert read_samples(tmp_path) == [
        {
            "step": 4, "phase": "train", "prompt": 70, "row": 0, "messages": [["user", "27+58="]],
            "input": "<s>27+58=", "answer": "85", "siblings": 1,
            "samples": [
                {"sibling": 0, "text": "85", "reward": 0.0, "parts": {"exact": 1.0, "critic": 0.9},
                 "notes": {"critic": ["Right. Score: 9"]}, "version": 3, "finish": "stop", "length": 3}
            ],
        }
    ]  # fmt: skip


def test_the_choice_does_not_depend_on_the_number_of_controllers(tmp_path: Path) -> None:
    found = []
    for num in (1, 2, 5):
        folder = tmp_path / str(num)
        for step in range(1, 9):
            prompts = range(step * 20, step * 20 + 20)
            for rank in range(num):
                mine = [group_of(p) for p in prompts if p % num == rank]
                SampleLog(folder, rank, seed=3, per_step=2, steps=8).write(step, prompts, mine)
        found.append(read_samples(folder))
    assert found[0] == found[1] == found[2]
    assert [row["step"] for row in found[0]] == [step for step in range(1, 9) for _ in range(2)]
    places = {row["prompt"] % 20 for row in found[0]}
    assert len(places) > 8  # not always the first
    assert {row["prompt"] for row in found[0]} != {
        p
        for step in range(1, 9)
        for p in SampleLog(tmp_path, 0, 4, 2, 8).choose(step, range(step * 20, step * 20 + 20))
    }


def test_long_runs_log_every_nth_step(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(samples, "MAX_GROUPS", 10)
    log = SampleLog(tmp_path, 0, 0, per_step=2, steps=20)
    assert [step for step in range(1, 21) if log.choose(step, [1, 2, 3])] == [4, 8, 12, 16, 20]
    assert SampleLog(tmp_path, 0, 0, per_step=2, steps=5).choose(3, [1, 2, 3])


def test_evaluations_log_the_same_prompts(tmp_path: Path) -> None:
    for rank in (1, 0):
        log = SampleLog(tmp_path, rank, 0, per_step=3, steps=5)
        for step in (0, 5):
            log.write_eval(step, [group_of(p, 1) for p in range(10) if p % 2 == rank])
    assert [(row["step"], row["prompt"]) for row in read_samples(tmp_path)] == [
        (s, p) for s in (0, 5) for p in range(3)
    ]


def test_rewind(tmp_path: Path) -> None:
    for rank in (0, 1):
        log = SampleLog(tmp_path, rank, 0, per_step=9, steps=3)
        for step in (1, 2, 3):
            log.write(step, [step], [group_of(step)])
    torn = tmp_path / "samples" / "controller-1.jsonl"
    torn.write_bytes(torn.read_bytes() + b'{"step": 1, "samp')
    rewind(tmp_path, 2)
    assert [row["step"] for row in read_samples(tmp_path)] == [1, 1, 2, 2]
    assert all(json.loads(line) for line in torn.read_text().splitlines())
    rewind(tmp_path, 0, warm_start=3)
    assert read_samples(tmp_path) == []


def test_size_is_bounded(tmp_path: Path) -> None:
    text = "a" * 50_000 + "b" * 50_000
    assert shortened(text) == "a" * 4000 + "\n[... 94,000 characters left out ...]\n" + "b" * 2000
    SampleLog(tmp_path, 0, 0, per_step=1, steps=1).write(1, [1], [group_of(1, 40, text)])
    (row,) = read_samples(tmp_path)
    assert (row["siblings"], len(row["samples"])) == (40, 16)
    assert (tmp_path / "samples" / "controller-0.jsonl").stat().st_size < 16 * 7000


def test_text_of_any_kind(tmp_path: Path) -> None:
    """Half a character (a lone surrogate), NaN, images."""
    group = group_of(1, 1, "half \ud83d")
    content = [{"type": "image"}, {"type": "text", "text": "what?"}]
    prompt = replace(group[0].rollout.prompt, messages=({"role": "user", "content": content},))
    odd = replace(group[0], rollout=replace(group[0].rollout, prompt=prompt), parts={"x": float("nan")})
    SampleLog(tmp_path, 0, 0, 1, 1).write(1, [1], [[odd]])
    (row,) = read_samples(tmp_path)
    assert row["messages"] == [["user", "[image]\nwhat?"]]
    assert row["samples"][0]["text"] == "half ?" and row["samples"][0]["parts"] == {"x": None}


def test_special_tokens_are_logged_with_their_places(tmp_path: Path) -> None:
    """Also in a text whose middle is left out: 4,000 characters, a line that says so, 2,000 characters."""
    text = "a" * 5000 + "b" * 5000
    places = [(0, "<s>"), (6000, "<|im_end|>"), (9999, "</s>")]
    log = SampleLog(tmp_path, 0, 0, per_step=1, steps=1, hidden=lambda content, output: places)
    log.write(1, [1], [group_of(1, 1, text)])
    (sample,) = read_samples(tmp_path)[0]["samples"]
    assert [name for _, name in sample["special"]] == ["<s>", "</s>"]
    assert sample["special"][0][0] == 0 and sample["special"][1][0] == len(sample["text"]) - 1
