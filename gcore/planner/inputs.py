"""Inputs of `gcore plan`: the work of a step, and constraints on the planner's choices. Rejects wrong input."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from gcore.cost.backends import Work
from gcore.cost.shapes import Shape
from gcore.cost.training_memory import Offload
from gcore.cost.workload import LEAST_SAVED
from gcore.placement.grid import POLICY
from gcore.placement.meters import call_quantiles, quantiles
from gcore.placement.rules import ClusterLoad, Load
from gcore.planner.steps import MODES, Mode
from gcore.types import UserError

WIDTHS = (1, 2, 4, 8)
VERDICT_SIGMA = 0.3  # verdicts differ less in length than responses (as in scenarios)
SHARED = 0.5  # share of the variance that siblings have in common, because it depends on the prompt (as in scenarios)
GROUPS = 512  # whose lengths are drawn for the forecast
Lengths = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """A training step. Lengths in tokens; means are after the cut at the maximum.

    Workload(prompts=256, samples=16, prompt_length=512, response_length=2048, max_response_length=8192)
    """

    prompts: int = 256
    samples: int = 16
    prompt_length: int = 512
    response_length: int = 2048
    max_response_length: int = 0  # 0: four times the mean
    sigma: float = 0.8
    acceptance: float = 1.0
    verdict_length: int = 512
    repeats: int = 1
    logprob_passes: int = 0  # of the trainer: one for old logprobs (with several mini-batches), one for a reference
    images: int = 0  # of a prompt, for models with a vision tower; their tokens are part of prompt_length
    image_pixels: int = 200_704  # of each, as the tower gets it: 448 x 448

    def __post_init__(self) -> None:
        if self.max_response_length == 0:
            object.__setattr__(
                self, "max_response_length", 4 * self.response_length
            )  # frozen, but still in its constructor
        for name in ("prompts", "samples", "prompt_length", "response_length", "verdict_length", "repeats"):
            at_least_one(_option(name), getattr(self, name))
        if self.images < 0 or self.image_pixels < 1:
            raise UserError(f"--images {self.images} of --image-pixels {self.image_pixels}: expected 0 and 1 or more")
        if self.logprob_passes < 0:
            raise UserError(f"--logprob-passes {self.logprob_passes}: expected 0 or more")
        if not 0 < self.acceptance <= 1:
            raise UserError(f"--acceptance {self.acceptance}: expected a share above 0 and at most 1")
        if not 0 <= self.sigma <= 2:
            raise UserError(f"--sigma {self.sigma}: expected 0 to 2 (standard deviation of the logarithm of lengths)")
        if self.max_response_length < self.response_length:
            raise UserError(
                f"--max-response-length {self.max_response_length}: expected at least the mean, --response-length "
                f"{self.response_length}"
            )

    def tower_tokens(self, shape: Shape) -> float:
        """Work of the vision tower for one prompt, in tokens of the decoder. Raises UserError if there is no tower."""
        if self.images and shape.cost.tower("image") is None:
            raise UserError(
                f"--images {self.images}: {shape.source} has no vision tower; expected a config.json with one"
            )
        return self.images * shape.cost.of_medium("image", self.image_pixels)

    def training_work(self, shape: Shape, max_tokens: int) -> float:
        """In tokens; siblings share prompts and images. `max_tokens`: of a micro-batch, or 0: they do not."""
        images = self.prompts * self.samples * self.tower_tokens(shape)
        saved = self.shared_prompts(shape, max_tokens)
        mean = shape.cost.of_token((self.prompt_length + self.response_length) / 2)
        return self.trained_tokens + images - saved * (self._prompt_work(shape) / mean + self.tower_tokens(shape))

    def shared_prompts(self, shape: Shape, max_tokens: int) -> int:
        """Prompts that are not computed, because they are those of siblings in the same micro-batch."""
        answers = self.samples * self.response_length
        parts = math.ceil(answers / (max_tokens - self.prompt_length)) if max_tokens > self.prompt_length else answers
        prompts = self.prompts * max(0, self.samples - parts) if max_tokens else 0
        mean = shape.cost.of_token((self.prompt_length + self.response_length) / 2)
        least = LEAST_SAVED * self.trained_tokens * mean
        return prompts if prompts * self._prompt_work(shape) >= least else 0  # as training.share_prefixes=auto

    def _prompt_work(self, shape: Shape) -> float:
        return shape.cost.of(self.prompt_length) - shape.cost.stateful * self.prompt_length

    @property
    def responses(self) -> Lengths:
        """Lengths of responses, by group and sibling."""
        even = self.response_length == self.max_response_length
        sigma = 0.0 if even else self.sigma
        return drawn_lengths(self.response_length, sigma, self.max_response_length, self.samples)

    @property
    def verdicts(self) -> Lengths:
        return drawn_lengths(self.verdict_length, min(self.sigma, VERDICT_SIGMA), self.longest_verdict, 1)

    @property
    def longest(self) -> int:
        return self.prompt_length + self.max_response_length

    @property
    def longest_verdict(self) -> int:
        return 4 * self.verdict_length

    def context(self, role: str) -> float:
        """Mean context of a sequence while it decodes, in tokens. A running sequence has made half of its tokens; long
        ones run for longer."""
        lengths = self.responses if role == POLICY else self.verdicts
        before = self.prompt_length + (0 if role == POLICY else self.response_length)
        return before + float((lengths**2).sum() / lengths.sum()) / 2

    def expected(self, shape: Shape, judges: Sequence[str]) -> ClusterLoad:
        """The view before a rollout. Siblings share one prefill of the prompt, and so do repeated verdicts: engines
        cache prefixes."""
        calls = call_quantiles([tuple(call) for call in self.responses.tolist()])
        needed = self.prompts * self.samples / self.acceptance
        policy = Load(
            waiting=round(needed),
            needed=needed,
            lengths=quantiles(self.responses.ravel().tolist()),
            longest=[max(call) for call in calls],
            prompt=(self.prompt_length + self.tower_tokens(shape)) / self.samples,
        )
        judge = Load(
            needed=needed * self.repeats,
            lengths=quantiles(self.verdicts.ravel().tolist()),
            prompt=(self.prompt_length + self.response_length) / self.repeats,
        )
        loads = {POLICY: policy, **dict.fromkeys(judges, judge)}
        return ClusterLoad(loads, groups=self.prompts, rate=self.acceptance, samples=self.samples, calls=calls)

    @property
    def trained_tokens(self) -> int:
        return self.prompts * self.samples * (self.prompt_length + self.response_length)

    def stretched(self, factor: float) -> Workload:
        """With responses longer by this factor, and a maximum longer by the same."""
        mean, cut = round(self.response_length * factor), round(self.max_response_length * factor)
        return replace(self, response_length=mean, max_response_length=cut)


@functools.lru_cache(maxsize=64)
def drawn_lengths(mean: float, sigma: float, longest: int, siblings: int) -> Lengths:
    """GROUPS x siblings log-normal lengths, cut at the longest. Their mean is `mean`, after the cut."""
    rng = np.random.default_rng(0)
    common, own = rng.standard_normal((GROUPS, 1)), rng.standard_normal((GROUPS, siblings))
    factors = np.exp(sigma * (math.sqrt(SHARED) * common + math.sqrt(1 - SHARED) * own))
    least, most = 0.0, longest / float(factors.min())
    for _ in range(60):  # by bisection
        median = (least + most) / 2
        least, most = (median, most) if np.minimum(median * factors, longest).mean() < mean else (least, median)
    return np.minimum(most * factors, longest)


@dataclass(frozen=True)
class Constraints:
    """Limits on the planner's choices. Constraints(policy_tp=2, modes=("static", "dynamic"))"""

    policy_tp: int | None = None
    judge_tp: int | None = None
    modes: tuple[Mode, ...] = MODES
    max_tokens_per_gpu: int = 16384
    shrink: bool = True  # use smaller micro-batches if max_tokens_per_gpu tokens do not fit
    trainer_tp: int = 1
    trainer_context: int = 1  # ranks that share the longest sequences
    checkpointing: bool | Literal["auto"] = "auto"
    offload: Offload | Literal["auto"] = "auto"
    kl: bool = False  # the trainer has a KL reference
    critic: bool = False  # and a critic of the size of the policy
    swap_s: float | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        at_least_one("--max-tokens-per-gpu", self.max_tokens_per_gpu)
        widths = {"--policy-tp": self.policy_tp, "--judge-tp": self.judge_tp, "--trainer-tp": self.trainer_tp}
        for option, tp in widths.items():
            if tp is not None and tp not in WIDTHS:
                raise UserError(f"{option} {tp}: expected one of {', '.join(map(str, WIDTHS))}")
        at_least_one("--trainer-context", self.trainer_context)
        if self.trainer_context & (self.trainer_context - 1):
            raise UserError(f"--trainer-context {self.trainer_context}: expected a power of two")
        for option, value in (("--swap-s", self.swap_s), ("--price", self.price)):
            if value is not None and not 0 <= value < math.inf:  # also NaN
                raise UserError(f"{option} {value}: expected 0 or more")

    def widths(self, name: str) -> tuple[int, ...]:
        fixed = self.policy_tp if name == POLICY else self.judge_tp
        return WIDTHS if fixed is None else (fixed,)


def work_of(workload: Workload, constraints: Constraints) -> Work:
    """The update of a step, for the comparison of backends."""
    mean = (workload.prompt_length + workload.response_length) / 2
    longest = max(constraints.max_tokens_per_gpu, workload.longest)
    return Work(workload.trained_tokens, mean, longest, constraints.kl)


def modes_of(names: Sequence[str] | None) -> tuple[Mode, ...]:
    """The named modes; without names, all."""
    unknown = [name for name in names or () if name not in MODES]
    if unknown:
        raise UserError(f"--mode {unknown[0]}: expected one of {', '.join(MODES)}")
    return tuple(mode for mode in MODES if not names or mode in names)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def at_least_one(option: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{option} {value}: expected an integer, at least 1")
