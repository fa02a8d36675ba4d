"""Logs some groups of each step for reading: runs/NAME/samples/controller-N.jsonl.

    trained prompts of a step (known to all controllers) ──choose──> the same ones in each controller ──> one line each

The choice depends only on the step, the seed and the prompts. It does not affect training.
For long runs only every n-th step is logged, so that a run writes at most about MAX_GROUPS lines.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gcore.config.secrets import hide
from gcore.content.media import ArrayRef, shown_media
from gcore.observe.files import LineFile, whole_lines
from gcore.observe.pictures import keep
from gcore.observe.values import Row, clean, step_of
from gcore.types import Prompt, Rollout, Scored

FOLDER = "samples"
MAX_GROUPS = 2000  # per run
MAX_SIBLINGS = 16  # per group, and other segments per sample
MAX_LENGTH = 6000  # characters of a text: two thirds of them from its beginning, the rest from its end
HEAD, TAIL = MAX_LENGTH * 2 // 3, MAX_LENGTH // 3
MAX_SPECIAL = 64  # special tokens per answer
Phase = Literal["train", "eval"]
Hidden = Callable[[Any, str], Sequence[tuple[int, str]]]  # Modality.hidden_steps of content/base.py


class SampleLog:
    """SampleLog(Path("runs/a"), rank=0, seed=0, per_step=2, steps=150).write(12, [70, 71, 72], groups)"""

    def __init__(
        self, folder: Path, rank: int, seed: int, per_step: int, steps: int, hidden: Hidden = lambda content, output: []
    ) -> None:
        self._hidden, self._path = hidden, folder / FOLDER / f"controller-{rank}.jsonl"
        self._file = LineFile(self._path)
        self._seed, self._per_step = seed, per_step
        self._stride = max(1, math.ceil(steps * per_step / MAX_GROUPS))

    def write(self, step: int, prompts: Collection[int], groups: Sequence[Sequence[Scored]]) -> None:
        """`prompts`: ids of all groups of the step; `groups`: the groups of this controller."""
        self._append(step, "train", self.choose(step, prompts), groups)

    def write_eval(self, step: int, groups: Sequence[Sequence[Scored]], eval_set: str = "") -> None:
        """The first held-out prompts of a set: the same ones at each evaluation, so that answers can be compared."""
        chosen = set(range(self._per_step)) if step % self._stride == 0 else set()
        self._append(step, "eval", chosen, groups, eval_set)

    def choose(self, step: int, prompts: Collection[int]) -> set[int]:
        if step % self._stride:
            return set()
        return set(sorted(set(prompts), key=lambda prompt: _hash(self._seed, step, prompt))[: self._per_step])

    def _append(
        self, step: int, phase: Phase, chosen: set[int], groups: Sequence[Sequence[Scored]], eval_set: str = ""
    ) -> None:
        named = {"set": eval_set} if eval_set else {}
        rows = [
            _row(step, phase, group, self._path.parent, self._hidden) | named
            for group in groups
            if group and group[0].rollout.prompt.id in chosen
        ]
        if rows:
            self._file.append(hide(json.dumps(clean(row), ensure_ascii=False)) for row in rows)


def read_samples(folder: Path) -> list[Row]:
    """All logged groups, ordered by step and prompt. A line cut off by a kill is skipped."""
    rows = [row for path in sample_files(folder) for _, row in whole_lines(path) if "samples" in row]
    return sorted(
        rows, key=lambda row: (step_of(row), row.get("phase") != "eval", row.get("set", ""), row.get("prompt", 0))
    )


def sample_files(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("controller-*.jsonl"))


def _hash(*key: int) -> bytes:
    return hashlib.blake2b(repr(key).encode(), digest_size=8).digest()


def _row(step: int, phase: Phase, group: Sequence[Scored], folder: Path, hidden: Hidden) -> Row:
    prompt = group[0].rollout.prompt
    messages = [(role, shortened(text)) for role, text in _messages(prompt)]
    is_plain = [text for _, text in messages] == [shortened(prompt.text)]
    answer = prompt.columns.get("answer")
    return {
        "step": step,
        "phase": phase,
        "prompt": prompt.id,
        "row": prompt.row,
        "messages": [list(message) for message in messages],
        **({} if is_plain else {"input": shortened(prompt.text)}),  # after the chat template
        **({"images": shown} if (shown := shown_media(prompt.columns)) else {}),
        "answer": None if answer is None else shortened(str(answer)),
        "siblings": len(group),
        "samples": [_sample(scored, folder, hidden) for scored in group[:MAX_SIBLINGS]],
    }


def _sample(scored: Scored, folder: Path, hidden: Hidden) -> Row:
    rollout, rewards = scored.rollout, scored.segment_rewards
    others = [
        {"sibling": segment.sibling, "length": segment.num_steps, "finish": segment.finish, "shared": segment.shared}
        | _shown(segment, folder, hidden)
        | ({"reward": rewards[i]} if rewards else {})
        for i, segment in enumerate(rollout.segments[:MAX_SIBLINGS], 1)
    ]
    return {
        "sibling": rollout.sibling,
        **_shown(rollout, folder, hidden),
        "reward": scored.reward,
        "parts": dict(scored.parts),
        "notes": {name: [shortened(text) for text in texts] for name, texts in scored.notes.items()},
        "version": rollout.version,
        "finish": rollout.finish,
        "length": rollout.num_steps,
        **({"segments": others, "num_segments": len(rollout.trajectory)} if others else {}),
    }


def _shown(rollout: Rollout, folder: Path, hidden: Hidden) -> Row:
    """The output: a text with its special tokens, or a picture."""
    output = rollout.output
    if isinstance(output, ArrayRef):
        return {"text": "", "picture": keep(output, folder)}
    text = str(output)
    places = [(_place_in_shortened(at, len(text)), name) for at, name in hidden(rollout.content, text)]
    special = [[at, name] for at, name in places if at is not None][:MAX_SPECIAL]
    return {"text": shortened(text), **({"special": special} if special else {})}


def _messages(prompt: Prompt) -> Iterable[tuple[str, str]]:
    if not prompt.messages:
        return [("", prompt.text)]
    return [(str(m.get("role", "")), _text(m.get("content"))) for m in prompt.messages]


def _text(content: Any) -> str:
    """A message's text; for a list of parts, their texts or types."""
    if isinstance(content, list | tuple):
        parts = (part if isinstance(part, Mapping) else {"text": part} for part in content)
        return "\n".join(str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]" for part in parts)
    return str(content or "")


def shortened(text: str) -> str:
    if len(text) <= MAX_LENGTH:
        return text
    return f"{text[:HEAD]}{_left_out(len(text))}{text[-TAIL:]}"


def _left_out(length: int) -> str:
    return f"\n[... {length - HEAD - TAIL:,} characters left out ...]\n"


def _place_in_shortened(place: int, length: int) -> int | None:
    """Of a place in a text of this length. None: it is left out."""
    if length <= MAX_LENGTH or place <= HEAD:
        return place
    after = place - (length - TAIL)
    return HEAD + len(_left_out(length)) + after if after >= 0 else None
