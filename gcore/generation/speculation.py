"""Speculative decoding without a draft model: which tokens to propose for each sample, and when it pays.

    tokens of prompts and samples ──> SuffixAutomaton ──> drafts ──> one decoding step of all blocks (embedded.py)
                                                                         │
    costs and acceptance, by the number of running samples <─────────────┘

The noise of a sample is known before the sample is (noise.py): the token at a position is a function of the model's
logits there and of one number. So a block of proposed tokens is computed in one step, each position is sampled with its
own number, and a proposal is accepted if it is what was sampled. The samples are the same with and without speculation,
at any temperature, with top-k or top-p.

Proposals are drawn with the same number: from how often each token came next after the longest sequence of tokens that
this sample and earlier texts have in common. The better these frequencies, the more often both draws agree; a proposal
of the likeliest token would be accepted only as often as that token is sampled.
"""

from __future__ import annotations

import itertools
import operator
import time
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gcore.content.tokens import NO_TOKENS, Tokens
from gcore.generation.engine_shell import Job
from gcore.generation.noise import uniform
from gcore.models.decoders import KINDS, traits_of
from gcore.types import UserError

MAX_DRAFT = 15  # proposed tokens per sample and step
PROMPT_TOKENS = 256  # of a prompt, its last ones, that proposals may continue
MAX_STATES = 1 << 18  # of an automaton, about 100 MB; then another one begins
COUNTED = 24  # contexts of a new token that are counted, the longest first
SEEN = 2  # a context is used if it was continued this often; shorter contexts otherwise
LEAST = 0.1  # chance of acceptance below which nothing is proposed, however cheap it is
PROBES = 16  # when it does not pay, one of this number of prompts goes on with it
MEMORY = 0.99  # of averages, per step
ON, OFF = 1.1, 0.9  # time saved / time spent, to switch on and off
EXPECTED = 64, 0.5, 0.15, 2e-5  # before anything is measured: samples, and per sample as in `Balance`


def speculation_of(kind: str, network: Any) -> Speculation | None:
    """By `generation.speculation`. None: off."""
    layers = dict.fromkeys(traits_of(network.config).kinds)
    refused = [layer for layer in layers if not KINDS[layer].rolls_back]
    if kind == "off" or (kind == "auto" and refused):
        return None
    if refused:
        raise UserError(
            f"generation.speculation={kind}: a model of type {network.config.model_type} has layers of kind "
            f"{', '.join(refused)}, which cannot drop rejected tokens; expected off or auto"
        )
    return Speculation(kind != "ngram", on_cpu=network.device.type == "cpu")


class SuffixAutomaton:
    """How often each token came next after every sequence of tokens in some texts. The texts may grow in turns.

    State 0 is the empty sequence. A text is extended from its own last state; a state stands for all sequences that
    occur at the same places, of which `lengths` has the longest."""

    def __init__(self) -> None:
        self.nexts: list[dict[int, int]] = [{}]
        self.links: list[int] = [-1]  # the state of the longest sequence at the end of this one that occurs elsewhere
        self.lengths: list[int] = [0]
        self.counts: list[int] = [0]

    def extend(self, last: int, token: int) -> int:
        """The last state of the text with the token."""
        nexts, links, lengths, counts = self.nexts, self.links, self.lengths, self.counts
        known = nexts[last].get(token)
        if known is not None:
            new = known if lengths[known] == lengths[last] + 1 else self._split(last, known, token)
        else:
            new = len(nexts)
            nexts.append({})
            lengths.append(lengths[last] + 1)
            counts.append(0)
            links.append(0)
            at = last
            while at >= 0 and token not in nexts[at]:
                nexts[at][token] = new
                at = links[at]
            if at >= 0:
                known = nexts[at][token]
                links[new] = known if lengths[known] == lengths[at] + 1 else self._split(at, known, token)
        at = new
        for _ in range(COUNTED):
            counts[at] += 1
            at = links[at]
            if at <= 0:
                break
        return new

    def _split(self, at: int, known: int, token: int) -> int:
        """The sequences of `known` up to those that continue `at` get a state of their own."""
        nexts, links = self.nexts, self.links
        new = len(nexts)
        nexts.append(nexts[known].copy())
        self.lengths.append(self.lengths[at] + 1)
        self.counts.append(self.counts[known])
        links.append(links[known])
        links[known] = new
        while at >= 0 and nexts[at].get(token) == known:
            nexts[at][token] = new
            at = links[at]
        return new

    def draft(
        self, last: int, most: int, noise: tuple[int, int] | None, rates: Sequence[float], least: float
    ) -> tuple[list[int], list[int]]:
        """Tokens to propose after `last`, while the chance that all of them are accepted is at least this, and the kind
        of each proposal: an index of `rates`, which has the chance of one. `noise`: key and position; None: greedy."""
        nexts, links, counts, lengths = self.nexts, self.links, self.counts, self.lengths
        tokens, kinds, at, chance = list[int](), list[int](), last, 1.0
        while len(tokens) < most:
            while at > 0:
                following = nexts[at]
                if len(following) == 1:
                    ((token, new),) = following.items()
                    if (total := counts[new]) >= SEEN:
                        break
                elif following:
                    pairs = sorted([(token, counts[new]) for token, new in following.items()])
                    total = sum([count for _, count in pairs])
                    if noise is None:
                        token = max(pairs, key=lambda pair: pair[1])[0]
                    else:
                        token = _drawn(pairs, uniform(noise[0], noise[1] + len(tokens)) * total)
                    new = following[token]
                    break
                at = links[at]
            else:
                break
            kind = (min(lengths[at].bit_length(), 5) * 6 + min(total.bit_length(), 5)) * 4 + min(len(following), 4) - 1
            chance *= rates[kind]
            if chance < least:
                break
            tokens.append(token)
            kinds.append(kind)
            at = new
        return tokens, kinds


