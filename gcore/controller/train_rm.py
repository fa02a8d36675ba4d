"""`gcore train-rm`: trains a scalar reward model on pairs of answers, on one or several trainer ranks.

    rows ──pair_of: conversations──> tokens ──> ranks (score_ranks.py), step by step ──> Hugging Face folder, checked
                                                         └──> checkpoints

The conversations use the same template and tokenizer as in serving (rewarding/scalar.py).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gcore.checkpoint import store
from gcore.config import dump_config
from gcore.config.reward_model import Pairs, RewardModelConfig
from gcore.config.tree import Model, Observe
from gcore.controller.build import quiet
from gcore.controller.pins import pin_pairs
from gcore.observe.metrics import MetricsWriter, rewind
from gcore.prompts.answers import pair_of
from gcore.prompts.files import Rows
from gcore.prompts.rows import check_media, read_rows
from gcore.prompts.tokenizer import load_tokenizer, with_padding
from gcore.rewarding.scalar import render, tokens_of
from gcore.types import Ints, Message, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gcore.controller.score_ranks import Pair, ScoreRanks

NUM_LINES = 20  # lines of progress per run, about
MAX_SILENCE_S = 30.0  # longest time without a line


def check_pairs(config: RewardModelConfig) -> None:
    """The checks that need no torch: the files and their columns. Raises UserError."""
    data = config.data
    for key, spec in (("data.train", data.train), *([("data.eval", data.eval)] if data.eval else [])):
        rows = open_pairs(spec, key)
        if not len(rows):
            raise UserError(f"{key}: no rows in {spec.path}; expected at least one")
        try:
            pair_of(rows[0], spec, key)
        except ValueError as error:
            raise UserError(f"{key}: row 0: {error}") from None


def train_rm(config: RewardModelConfig, print_line: Callable[[str], None]) -> Path:
    """Train a model and return its folder. `print_line`: prints a line on the terminal."""
    config = pin_pairs(config)
    check_pairs(config)
    quiet()
    import transformers

    from gcore.controller.score_ranks import started
    from gcore.models import longest_text, make_empty, pick_device

    transformers.logging.disable_progress_bar()
    tokenizer = with_padding(load_tokenizer(config.model, chat=True), config.model)
    data, training = config.data, config.training
    train = read_pairs(data.train, tokenizer, "data.train")
    held_out = read_pairs(data.eval, tokenizer, "data.eval") if data.eval else []
    longest = min(data.max_length, longest_text(make_empty(config.model, tokenizer)))
    train = _fitting(train, longest, "data.train", print_line)
    held_out = _fitting(held_out, longest, "data.eval", print_line) if data.eval else []
    folder, checkpoint = _open(config)
    device = pick_device(training.device)

    async def run() -> tuple[Path, Journal]:
        async with started(config, longest) as ranks:
            print_line(
                f"{len(train)} pairs to train on, {len(held_out)} held out; {ranks.num_parameters:,} parameters on "
                f"{device}{f', {training.ranks} ranks' if training.ranks > 1 else ''}"
            )
            done = 0
            if checkpoint is not None:
                done = await ranks.load(checkpoint)
                rewind(folder, done, None)
                print_line(f"resumed from {checkpoint} at step {done}")
            with MetricsWriter(folder, Observe(tensorboard=False), config.run.name, {}) as metrics:
                journal = Journal(training.steps, metrics, print_line)
                await _steps(config, ranks, train, held_out, journal, done)
            return await ranks.save(training.steps), journal

    last, journal = asyncio.run(run())
    network = _network_of(config, tokenizer, last)
    _save(network, tokenizer, folder)
    _check_reload(network, folder, [text for pair in train[:8] for text in pair])
    if not training.checkpoint_every:
        shutil.rmtree(last)
    which, found = ("held-out pairs", journal.eval) if held_out else ("training pairs", journal.train)
    result = (
        f"accuracy on {which} {found['accuracy']:.4f}, margin {found['margin']:.2f}" if found else "no step was left"
    )
    print_line(f"{result}; wrote {folder}")
    return folder


async def _steps(
    config: RewardModelConfig,
    ranks: ScoreRanks,
    train: Sequence[Pair],
    held_out: Sequence[Pair],
    journal: Journal,
    done: int,
) -> None:
    """`done`: steps of the checkpoint that was loaded."""
    training = config.training
    steps, given, size = training.steps, training.eval_every, training.batch_size
    every = max(1, steps // 10) if given == "auto" else given
    draw = itertools.islice(_endless(len(train), config.run.seed), done * size, None)
    for step in range(done and done + 1, steps + 1):
        if step:
            batch = [train[i] for i in itertools.islice(draw, size)]
            journal.trained(step, await ranks.update(step, batch))
        if held_out and (step in (0, steps) or (every and step % every == 0)):
            journal.evaluated(step, await ranks.evaluate(held_out))
        journal.write_line(step)
        if step and step < steps and training.checkpoint_every and step % training.checkpoint_every == 0:
            await ranks.save(step)


class Journal:
    """The metrics of the training: every step goes to metrics.jsonl, a summary of several steps to the terminal."""

    def __init__(self, steps: int, metrics: MetricsWriter, print_line: Callable[[str], None]) -> None:
        self._steps, self._metrics, self._print_line = steps, metrics, print_line
        self._recent: list[dict[str, float]] = []  # steps since the last line
        self._last_line_s, self._skipped = time.monotonic(), 0
        self._new_eval = False  # since the last line
        self.train: dict[str, float] = {}  # means over the steps of the last line
        self.eval: dict[str, float] = {}  # of the held-out pairs

    def trained(self, step: int, found: dict[str, float]) -> None:
        self._metrics.log({"step": step, **{f"train/{name}": value for name, value in found.items()}})
        self._recent.append(found)
        self._skipped += int(found["skipped"])

    def evaluated(self, step: int, found: dict[str, float]) -> None:
        self._metrics.log({"step": step, **{f"eval/{name}": value for name, value in found.items()}})
        self.eval, self._new_eval = found, True

    def write_line(self, step: int) -> None:
        """Print a line after every evaluation, about NUM_LINES times per run, and after MAX_SILENCE_S seconds."""
        due = step == self._steps or (step and step % max(1, self._steps // NUM_LINES) == 0)
        if not (due or self._new_eval or time.monotonic() - self._last_line_s > MAX_SILENCE_S):
            return
        line = f"step {step:>{len(str(self._steps))}}/{self._steps}"
        if self._recent:
            self.train = {name: _mean(self._recent, name) for name in ("loss", "accuracy", "margin")}
            line += f"   loss {self.train['loss']:.4f}   accuracy {self.train['accuracy']:.3f}"
        if self._new_eval:
            line += f"   held out: accuracy {self.eval['accuracy']:.3f}, margin {self.eval['margin']:.2f}"
        if self._skipped:
            line += f"   ({self._skipped} skipped: the loss was not finite)"
        self._print_line(line)
        self._recent, self._last_line_s, self._new_eval = [], time.monotonic(), False


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    values = [row[name] for row in rows if math.isfinite(row[name])]
    return sum(values) / len(values) if values else math.nan


def _endless(num: int, seed: int) -> Iterator[int]:
    """Indices of the pairs: every pair once per epoch, in a new order each epoch."""
    for epoch in itertools.count():
        yield from np.random.default_rng([seed % 2**64, epoch]).permutation(num).tolist()


# ---- pairs ----


def open_pairs(spec: Pairs, key: str) -> Rows:
    rows = read_rows(spec, spec.size, key)
    for name in ("chosen_column", "rejected_column"):
        if len(rows) and getattr(spec, name) not in rows.columns:
            raise UserError(
                f"{key}.{name}: no column {getattr(spec, name)!r}; the dataset has {', '.join(sorted(rows.columns))}"
            )
    return rows


def read_pairs(spec: Pairs, tokenizer: Any, key: str) -> list[Pair]:
    """The rows as tokens, chosen and rejected. Rows with two equal answers are left out."""
    rows = open_pairs(spec, key)
    alphabet = frozenset(getattr(tokenizer, "alphabet", ""))
    texts: list[str] = []  # chosen, rejected, chosen, rejected, ...
    for index, row in enumerate(rows):
        check_media(row, f"{key}: row {index}")
        try:
            both = pair_of(row, spec, key)
            for conversation in both:
                _check_alphabet(conversation, alphabet)
            chosen, rejected = (render(tokenizer, conversation) for conversation in both)
        except ValueError as error:
            raise UserError(f"{key}: row {index}: {error}") from None
        texts += [chosen, rejected] if chosen != rejected else []
    if not texts:
        raise UserError(f"{key}: no pairs in {spec.path}; expected at least one whose two answers differ")
    tokens = tokens_of(tokenizer, texts)
    return list(zip(tokens[::2], tokens[1::2], strict=True))


def _check_alphabet(conversation: Sequence[Message], alphabet: frozenset[str]) -> None:
    """A built model would read a character without a token as <unk>, without an error."""
    characters = {c for message in conversation if isinstance(message.get("content"), str) for c in message["content"]}
    if alphabet and (missing := characters - alphabet):
        raise ValueError(f"no token for the characters {''.join(sorted(missing))!r} (add them to model.build.alphabet)")


def _fitting(pairs: list[Pair], longest: int, key: str, print_line: Callable[[str], None]) -> list[Pair]:
    kept = [pair for pair in pairs if max(map(len, pair)) <= longest]
    if not kept:
        raise UserError(f"{key}: none of the {len(pairs)} pairs fits in {longest} tokens (key: data.max_length)")
    if len(kept) < len(pairs):
        print_line(f"{key}: dropped {len(pairs) - len(kept)} of {len(pairs)} pairs, longer than {longest} tokens")
    return kept


# ---- the folder ----


def _open(config: RewardModelConfig) -> tuple[Path, Path | None]:
    """Create the folder. An older model of the same name is renamed, never overwritten, unless it is resumed. Returns
    also the checkpoint to resume from."""
    folder, resume = config.run.folder, config.run.resume
    if resume not in ("never", "auto"):
        raise UserError(f"run.resume={resume}; expected never or auto")
    found = store.complete(folder) if resume == "auto" else []
    try:
        if folder.exists() and not found:
            number = 1
            while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
                number += 1
            shutil.move(folder, aside)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train_rm.yaml").write_text(dump_config(config))
    except OSError as error:
        raise UserError(f"run.dir: cannot write {folder}: {error.strerror or error}") from None
    return folder, max(found, key=store.position) if found else None


def _network_of(config: RewardModelConfig, tokenizer: Any, checkpoint: Path) -> PreTrainedModel:
    """The model with the weights of a checkpoint, in this process."""
    import torch

    from gcore.checkpoint import tensors
    from gcore.models import load_scorer

    cpu = torch.device("cpu")
    network = load_scorer(config.model, config.run.seed, torch.float32, cpu, tokenizer=tokenizer, new_head=True)
    weights = checkpoint / "weights"
    network.load_state_dict(tensors.read(weights, tensors.shapes(weights)), strict=False)
    return network


def _save(network: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Write config.json last, so that an incomplete folder does not load."""
    temp = folder / "saving"
    network.save_pretrained(temp)
    tokenizer.save_pretrained(temp)
    for file in sorted(temp.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(file, folder / file.name)
    temp.rmdir()


def _check_reload(network: PreTrainedModel, folder: Path, texts: Sequence[Ints]) -> None:
    import torch

    from gcore.models import load_scorer, score_texts

    again = load_scorer(Model(path=str(folder)), 0, torch.float32, network.device)
    width = max(map(len, texts))
    with torch.no_grad():
        difference = float((score_texts(network, texts, width) - score_texts(again, texts, width)).abs().max())
    if not difference <= 1e-4:
        raise RuntimeError(f"{folder}: the scores of the reloaded model differ by {difference:.2e}")
