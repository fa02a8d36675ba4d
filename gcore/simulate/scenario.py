"""A scenario: a cluster and the work of a training run on it, as YAML. See scenarios/.

name: drift
slots: 64
gpu: h100
policy: {model: 7B}
judges: [{name: judge, model: 32B, tensor_parallel: 4, verdict: {start: 400}}]
lengths: {start: 512, end: 8192, sigma: 0.7}
acceptance: {start: 0.9, end: 0.3}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from gcore.config.base import Auto, Fraction, NonNegative, PositiveInt, Section
from gcore.config.load import load_config
from gcore.config.sampling import MAX_OVERSAMPLING
from gcore.placement.grid import POLICY, DeviceGrid
from gcore.placement.replica_speed import ReplicaSpeed
from gcore.placement.rules import Costs

Positive = Annotated[float, Field(gt=0)]


class Drift(Section):
    start: Positive
    """At the first step."""
    end: Positive | None = None
    """At the last; default: as at the first. In between it grows by the same factor every step."""
    jitter: NonNegative = 0.0
    """Spread from step to step: standard deviation of the logarithm."""

    def at(self, progress: float, noise: float) -> float:
        end = self.start if self.end is None else self.end
        return float(self.start * (end / self.start) ** progress * math.exp(self.jitter * noise))


class Lengths(Drift):
    sigma: NonNegative = 0.7
    """Spread of the lengths in a step: standard deviation of the logarithm; `start` and `end` are means."""
    shared: Fraction = 0.5
    """How much of that variance is the prompt's: its siblings have it in common."""
    longest: PositiveInt = 16384
    """Responses are cut there."""


class Speed(Section):
    base_s: Positive
    """Seconds of a decoding step before its first sequence."""
    per_sequence_s: NonNegative = 0.0
    """What each sequence adds."""
    prefill_s_per_token: NonNegative = 0.0
    """Seconds of a prompt token."""
    max_concurrent: PositiveInt = 256
    """Sequences at once."""
    sleep_s: NonNegative = 0.1
    """Giving the memory back."""
    wake_s: NonNegative = 0.5
    """Taking it again."""
    weights_s: NonNegative = 0.2
    """New weights from the trainer."""


class Server(Section):
    model: str = "7B"
    """Size or folder of the model, as in `gcore plan`."""
    tensor_parallel: PositiveInt = 1
    """Slots of a replica."""
    speed: Speed | None = None
    """Seconds measured elsewhere, instead of estimates for `model` on `gpu`."""


class SimulatedJudge(Server):
    name: str = "judge"
    """Name of the role."""
    verdict: Lengths = Lengths(start=384, sigma=0.3, shared=0.0, longest=4096)
    """Tokens of a verdict."""
    repeats: PositiveInt = 1
    """Verdicts for each response."""


