"""The simulated workload of a sample: what it costs a trainer rank, from the model's own FLOPs.

    Shape (cost/shapes.py) ──> CostModel ──┬──> balance.py: layout over ranks and micro-batches
                                               ├──> cost/costs.py: seconds of a step, for `gcore plan`
    measured seconds of updates ──fit──────────┴──> Fit: seconds per token, pair and micro-batch, for metrics

A cost is in *tokens*: 1 is the matrix products of one token in all layers. A sequence of n tokens costs n, plus its
attention (quadratic in n), plus the head for the steps that are predicted. The backward pass costs twice the forward
pass for every sample. Recomputation repeats the layers and not the head, so it makes the head's share smaller.

The layout depends only on this model and on the lengths, never on measured times: a run with the same samples has the
same layout, bit for bit, on any machine and after a restart. The fit is for metrics alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gcore.types import SampleMeta, SharedPrefix

UPDATE = 3  # forward passes that forward and backward cost, without recomputation
MICRO_BATCH_TOKENS = 128.0  # cost of a micro-batch beyond its samples: kernel launches, weights to gather. Chosen
LEAST_SAVED = 0.1  # of the time of a mini-batch, for training.share_prefixes=auto. Chosen
NOTHING = SharedPrefix()
PRIOR_WEIGHT = 0.3  # of the FLOPs of the model in a fit; an observation has weight 1


@dataclass(frozen=True, slots=True)
class CostModel:
    """CostModel(crossover=768).of(100) == 100 + 100 * 100 / 768"""

    crossover: float  # tokens of a sequence whose attention costs as much as its matrix products
    head: float = 0.0  # cost of predicting one step
    causal: bool = True  # False: every token attends to all tokens, as in diffusion transformers
    flops: float = 1.0  # of a token: a forward pass of n tokens takes n * flops FLOPs, without attention and head
    towers: tuple[tuple[str, CostModel], ...] = ()  # what encodes media, by their kind
    patch: int = 196  # of a tower: pixels of an image that become one of its tokens
    stateful: float = 0.0  # part of a token's cost in layers whose state each sample computes, also of a shared prefix

    @property
    def knows_flops(self) -> bool:
        return self.flops > 1.0

    def of(self, length: int) -> float:
        """Of one pass over a sequence, without the head."""
        return length + length * length / self.crossover * (1 if self.causal else 2)

    def of_sample(self, meta: SampleMeta) -> float:
        media = sum(self.of_medium(kind, size) for kind, size in meta.work.media)
        return meta.work.passes * self.of(meta.work.length) + self.head * meta.steps + media

    def of_samples(self, metas: Sequence[SampleMeta], shares: bool) -> float:
        """Of neighbours in a row."""
        saved = 0.0
        for meta, prefix in zip(metas, shared_prefixes(metas), strict=True) if shares else ():
            media = sum(self.of_medium(kind, size) for kind, size in meta.work.media[: prefix.media])
            saved += self.of(prefix.tokens) - self.stateful * prefix.tokens + media
        return sum(map(self.of_sample, metas)) - saved

    def of_token(self, context: float) -> float:
        """Of a token in the middle of a batch: it attends to `context` others, and a step is predicted after it."""
        return 1 + 2 * context / self.crossover + self.head

    def recomputed(self) -> CostModel:
        """With activation checkpointing: a token's layers are computed once more than its head."""
        return replace(self, head=self.head * UPDATE / (UPDATE + 1))

    def of_row(self, width: int) -> float:
        """Of a row that is computed with a mask: padding and pairs of different samples are computed too."""
        return width + 2 * width * width / self.crossover

    def tower(self, kind: str) -> CostModel | None:
        return dict(self.towers).get(kind)

    def of_medium(self, kind: str, size: int) -> float:
        """Of its patches in the tower, in tokens of the decoder. Its tokens are part of the length."""
        if (tower := self.tower(kind)) is None:
            return 0.0
        return tower.of(-(-size // tower.patch)) * tower.flops / self.flops


def shared_prefixes(metas: Sequence[SampleMeta]) -> list[SharedPrefix]:
    """What each sample of a row has in common with the one before it."""
    return [shared_prefix(before, meta) for before, meta in zip((None, *metas[:-1]), metas, strict=True)]


def shared_prefix(before: SampleMeta | None, meta: SampleMeta) -> SharedPrefix:
    found = NOTHING
    if before is not None and before.prompt_id == meta.prompt_id:
        for prefix, other in zip(meta.shared, before.shared, strict=False):
            if prefix != other:
                break
            found = prefix
    return found


# ---- fit to measured times ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Observation:
    """What was computed in some seconds. Observation(tokens=16000, pairs=9e6, micro_batches=2, seconds=1.4)"""

    tokens: float  # with the head of the steps, in tokens
    pairs: float  # sum of length squared
    micro_batches: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Fit(token_s=8.1e-5, pair_s=1.1e-8, micro_batch_s=4e-3, error=0.04)"""

    token_s: float
    pair_s: float
    micro_batch_s: float
    error: float  # root mean square of the relative error over the observations

    @property
    def crossover(self) -> float:
        """As in CostModel, from measured times; infinite if attention takes no time."""
        return self.token_s / self.pair_s if self.pair_s else float("inf")


def fit(observations: Sequence[Observation], cost: CostModel) -> Fit | None:
    """Least squares of the relative error, with the model's FLOPs as prior: where the observations do not separate the
    three terms, the ratios of the cost model stay. None: nothing was observed."""
    seen = [o for o in observations if o.seconds > 0 and o.tokens > 0]
    if not seen:
        return None
    seconds = np.array([o.seconds for o in seen])
    features = np.array([[o.tokens, o.pairs, o.micro_batches] for o in seen])
    ratios = np.array([1.0, 1 / cost.crossover, MICRO_BATCH_TOKENS])
    scale = float(seconds.sum() / (features @ ratios).sum())  # seconds per token if the cost model is right
    expected = scale * ratios
    rows = [features * expected / seconds[:, None], PRIOR_WEIGHT * np.eye(3)]  # unknowns: measured / expected
    wanted = [np.ones(len(seen)), PRIOR_WEIGHT * np.ones(3)]
    terms = _non_negative(np.concatenate(rows), np.concatenate(wanted)) * expected
    error = float(np.sqrt(np.mean((features @ terms / seconds - 1) ** 2)))
    return Fit(float(terms[0]), float(terms[1]), float(terms[2]), error)


def _non_negative(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares with unknowns of at least 0. There are few unknowns: every choice of those above 0 is tried."""
    number = rows.shape[1]
    best, least = np.zeros(number), np.inf
    for chosen in itertools.chain(*(itertools.combinations(range(number), n) for n in range(1, number + 1))):
        found = np.zeros(number)
        found[list(chosen)] = np.linalg.lstsq(rows[:, chosen], wanted, rcond=None)[0]
        error = float(np.sum((rows @ found - wanted) ** 2))
        if error < least and found.min() >= 0:
            best, least = found, error
    return best