def _drawn(pairs: list[tuple[int, int]], number: float) -> int:
    """As the sampler draws, in the order of the tokens."""
    for token, count in pairs:
        number -= count
        if number < 0:
            return token
    return pairs[-1][0]


NUM_KINDS = 6 * 6 * 4  # of proposals: how long the context is, how often and in how many ways it was continued


class Blocks(NamedTuple):
    """The tokens of a decoding step, as a table: for each place the row of the sample, and how far it is behind the
    row's position. Places without a token of a block only fill the table.

    Rows 0 and 1, two proposals for row 1: listed([[], [8, 3]], 4) -> rows [[0], [1], [1], [1]], ahead [[0], [0], [1],
    [2]]; aligned([[], [8, 3]], 2) -> rows [[0, 0, 0], [1, 1, 1]], ahead [[0, 1, 2], [0, 1, 2]]"""

    rows_RW: npt.NDArray[np.int64]
    ahead_RW: npt.NDArray[np.int64]
    sizes_RW: npt.NDArray[np.int64]  # proposals of the row
    places_N: npt.NDArray[np.int64]  # flat, of the tokens to sample after: each row's last one, then proposed ones
    proposed: list[int]

    @classmethod
    def listed(cls, drafts: list[list[int]], multiple: int) -> Blocks:
        """One token after another. The number of tokens is a multiple of this: rows without a sample fill the batch,
        or if something is proposed, places of row 0 behind its block."""
        num_rows, sizes = len(drafts), [len(draft) for draft in drafts]
        number = num_rows + sum(sizes)
        fill = -number % multiple
        if number == num_rows:
            rows_N, ahead_N = np.arange(number + fill), np.zeros(number + fill, np.int64)
        else:
            drafted = [np.arange(1, size + 1) for size in sizes if size]
            rows_N = np.concatenate([np.arange(num_rows), np.repeat(np.arange(num_rows), sizes), np.zeros(fill, int)])
            ahead = [np.zeros(num_rows, int), *drafted, sizes[0] + 1 + np.arange(fill)]
            ahead_N = np.concatenate(ahead)
        sizes_N = np.array([*sizes, *[0] * fill])[rows_N]
        proposed = [token for draft in drafts for token in draft]
        return cls(rows_N[:, None], ahead_N[:, None], sizes_N[:, None], np.arange(number), proposed)

    @classmethod
    def aligned(cls, drafts: list[list[int]], multiple: int) -> Blocks:
        """A row of the table for each row, and for those without a sample that fill the batch."""
        width, num_rows = 1 + max(map(len, drafts)), len(drafts)
        shape = (num_rows + -num_rows % multiple, width)
        rows_RW, ahead_RW = np.indices(shape)
        sizes_RW = np.array([*map(len, drafts), *[0] * (shape[0] - num_rows)])[rows_RW]
        proposed_N = np.flatnonzero((ahead_RW > 0) & (ahead_RW <= sizes_RW))
        places_N = np.concatenate([np.arange(num_rows) * width, proposed_N])
        return cls(rows_RW, ahead_RW, sizes_RW, places_N, [token for draft in drafts for token in draft])