class Scenario(Section):
    name: str
    """Name in tables."""
    slots: PositiveInt
    """Accelerators."""
    gpu: str = "h100"
    """Which, as in `gcore plan`."""
    steps: PositiveInt = 100
    """Training steps."""
    seed: int = 0
    """Of lengths and acceptance."""
    controllers: PositiveInt | Auto = "auto"
    """Controllers, each with its share of the prompts; `auto`: one for 8 slots."""
    prompts: PositiveInt = 128
    """Groups a step trains on."""
    samples: PositiveInt = 8
    """Responses in a group."""
    prompt_length: PositiveInt = 512
    """Tokens of a prompt."""
    policy: Server = Server()
    """The model that is trained."""
    judges: tuple[SimulatedJudge, ...] = (SimulatedJudge(model="32B", tensor_parallel=4),)
    """Generative judges; each scores every response."""
    lengths: Lengths = Lengths(start=1024)
    """Tokens of a response."""
    acceptance: Drift = Drift(start=1.0)
    """Share of groups that dynamic sampling keeps."""
    max_oversampling: Positive = MAX_OVERSAMPLING
    """As sampling.max_oversampling."""
    oversampling: Annotated[float, Field(ge=1)] = 1.0
    """How many times the missing groups are under way, beyond what the acceptance rate asks for."""
    long_first: bool = False
    """Of prompts drawn together, those expected to be long start first, by a hint that is off by a third or so. Runs
    have no such hint: this asks what one would be worth."""
    swap_s: NonNegative | None = None
    """Seconds to put one engine to sleep and wake another in its place; default: estimated."""
    rpc_s: NonNegative = 0.004
    """From the end of a stage of a group to the start of the next: calls, and the controller's own work."""
    update_s: Positive | None = None
    """Seconds of preparation, training and weights; default: estimated from the step's tokens."""

    @model_validator(mode="after")
    def _names(self) -> Scenario:
        names = [POLICY, *(judge.name for judge in self.judges)]
        if len(set(names)) < len(names):
            raise ValueError(f"roles need different names, got {names}")
        return self

    @property
    def num_controllers(self) -> int:
        return max(1, self.slots // 8) if self.controllers == "auto" else self.controllers

    @property
    def grid(self) -> DeviceGrid:
        widths = {POLICY: self.policy.tensor_parallel} | {j.name: j.tensor_parallel for j in self.judges}
        return DeviceGrid(self.slots, widths)

    def costs(self, step: int) -> Costs:
        """The speeds of this step: contexts grow with the responses, and slow the decoding."""
        progress = self.progress(step)
        response = self.lengths.at(progress, 0.0)
        speeds = {POLICY: self._pace(self.policy, self.prompt_length + response / 2)}
        for judge in self.judges:
            speeds[judge.name] = self._pace(judge, self.prompt_length + response + judge.verdict.at(progress, 0.0) / 2)
        return Costs(self.grid, speeds)

    def update(self, step: int, lengths: Sequence[int]) -> float:
        """Seconds of the update phase: logprobs, training, and the policy's weights."""
        if self.update_s is not None:
            return self.update_s
        from gcore.simulate.costs import gpu_of, logprob_s, shape_of, training_s

        shape, gpu = shape_of(self.policy.model), gpu_of(self.gpu)
        tokens = sum(lengths) + len(lengths) * self.prompt_length
        context = self.prompt_length + sum(n * n for n in lengths) / max(1, 2 * sum(lengths))
        passes = logprob_s(shape, gpu, self.slots, tokens, context) + training_s(
            shape, gpu, self.slots, tokens, context
        )
        pace = self.costs(step).speeds[POLICY]
        return passes + pace.sleep_s + pace.wake_s + pace.weights_s

    def progress(self, step: int) -> float:
        return (step - 1) / max(1, self.steps - 1)

    def _pace(self, server: Server, context: float) -> ReplicaSpeed:
        if server.speed is not None:
            return ReplicaSpeed(**server.speed.model_dump())
        from gcore.simulate.costs import serving

        pace = serving(server.model, self.gpu, server.tensor_parallel, context, refilled=server is self.policy)
        if self.swap_s is None:
            return pace
        return replace(pace, sleep_s=0.0, wake_s=self.swap_s, weights_s=0.0)


def load_scenario(path: str | Path, overrides: list[str] | None = None) -> Scenario:
    return load_config(path, overrides or [], into=Scenario)


@dataclass(slots=True)
class Draw:
    """One group to be: Draw(tokens=[812, 640], verdicts={"judge": [[300], [280]]}, good=True, hint=700.0)"""

    tokens: list[int]
    verdicts: dict[str, list[list[int]]]
    good: bool
    hint: float  # how long it is expected to be


@dataclass
class StepWork:
    """What the prompts of the run would come to in one step, by their number; made as they are asked for.

    A prompt is long or short, good or not, *compared with others*: that is its own, whatever the step. How long
    responses are on the whole, and how many are accepted, is the step's. So what is aborted since it is long will be
    long again.
    """

    scenario: Scenario
    step: int

    def __post_init__(self) -> None:
        scenario = self.scenario
        progress = scenario.progress(self.step)
        jitter = np.random.default_rng([scenario.seed, 0, self.step]).standard_normal(3)
        self.mean = scenario.lengths.at(progress, jitter[0])
        self.acceptance = min(1.0, scenario.acceptance.at(progress, jitter[1]))
        self.verdict_means = {j.name: j.verdict.at(progress, jitter[2]) for j in scenario.judges}
        judged = [((scenario.samples, judge.repeats), judge.verdict.shared) for judge in scenario.judges]
        self._shapes = (((scenario.samples,), scenario.lengths.shared), *judged)
        self._response = _scale(scenario.lengths, self.mean)
        self._verdicts = [(j.name, j.repeats, _scale(j.verdict, self.verdict_means[j.name])) for j in scenario.judges]

    def __getitem__(self, number: int) -> Draw:
        (own, *others), luck, guess = _noise(self.scenario.seed, number // CHUNK, self._shapes)
        i = number % CHUNK
        tokens, verdicts = _lengths(*self._response, own[i].tolist()), {}
        for (name, repeats, scale), normal in zip(self._verdicts, others, strict=True):
            flat = _lengths(*scale, normal[i].ravel().tolist())
            verdicts[name] = [flat[k : k + repeats] for k in range(0, len(flat), repeats)]
        hint = sum(tokens) / len(tokens) * math.exp(0.3 * guess[i])
        return Draw(tokens, verdicts, luck[i] < self.acceptance, hint)


def _scale(spec: Lengths, mean: float) -> tuple[float, float, int]:
    """Median, sigma, longest."""
    return mean * math.exp(-(spec.sigma**2) / 2), spec.sigma, spec.longest


def _lengths(median: float, sigma: float, longest: int, normal: list[float]) -> list[int]:
    drawn = [round(median * math.exp(sigma * n)) for n in normal]
    return [1 if n < 1 else longest if n > longest else n for n in drawn]


_Shape = tuple[tuple[int, ...], float]  # of a prompt's numbers, and how much of their variance they have in common
_Floats = npt.NDArray[np.float64]
CHUNK = 32  # prompts that are made together


@lru_cache(maxsize=8192)  # controllers drift apart: after 1,000 steps each is at another chunk, and all come by each
def _noise(seed: int, chunk: int, shapes: tuple[_Shape, ...]) -> tuple[list[_Floats], list[float], list[float]]:
    """What is some prompts' own: normal deviates of their lengths, luck in being accepted, how far a hint is off."""
    rng, normals = np.random.default_rng([seed, 1, chunk]), list[_Floats]()
    for shape, shared in shapes:
        own, common = rng.standard_normal((CHUNK, *shape)), rng.standard_normal((CHUNK, *([1] * len(shape))))
        normals.append(math.sqrt(shared) * common + math.sqrt(1 - shared) * own)
    return normals, rng.random(CHUNK).tolist(), rng.standard_normal(CHUNK).tolist()
