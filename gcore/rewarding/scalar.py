"""A scalar reward model: input is a conversation, output is one number.

    group ──ScalarSource: template, tokens──> score ──RPC──> ScalarModel: queued texts, in batches ──> numbers

ScalarModel is a role in its own process. Calls of all controllers enter one queue; a thread takes all queued texts and
scores them in batches, the longest texts first.

On CPU, with one thread, a text's score does not depend on the other texts of its batch, to the last bit. Kernels differ
in the last bits with the *width* of a batch, not with the number of its rows. So a text's width depends only on its own
length, and a batch has texts of one width. It always has a padded column: without padding, the library selects another
kernel. `tests/unit/test_scalar_reward.py` checks this. On GPUs the number of rows also changes the last bits.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gcore.config.rewards import ScalarReward
from gcore.content.answers import render, tokens_of
from gcore.observe.trace import Tracer
from gcore.protocols import ScorerStats
from gcore.rewarding.source import Answer, BadAnswer, Source, number
from gcore.types import Ints, Message, RewardError, Rollout, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY_BLOCK = 32
Score = Callable[[Sequence[Ints]], Awaitable[list[float]]]


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    tokens: Ints
    score: Future[float] = field(default_factory=Future)


class ScalarModel:
    """Implements protocols.Scorer: serves a sequence-classification model with one label (models/networks.py)."""

    def __init__(
        self, model: PreTrainedModel, *, max_tokens_per_batch: int = 16384, tracer: Tracer | None = None
    ) -> None:
        from gcore.models.networks import longest_text
        from gcore.threads import use_threads

        self._model, self._max_tokens = model, max_tokens_per_batch
        self._tracer = tracer or Tracer(None, "scorer")
        self._longest = longest_text(model)
        embeddings: Any = model.get_input_embeddings()
        self._vocabulary = int(embeddings.weight.shape[0])
        self._waiting: deque[_Job] = deque()
        self._wave: dict[_Job, None] = {}  # the jobs being scored, in order of arrival, without an answer yet
        self._closed = False
        self._scored, self._busy_s = 0, 0.0
        self._thread = ThreadPoolExecutor(1, "scalar-model", use_threads, (1,))

    async def score(self, texts_tokens: Sequence[Ints]) -> list[float]:
        """One number per text, in the same order."""
        for tokens in texts_tokens:
            self._check(tokens)
        if self._closed:
            raise RuntimeError("the scorer has stopped")
        jobs = [_Job(np.asarray(tokens, np.int32)) for tokens in texts_tokens]
        self._waiting.extend(jobs)
        self._thread.submit(self._score_waiting)
        return list(await asyncio.gather(*(asyncio.wrap_future(job.score) for job in jobs)))

    async def stats(self) -> ScorerStats:
        return ScorerStats(self._scored, self._busy_s, running=len(self._wave), waiting=len(self._waiting))

    def close(self) -> None:
        """Waits for the batch that is being scored. All other calls fail."""
        self._closed = True
        self._thread.shutdown()
        self._fail(RuntimeError("the scorer was closed"))

    def _check(self, tokens: Ints) -> None:
        """Raises RewardError, since a retry would not help. An index out of range would make the GPU unusable for all
        later calls."""
        if not 1 <= len(tokens) <= self._longest:
            raise RewardError(
                f"got a text of {len(tokens)} tokens; this reward model takes 1 to {self._longest} "
                "(key: rewards.models.max_length)"
            )
        if not 0 <= int(np.min(tokens)) <= int(np.max(tokens)) < self._vocabulary:
            raise RewardError(
                f"got a text with token {int(np.max(tokens))}; the reward model's vocabulary has {self._vocabulary} "
                "(is the tokenizer the model's own? key: rewards.models.model.tokenizer)"
            )

    # ---- the scoring thread ---------------------------------------------------------------------------------------

    def _score_waiting(self) -> None:
        """Each call asks for this; one wave scores the texts of all calls that have come. It is finished before the
        next one begins, so that no text waits forever behind longer ones."""
        import torch

        while self._waiting and not self._closed:
            job = self._waiting.popleft()
            if not job.score.done():  # done: cancelled
                self._wave[job] = None
        if not self._wave:  # an earlier wave has scored them
            return
        try:
            with torch.inference_mode(), self._tracer.span("score", texts=len(self._wave)):
                for width, batch in self._batches():
                    if self._closed:
                        return
                    self._score_batch(width, batch)
            self._tracer.flush()
        except BaseException as error:  # the calls would wait forever
            self._fail(RuntimeError(f"the scorer failed: {type(error).__name__}: {error}"))

    def _score_batch(self, width: int, batch: list[list[_Job]]) -> None:
        started = time.perf_counter()
        jobs = [job for same_text in batch for job in same_text]
        answers: list[float] | Exception
        try:
            scores = self._forward([same_text[0].tokens for same_text in batch], width)
            answers = [score for score, same_text in zip(scores, batch, strict=True) for _ in same_text]
            self._scored += len(jobs)
        except Exception as error:  # for example out of memory: only this batch fails, the next may fit
            answers = RuntimeError(f"scoring failed: {type(error).__name__}: {error}")
        self._busy_s += time.perf_counter() - started  # per batch: stats() is called during a wave
        for job in jobs:
            del self._wave[job]
        _deliver(jobs, answers)

    def _fail(self, error: RuntimeError) -> None:
        left = [*self._wave, *self._waiting]
        self._wave.clear()
        self._waiting.clear()
        _deliver(left, error)

    def _batches(self) -> list[tuple[int, list[list[_Job]]]]:
        """(width, texts), the widest first, so that a batch that does not fit in memory fails early. Each text is a
        list of jobs: equal texts of siblings are scored once."""
        texts: dict[bytes, list[_Job]] = {}
        for job in self._wave:
            texts.setdefault(job.tokens.tobytes(), []).append(job)
        by_width: dict[int, list[list[_Job]]] = {}
        for jobs in texts.values():
            by_width.setdefault(min(padded_width(len(jobs[0].tokens)), self._longest + 1), []).append(jobs)
        batches = []
        for width in sorted(by_width, reverse=True):
            rows, members = max(1, self._max_tokens // width), by_width[width]
            batches += [(width, members[i : i + rows]) for i in range(0, len(members), rows)]
        return batches

    def _forward(self, texts: list[Ints], width: int) -> list[float]:
        from gcore.models.networks import score_texts

        scores: list[float] = score_texts(self._model, texts, width).tolist()
        return scores


def padded_width(length: int) -> int:
    """Width of a text's batch, a function of the text's own length: 11 -> 32, 32 -> 64, 1000 -> 1024. Long texts have
    at most 1/8 padding, and every text has at least one padded column."""
    block = max(KEY_BLOCK, 1 << max(0, length.bit_length() - 4))
    return -(-(length + 1) // block) * block


def _deliver(jobs: Sequence[_Job], answers: Sequence[float] | Exception) -> None:
    for i, job in enumerate(jobs):
        with contextlib.suppress(InvalidStateError):  # cancelled
            if isinstance(answers, Exception):
                job.score.set_exception(answers)
            else:
                job.score.set_result(answers[i])


class ScalarSource(Source):
    """`score` calls a replica of the ScalarModel; `tokenizer` is that model's."""

    def __init__(self, spec: ScalarReward, tokenizer: Any, score: Score, attempts: int) -> None:
        super().__init__(spec.name, spec.weight, attempts)
        self._tokenizer, self._score = tokenizer, score
        self._max_length = None if spec.max_length == "auto" else spec.max_length  # None: the model's own limit

    def check(self, columns: Collection[str]) -> None:
        """Checks that the chat template renders both the prompt and the response."""
        try:
            text = render(self._tokenizer, [{"role": "user", "content": "31+14="}, _assistant("2718")])
        except ValueError as error:
            raise UserError(f"rewards.models: {self.name}: {error} (set its model.chat_template)") from None
        if "31+14=" not in text or "2718" not in text:
            raise UserError(
                f"rewards.models: {self.name}: the chat template leaves out a message of the conversation: {text!r} "
                "(set its model.chat_template)"
            )

    async def answer(self, group: Sequence[Rollout]) -> Answer:
        scores = await self._score(self._tokens(group))
        if len(scores) != len(group):
            raise BadAnswer(f"returned {len(scores)} scores; expected {len(group)}, one per text")
        return Answer([number(score, scores) for score in scores])

    def _tokens(self, group: Sequence[Rollout]) -> list[Ints]:
        where = f"reward {self.name!r}, prompt {group[0].prompt.id}"
        try:
            texts = [render(self._tokenizer, [*r.prompt.messages, _assistant(r.text)]) for r in group]
        except ValueError as error:
            raise RewardError(f"{where}: {error}") from None
        texts_tokens = tokens_of(self._tokenizer, texts)
        longest = max(map(len, texts_tokens))
        if self._max_length is not None and longest > self._max_length:
            raise RewardError(
                f"{where}: got a conversation of {longest} tokens; expected at most {self._max_length} "
                "(key: rewards.models.max_length)"
            )
        return texts_tokens


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}