@dataclass(slots=True)
class StepCost:
    """Seconds of a decoding step with some number of tokens, from the recent ones: fixed + per_token * tokens."""

    weight: float = 0.0
    tokens: float = 0.0  # sums, weighted
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.weight = self.weight * MEMORY + 1
        self.tokens = self.tokens * MEMORY + tokens
        self.seconds = self.seconds * MEMORY + seconds
        self.squares = self.squares * MEMORY + tokens * tokens
        self.products = self.products * MEMORY + tokens * seconds

    def fit(self) -> tuple[float, float]:
        """Fixed, per token. Where all steps had about as many tokens, half of their time is taken to be fixed."""
        tokens, seconds = self.tokens / self.weight, self.seconds / self.weight
        spread = max(self.squares / self.weight - tokens * tokens, 0.0)
        together = self.products / self.weight - tokens * seconds
        doubt = (0.1 * tokens) ** 2 * 4 / (4 + self.weight)
        slope = (together + doubt * seconds / (2 * tokens)) / (spread + doubt)
        slope = min(max(slope, 0.01 * seconds / tokens), seconds / tokens)
        return seconds - slope * tokens, slope


@dataclass(slots=True)
class Balance:
    """Sums over samples and steps, for a range of batch sizes; older ones count less."""

    samples: float = EXPECTED[0]
    proposed: float = EXPECTED[0] * EXPECTED[1]
    accepted: float = EXPECTED[0] * EXPECTED[2]
    overhead_s: float = EXPECTED[0] * EXPECTED[3]
    on: bool = False

    def add(self, samples: int, proposed: int, accepted: float, overhead_s: float) -> None:
        kept = MEMORY ** (samples / 8)
        self.samples = self.samples * kept + samples
        self.proposed = self.proposed * kept + proposed
        self.accepted = self.accepted * kept + accepted
        self.overhead_s = self.overhead_s * kept + overhead_s

    def decide(self, size: int, cost: StepCost) -> None:
        fixed, per_token = cost.fit()
        saved = self.accepted * (fixed / size + per_token)
        spent = self.proposed * per_token + self.overhead_s
        self.on = saved > (OFF if self.on else ON) * spent


@dataclass(slots=True)
class Path:
    """Where the text of a sample is in an automaton."""

    automaton: SuffixAutomaton
    last: int
    known: int = 0  # of its own tokens, how many the automaton has
    kinds: list[int] = field(default_factory=list)  # of its proposals in the current step


