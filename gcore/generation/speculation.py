"""Speculative decoding without a draft model: which tokens to propose for each sample, and when it pays.

    tokens of a prompt and its samples ──> SuffixAutomaton ──> drafts ──> one decoding step of all blocks (embedded.py)
                                                                              │
    costs and acceptance, by the number of running samples <──────────────────┘

The noise of a sample is known before the sample is (noise.py): the token at a position is a function of the model's
logits there and of one number. So a block of proposed tokens is computed in one step, each position is sampled with its
own number, and a proposal is accepted if it is what was sampled. The samples are the same with and without speculation,
at any temperature, with top-k or top-p.

Proposals are drawn with the same number: from how often each token came next after the longest sequence of tokens that
this sample and earlier texts have in common. The better these frequencies, the more often both draws agree; a proposal
of the likeliest token would be accepted only as often as that token is sampled.
"""

from __future__ import annotations

import time
import zlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gcore.generation.engine_shell import Job
from gcore.generation.noise import uniforms
from gcore.models.decoders import KINDS, Traits
from gcore.types import UserError

MAX_DRAFT = 15  # proposed tokens per sample and step
PROMPT_TOKENS = 256  # of a prompt, its last ones, that proposals may continue
MAX_STATES = 1 << 18  # of all automata: about 100 MB
COUNTED = 24  # contexts of a new token that are counted, the longest first
SEEN = 2  # a context is used if it was continued this often; shorter contexts otherwise
LEAST = 0.1  # probability of acceptance below which nothing is proposed, however cheap it is
PROBES = 16  # when it does not pay, one of this number of prompts goes on with it
MEMORY = 0.99  # of averages, per step
ON, OFF = 1.1, 0.9  # time saved / time spent, to switch on and off


def speculation_of(kind: str, traits: Traits, model_type: str) -> Speculation | None:
    """By `generation.speculation`. None: off."""
    refused = [layer for layer in dict.fromkeys(traits.kinds) if not KINDS[layer].rolls_back]
    if kind == "off" or (kind == "auto" and refused):
        return None
    if refused:
        raise UserError(
            f"generation.speculation={kind}: a model of type {model_type} has layers of kind {', '.join(refused)}, "
            "which cannot drop rejected tokens; expected off or auto"
        )
    return Speculation(shared=kind != "ngram")


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

    def draft(self, last: int, numbers: Sequence[float], greedy: bool) -> tuple[list[int], list[int]]:
        """Tokens to propose after `last`, at most one per number of the noise, and the kind of each proposal: an index
        of `Acceptance`."""
        nexts, links, counts, lengths = self.nexts, self.links, self.counts, self.lengths
        tokens, kinds, at = list[int](), list[int](), last
        for number in numbers:
            while at > 0:
                following = nexts[at]
                if len(following) == 1:
                    ((token, new),) = following.items()
                    if (total := counts[new]) >= SEEN:
                        break
                elif following:
                    pairs = [(token, counts[new]) for token, new in following.items()]
                    total = sum(count for _, count in pairs)
                    token = max(pairs, key=lambda pair: pair[1])[0] if greedy else _drawn(pairs, number * total)
                    new = following[token]
                    break
                at = links[at]
            else:
                break
            tokens.append(token)
            kinds.append(_kind(lengths[at], total, len(following)))
            at = new
        return tokens, kinds


def _drawn(pairs: list[tuple[int, int]], number: float) -> int:
    """As the sampler draws, in the order of the tokens."""
    pairs.sort()
    for token, count in pairs:
        number -= count
        if number < 0:
            return token
    return pairs[-1][0]


def _kind(length: int, total: int, choices: int) -> int:
    """Of a proposal: how long its context is, how often it was continued, and in how many ways."""
    return (min(length.bit_length(), 5) * 6 + min(total.bit_length(), 5)) * 4 + min(choices, 4) - 1