class Speculation:
    """The drafts of an engine. `shared`: samples learn from all others, also of earlier epochs; otherwise each from its
    prompt and its own tokens. `always`: propose also when it does not pay."""

    def __init__(self, shared: bool = True, always: bool = False, on_cpu: bool = True) -> None:
        self.now = time.thread_time if on_cpu else time.perf_counter  # on a CPU, others may have the core in between
        self.proposed = self.accepted = 0  # tokens
        self._shared, self._always = shared, always
        self._automaton = SuffixAutomaton()
        self._prompts = dict[bytes, int]()  # the state of a prompt's end, in this automaton
        self._paths, self._probes = dict[Job, Path](), set[Job]()
        self._cost, self._balances = StepCost(), dict[int, Balance]()
        self._hits, self._trials, self._rates = [1.0] * NUM_KINDS, [2.0] * NUM_KINDS, [0.5] * NUM_KINDS
        self._overhead_s = 0.0

    def begin(self, jobs: Collection[Job]) -> None:
        """They are in the batch now."""
        self._probes.update(job for job in jobs if zlib.crc32(job.content.tokens_P.tobytes()) % PROBES == 0)

    def drafts(self, jobs: Sequence[Job], multiple: int, aligned: bool) -> list[list[int]]:
        """The proposals for the next step. See `Blocks`."""
        started, size = self.now(), len(jobs)
        follows_all = self._balance(size).on or self._always
        found: list[list[int]] = [[] for _ in jobs]
        if follows_all or self._probes:
            fixed, per_token = self._cost.fit() if self._cost.weight else (1.0, 0.0)
            pays = max(LEAST, per_token * size / (fixed + per_token * size))
            drafted = list[tuple[int, Path]]()
            for row, job in enumerate(jobs):
                if follows_all or job in self._probes:
                    path = self._paths.get(job) or self._begin(job)
                    self._follow(path, job)
                    found[row] = self._draft(path, job, 0.0 if self._always else LEAST)
                    if found[row]:
                        drafted.append((row, path))
            if drafted and not self._always:
                (self._cut_aligned if aligned else self._cut)(found, drafted, multiple, pays)
        self._overhead_s = self.now() - started
        return found

    def record(
        self,
        jobs: Sequence[Job],
        drafts: Sequence[Sequence[int]],
        taken: Sequence[int],
        computed: int,
        seconds: float,
    ) -> None:
        """Of a step: how many tokens of each row were sampled, and how long so many computed ones took."""
        started, proposed, total = self.now(), 0, 0
        self._cost.add(computed, seconds)
        for job, draft, number in zip(jobs, drafts, taken, strict=True):
            if draft:
                kinds, accepted = self._paths[job].kinds, number - 1
                proposed, total = proposed + len(draft), total + accepted
                for place in range(min(number, len(draft))):  # those after the first rejected one tell nothing
                    kind = kinds[place]
                    self._hits[kind] = self._hits[kind] * MEMORY + (place < accepted)
                    self._trials[kind] = self._trials[kind] * MEMORY + 1
                    self._rates[kind] = self._hits[kind] / self._trials[kind]
        self.proposed, self.accepted = self.proposed + proposed, self.accepted + total
        balance = self._balance(len(jobs))
        if samples := len(jobs) if balance.on or self._always else len(self._probes):
            balance.add(samples, proposed, total, self._overhead_s + self.now() - started)
        balance.decide(len(jobs), self._cost)

    def end(self, jobs: Collection[Job]) -> None:
        """They are no longer in the batch. What is known of their tokens stays known."""
        for job in jobs:
            path = self._paths.pop(job, None)
            follows = self._always or job in self._probes or self._balance(len(self._paths) + 1).on
            if path is not None and follows:
                self._follow(path, job)
            self._probes.discard(job)

    def _balance(self, size: int) -> Balance:
        return self._balances.setdefault(size.bit_length(), Balance())

    def _begin(self, job: Job) -> Path:
        content = job.content
        if not self._shared or len(self._automaton.nexts) > MAX_STATES:
            self._automaton, self._prompts = SuffixAutomaton(), {}
        key, last = content.context_bytes(), 0
        if content.media:  # what stands for their features may have no embedding: it must not be proposed
            content = Tokens.steps(NO_TOKENS)
        if (known := self._prompts.get(key)) is not None:
            last = known
        else:
            for token in content.tokens_P[-PROMPT_TOKENS:].tolist():
                last = self._automaton.extend(last, token)
            self._prompts[key] = last
        for token in content.tokens_S.tolist():  # of earlier turns
            last = self._automaton.extend(last, token)
        path = self._paths[job] = Path(self._automaton, last)
        return path

    def _follow(self, path: Path, job: Job) -> None:
        if path.known < len(job.tokens):
            for token in job.tokens[path.known :]:
                path.last = path.automaton.extend(path.last, token)
            path.known = len(job.tokens)

    def _draft(self, path: Path, job: Job, least: float) -> list[int]:
        request = job.request
        most = min(MAX_DRAFT, request.params.max_tokens - len(job.tokens) - 1)
        noise = None if request.params.temperature == 0 else (request.noise_key, request.position + len(job.tokens))
        draft, path.kinds = path.automaton.draft(path.last, most, noise, self._rates, least)
        return draft

    def _chances(self, path: Path) -> list[float]:
        """That each proposal, and all before it, will be accepted."""
        return list(itertools.accumulate((self._rates[kind] for kind in path.kinds), operator.mul))

    def _cut(self, found: list[list[int]], drafted: list[tuple[int, Path]], multiple: int, pays: float) -> None:
        """Keep what pays, then what is computed anyway to fill the batch, the likeliest first."""
        kept, others = [0] * len(found), list[tuple[float, int]]()
        for row, path in drafted:
            chances = self._chances(path)
            kept[row] = sum(chance >= pays for chance in chances)
            others += [(-chance, row) for chance in chances[kept[row] :]]
        others.sort()
        for _, row in others[: -(len(found) + sum(kept)) % multiple]:
            kept[row] += 1
        for row, _ in drafted:
            del found[row][kept[row] :]

    def _cut_aligned(self, found: list[list[int]], drafted: list[tuple[int, Path]], multiple: int, pays: float) -> None:
        """All blocks are computed as wide as the longest one: keep the width that pays."""
        rows, width = len(found) + -len(found) % multiple, 0
        columns = itertools.zip_longest(*(self._chances(path) for _, path in drafted), fillvalue=0.0)
        while (column := next(columns, None)) is not None and sum(column) >= pays * rows:
            width += 1
        for row, _ in drafted:
            del found[row][width:]