NUM_KINDS = 6 * 6 * 4


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
    """Averages per sample and step, for a range of batch sizes."""

    on: bool = True
    weight: float = 0.0
    proposed: float = 0.0
    accepted: float = 0.0
    overhead_s: float = 0.0

    def add(self, samples: int, proposed: int, accepted: float, overhead_s: float) -> None:
        for name, value in (
            ("weight", samples),
            ("proposed", proposed),
            ("accepted", accepted),
            ("overhead_s", overhead_s),
        ):
            setattr(self, name, getattr(self, name) * MEMORY + value)

    def decide(self, size: int, cost: StepCost) -> None:
        if self.weight < 4 * max(size, 8):
            return
        fixed, per_token = cost.fit()
        saved = self.accepted * (fixed / size + per_token)
        spent = self.proposed * per_token + self.overhead_s
        self.on = saved > (OFF if self.on else ON) * spent


@dataclass(slots=True)
class Path:
    """Where the text of a sample is in the automaton of its prompt."""

    automaton: SuffixAutomaton
    last: int
    known: int = 0  # of its own tokens, how many the automaton has
    draft: list[int] = field(default_factory=list)  # in the current step
    kinds: list[int] = field(default_factory=list)


class Speculation:
    """The drafts of an engine. `shared`: samples of a prompt learn from each other, and from earlier ones; otherwise
    each from its prompt and its own tokens. `always`: propose also when it does not pay."""

    def __init__(self, shared: bool = True, always: bool = False) -> None:
        self.proposed = self.accepted = 0  # tokens
        self._shared, self._always = shared, always
        self._automata = OrderedDict[bytes, tuple[SuffixAutomaton, int]]()  # and the state of the prompt's end
        self._states = 0  # of all automata, when they were counted last
        self._paths = dict[Job, Path]()
        self._cost, self._balances = StepCost(), dict[int, Balance]()
        self._hits, self._trials = np.ones(NUM_KINDS), np.full(NUM_KINDS, 2.0)
        self._overhead_s = 0.0

    def drafts(self, jobs: Sequence[Job], multiple: int, aligned: bool) -> list[list[int]]:
        """The proposals for the next step. See `Blocks`."""
        started = time.perf_counter()
        balance, followed = self._balance(len(jobs)), list[tuple[int, Path, int]]()
        for row, job in enumerate(jobs):
            room = min(MAX_DRAFT, job.request.params.max_tokens - len(job.tokens) - 1)
            if room <= 0:
                continue
            path = self._paths.get(job)
            if path is None:
                if not (balance.on or self._always or self._is_probe(job)):
                    continue
                path = self._begin(job)
            elif not (balance.on or self._always or self._is_probe(job)):
                continue
            self._follow(path, job)
            followed.append((row, path, room))
        drafts: list[list[int]] = [[] for _ in jobs]
        if followed:
            self._propose(jobs, followed)
            for (row, path, _), kept in zip(followed, self._worth(followed, len(jobs), multiple, aligned), strict=True):
                del path.draft[kept:], path.kinds[kept:]
                drafts[row] = path.draft
        self._overhead_s = time.perf_counter() - started
        return drafts

    def record(
        self,
        jobs: Sequence[Job],
        drafts: Sequence[Sequence[int]],
        taken: Sequence[int],
        computed: int,
        seconds: float,
    ) -> None:
        """Of a step: how many tokens of each row were sampled, and how long so many computed ones took."""
        started = time.perf_counter()
        self._cost.add(computed, seconds)
        proposed, total, samples = 0, 0, 0
        for job, draft, number in zip(jobs, drafts, taken, strict=True):
            if (path := self._paths.get(job)) is None:
                continue
            samples, proposed, accepted = samples + 1, proposed + len(draft), number - 1
            total += accepted
            for place in range(min(accepted + 1, len(draft))):  # those after the first rejected one tell nothing
                kind = path.kinds[place]
                self._hits[kind] = self._hits[kind] * MEMORY + (place < accepted)
                self._trials[kind] = self._trials[kind] * MEMORY + 1
        self.proposed, self.accepted = self.proposed + proposed, self.accepted + total
        balance = self._balance(len(jobs))
        balance.add(samples, proposed, total, self._overhead_s + time.perf_counter() - started)
        balance.decide(len(jobs), self._cost)

    def end(self, jobs: Collection[Job]) -> None:
        """They are no longer in the batch. Their tokens stay known."""
        for job in jobs:
            if (path := self._paths.pop(job, None)) is not None:
                self._follow(path, job)

    def _balance(self, size: int) -> Balance:
        return self._balances.setdefault(size.bit_length(), Balance())

    def _is_probe(self, job: Job) -> bool:
        return zlib.crc32(job.content.tokens_P.tobytes()) % PROBES == 0

    def _begin(self, job: Job) -> Path:
        content = job.content
        key = content.context_bytes() if self._shared else job.request.noise_key.to_bytes(8, "little")
        found = self._automata.pop(key, None)
        if found is None:
            automaton, last = SuffixAutomaton(), 0
            for token in content.tokens_P[-PROMPT_TOKENS:].tolist():
                last = automaton.extend(last, token)
            found = automaton, last
        self._automata[key] = found
        self._states += len(found[0].nexts)
        if self._states > MAX_STATES:
            self._forget()
        path = self._paths[job] = Path(*found)
        for token in content.tokens_S.tolist():  # of earlier turns
            path.last = path.automaton.extend(path.last, token)
        return path

    def _forget(self) -> None:
        """The prompts that were not asked for the longest time."""
        sizes = {key: len(automaton.nexts) for key, (automaton, _) in self._automata.items()}
        self._states = sum(sizes.values())
        for key, size in sizes.items():
            if self._states <= MAX_STATES // 2 or len(self._automata) == 1:
                break
            del self._automata[key]
            self._states -= size

    def _follow(self, path: Path, job: Job) -> None:
        for token in job.tokens[path.known :]:
            path.last = path.automaton.extend(path.last, token)
        path.known = len(job.tokens)

    def _propose(self, jobs: Sequence[Job], followed: Sequence[tuple[int, Path, int]]) -> None:
        asked = [jobs[row] for row, _, _ in followed]
        keys = np.array([job.request.noise_key for job in asked], np.uint64)
        positions = np.array([job.request.position + len(job.tokens) for job in asked])
        longest = max(room for _, _, room in followed)
        numbers = uniforms(keys[:, None], positions[:, None] + np.arange(longest)).tolist()
        for job, (_, path, room), row in zip(asked, followed, numbers, strict=True):
            path.draft, path.kinds = path.automaton.draft(path.last, row[:room], job.request.params.temperature == 0)

    def _worth(self, followed: Sequence[tuple[int, Path, int]], size: int, multiple: int, aligned: bool) -> list[int]:
        """How many proposals of each sample to compute: those whose probability of acceptance pays for a token more."""
        if self._always:
            return [len(path.draft) for _, path, _ in followed]
        rates = self._hits / self._trials
        chances = np.zeros((len(followed), MAX_DRAFT))
        for i, (_, path, _) in enumerate(followed):
            chances[i, : len(path.draft)] = rates[path.kinds]
        chances = chances.cumprod(1)
        fixed, per_token = self._cost.fit() if self._cost.weight else (1.0, 0.0)
        least = max(LEAST, per_token * size / (fixed + per_token * size))
        if aligned:
            depth = int((chances.sum(0) >= least * (size + -size % multiple)).cumprod().sum())
            return [min(depth, len(path.draft)) for _, path, _ in followed]
        free = -(size + int((chances >= least).sum())) % multiple  # tokens that would only fill the batch
        if free:
            below = np.sort(chances[chances < least])[::-1]
            least = max(LEAST, float(np.nextafter(below[free], 1)) if len(below) > free else LEAST)
        kept: list[int] = (chances >= least).sum(1).tolist()
        return kept
