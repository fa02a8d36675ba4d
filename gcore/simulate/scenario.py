"""A scenario: a cluster and the workload of a training run on it, as YAML. See scenarios/.

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
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from gcore.config.base import Auto, Count, Fraction, NonNegative, PositiveInt, Section, Seed
from gcore.config.load import load_tree
from gcore.config.sampling import MAX_OVERSAMPLING
from gcore.cost import denoisers
from gcore.cost.costs import GB, MEMORY_FRACTION, Gpu, Shape, gpu_of, logprob_s, serving, shape_of, training_s
from gcore.cost.denoisers import DenoiserShape, DenoisingWork, denoiser_of
from gcore.cost.replica_speed import ReplicaSpeed
from gcore.cost.training_memory import TrainingRank, training_memory
from gcore.placement.grid import POLICY, DeviceGrid
from gcore.placement.rules import RoleSpeeds, TrainerCosts

Positive = Annotated[float, Field(gt=0)]
Slot = Annotated[int, Field(ge=0)]
NORMAL = NormalDist()
MICRO_TOKENS = 16384  # per micro-batch of the trainer
STATE_BYTES = 12  # per parameter: weights and both moments in float32
REGROUP_S = 2.0  # assumption: new communicators of the data-parallel group
WAVES = 2  # parts of the policy's replicas that load new weights one after the other, while the rest generates
_Floats = npt.NDArray[np.float64]


class Drift(Section):
    start: Positive
    """At the first step."""
    end: Positive | None = None
    """At the last step; default: as at the first. It changes by the same factor at every step."""
    jitter: NonNegative = 0.0
    """Random variation per step: standard deviation of the logarithm."""
    cycle: tuple[Positive, ...] = (1.0,)
    """Factors of consecutive steps, repeated: [1, 0.5] halves every second step."""

    def at(self, progress: float, noise: float, step: int = 1) -> float:
        end = self.start if self.end is None else self.end
        factor = self.cycle[(step - 1) % len(self.cycle)]
        return float(self.start * (end / self.start) ** progress * math.exp(self.jitter * noise) * factor)


class Mode(Section):
    share: Annotated[float, Field(gt=0, lt=1)]
    """Share of the requests."""
    factor: Positive
    """Their mean length, in multiples of `start`."""
    sigma: NonNegative = 0.3
    """Their spread: standard deviation of the logarithm."""


class Lengths(Drift):
    sigma: NonNegative = 0.7
    """Spread of the lengths within a step: standard deviation of the logarithm. `start` and `end` are means (of the
    requests that belong to none of the `modes`)."""
    shared: Fraction = 0.5
    """Share of that variance that depends on the prompt: siblings have it in common."""
    longest: PositiveInt = 16384
    """Responses are cut at this length."""
    modes: tuple[Mode, ...] = ()
    """Further modes of a mixture: these shares of the requests have other lengths than the rest."""

    @model_validator(mode="after")
    def _shares(self) -> Lengths:
        if (total := sum(mode.share for mode in self.modes)) >= 1:
            raise ValueError(f"modes: shares sum to {total:g}; expected less than 1, the rest has `start` and `sigma`")
        return self

    @property
    def mean_factor(self) -> float:
        """Mean of the mixture, in multiples of `start`."""
        return 1 + sum(mode.share * (mode.factor - 1) for mode in self.modes)


class Speed(Section):
    base_s: Positive
    """Seconds per decoding step, without sequences."""
    per_sequence_s: NonNegative = 0.0
    """Seconds per decoding step that each sequence adds."""
    prefill_s_per_token: NonNegative = 0.0
    """Seconds of prefill per prompt token."""
    max_concurrent: PositiveInt = 256
    """Sequences that run at the same time."""
    sleep_s: NonNegative = 0.1
    """Seconds to free the memory."""
    wake_s: NonNegative = 0.5
    """Seconds to allocate it again."""
    weights_s: NonNegative = 0.2
    """Seconds of a weight update from the trainer."""


class Server(Section):
    model: str = "7B"
    """Size or folder of the model, as in `gcore plan`."""
    tensor_parallel: PositiveInt = 1
    """Slots per replica."""
    speed: Speed | None = None
    """Measured seconds; default: estimated for `model` on `gpu`."""


class SimulatedJudge(Server):
    name: str = "judge"
    """Name of the role."""
    verdict: Lengths = Lengths(start=384, sigma=0.3, shared=0.0, longest=4096)
    """Tokens per verdict."""
    repeats: PositiveInt = 1
    """Verdicts per response."""
    prompts: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the prompts whose responses it judges; the others need no verdict of it."""


class SimulatedDenoiser(Section):
    model: str = "sd3.5-medium"
    """Shape of the diffusion model, as `gcore plan --denoiser`."""
    steps: PositiveInt = 20
    """Denoising steps of a picture."""
    trained: PositiveInt | None = None
    """Trained steps; default: all except the last."""
    pixels: PositiveInt = 512
    """Height and width of a picture."""
    guidance: bool = True
    """Two passes per step, unless the model takes guidance as an input."""
    batch: PositiveInt = 16
    """Pictures that a replica denoises at the same time."""
    picture_tokens: PositiveInt | None = None
    """Tokens of a picture for a judge; default: one per 28 x 28 pixels, as in Qwen-VL."""


class Scenario(Section):
    name: str
    """Name in tables."""
    slots: PositiveInt
    """Number of accelerators."""
    gpu: str = "h100"
    """Kind of accelerator, as in `gcore plan`."""
    steps: PositiveInt = 100
    """Training steps."""
    seed: Seed = 0
    """Seed of lengths and acceptance."""
    controllers: PositiveInt | Auto = "auto"
    """Controllers, each with its share of the prompts; `auto`: one per 8 slots."""
    prompts: PositiveInt = 128
    """Groups per step that are trained on."""
    samples: PositiveInt = 8
    """Responses per group."""
    prompt_length: PositiveInt = 512
    """Tokens per prompt."""
    policy: Server = Server()
    """The model that is trained."""
    denoiser: SimulatedDenoiser | None = None
    """The model that is trained is a diffusion model, one replica per slot: instead of `policy` and `lengths`. Judges
    see the pictures."""
    judges: tuple[SimulatedJudge, ...] = (SimulatedJudge(model="32B", tensor_parallel=4),)
    """Generative judges; each scores every response."""
    lengths: Lengths = Lengths(start=1024)
    """Tokens per response."""
    acceptance: Drift = Drift(start=1.0)
    """Share of groups that dynamic sampling keeps."""
    max_oversampling: Positive = MAX_OVERSAMPLING
    """As sampling.max_oversampling."""
    staleness: Count = 0
    """As sampling.max_staleness: above 0, engines go on while the trainer works on blocks of its own."""
    oversampling: Annotated[float, Field(ge=1)] = 1.0
    """Groups in progress / missing groups, in addition to the groups that the acceptance rate requires."""
    device_speed: dict[Slot, Positive] = Field(default_factory=dict)
    """Slots that are slower or faster than the others, with their relative speed: {3: 0.5} takes twice as long. A
    replica over several slots is as slow as the slowest of them."""
    swap_s: NonNegative | None = None
    """Seconds to put one engine to sleep and wake another on the same slots; default: estimated."""
    rpc_s: NonNegative = 0.004
    """Seconds from the end of one stage of a group to the start of the next: calls, and the controller's work."""
    update_s: Positive | None = None
    """Seconds of preparation, training and weights; default: estimated from the step's tokens."""

    @model_validator(mode="after")
    def _names(self) -> Scenario:
        names = [POLICY, *(judge.name for judge in self.judges)]
        if len(set(names)) < len(names):
            raise ValueError(f"roles need different names, got {names}")
        if self.denoiser is not None and {"policy", "lengths"} & self.model_fields_set:
            raise ValueError("denoiser: expected neither policy nor lengths beside it")
        if max(self.device_speed, default=0) >= self.slots:
            raise ValueError(f"device_speed: got slot {max(self.device_speed)}; expected 0 to {self.slots - 1}")
        return self

    @property
    def num_controllers(self) -> int:
        return max(1, self.slots // 8) if self.controllers == "auto" else self.controllers

    @property
    def grid(self) -> DeviceGrid:
        widths = {POLICY: self.policy.tensor_parallel} | {j.name: j.tensor_parallel for j in self.judges}
        return DeviceGrid(self.slots, widths)

    def costs(self, step: int) -> RoleSpeeds:
        """The speeds of this step: longer responses mean longer contexts, which slow down decoding."""
        progress = self.progress(step)
        response = self.read_by_judges(self.responses.at(progress, 0.0, step) * self.responses.mean_factor)
        context = self.prompt_length + response / 2
        speeds = {POLICY: self._policy_speed(context)}
        for judge in self.judges:
            verdict = judge.verdict.at(progress, 0.0, step) * judge.verdict.mean_factor
            speeds[judge.name] = self._speed(judge, self.prompt_length + response + verdict / 2)
        if not self.staleness:
            return RoleSpeeds(self.grid, speeds)
        return RoleSpeeds(self.grid, speeds, trainer=self._trainer_costs(response, speeds[POLICY].weights_s))

    def _trainer_costs(self, response: float, weights_s: float) -> TrainerCosts:
        """From two numbers of blocks. The update seconds of the responses that are expected in a step."""
        grid, lengths = self.grid, [max(1, round(response))] * (self.prompts * self.samples)
        least, most = self._least_trainer_blocks(), grid.num_blocks
        few, all_ = (self.training_s(lengths, blocks * grid.slots_per_block) for blocks in (least, most))
        work_s = (few - all_) / (1 / least - 1 / most) if most > least else few * least
        work_s = min(work_s, few * least)
        fixed_s = few - work_s / least + WAVES * weights_s
        gpu, per_block = gpu_of(self.gpu), STATE_BYTES * self._trained_parameters() / grid.slots_per_block
        move_s = REGROUP_S + gpu.collective_s(per_block / least, self.slots)
        return TrainerCosts(work_s, fixed_s, least, move_s, gpu.host_s(per_block))

    def replica_speed(self, role: str, replica: int) -> float:
        """Relative speed of a replica: that of its slowest slot."""
        width = self.grid.widths[role]
        return min(self.device_speed.get(slot, 1.0) for slot in range(replica * width, (replica + 1) * width))

    @property
    def responses(self) -> Lengths:
        """Steps per response: tokens, or the denoising steps, whose number is the same for all pictures."""
        if self.denoiser is None:
            return self.lengths
        return Lengths(start=self.denoiser.steps, sigma=0.0, longest=self.denoiser.steps)

    def read_by_judges(self, response: float) -> float:
        """Tokens of a response of `response` steps in the prompt of a judge."""
        if self.denoiser is None:
            return response
        return self.denoiser.picture_tokens or max(1, self.denoiser.pixels**2 // 28**2)

    def _denoising(self, spec: SimulatedDenoiser) -> tuple[DenoiserShape, Gpu, DenoisingWork]:
        """Shape, GPU and work of a step of the denoiser."""
        work = DenoisingWork(
            *(self.prompts, self.samples, spec.steps, spec.trained, spec.pixels, spec.guidance), batch=spec.batch
        )
        return denoiser_of(spec.model, "denoiser.model"), gpu_of(self.gpu), work

    def _policy_speed(self, context: float) -> ReplicaSpeed:
        if self.denoiser is None:
            return self._speed(self.policy, context)
        return denoisers.replica_speed(*self._denoising(self.denoiser)).with_swap(self.swap_s)

    def update(self, step: int, lengths: Sequence[int]) -> float:
        """Seconds of the update phase: logprobs, training, and the weight update of the policy's engines."""
        if self.update_s is not None:
            return self.update_s
        speed = self.costs(step).speeds[POLICY]
        return self.training_s(lengths, self.slots) + speed.sleep_s + speed.wake_s + speed.weights_s

    def training_s(self, lengths: Sequence[int], slots: int) -> float:
        """Seconds of logprobs and training on this number of slots."""
        if self.update_s is not None:
            return self.update_s * self.slots / slots
        if self.denoiser is not None:
            denoiser, gpu, work = self._denoising(self.denoiser)
            return sum(denoisers.training_times(denoiser, gpu, slots, work).values())
        shape, gpu = shape_of(self.policy.model), gpu_of(self.gpu)
        tokens = sum(lengths) + len(lengths) * self.prompt_length
        context = self.prompt_length + sum(n * n for n in lengths) / max(1, 2 * sum(lengths))
        return sum(seconds(shape, gpu, slots, tokens, context) for seconds in (logprob_s, training_s))

    def _trained_parameters(self) -> float:
        return float(0 if self.denoiser is not None else shape_of(self.policy.model).parameters)

    def _least_trainer_blocks(self) -> int:
        """The fewest that hold the trainer: its state, gradients, activations; a denoiser fits on any."""
        if self.denoiser is not None or self.update_s is not None:
            return 1
        grid = self.grid
        return min(
            grid.num_blocks, -(-_least_ranks(shape_of(self.policy.model), gpu_of(self.gpu)) // grid.slots_per_block)
        )

    def progress(self, step: int) -> float:
        return (step - 1) / max(1, self.steps - 1)

    def _speed(self, server: Server, context: float) -> ReplicaSpeed:
        if server.speed is not None:
            return ReplicaSpeed(**server.speed.model_dump())
        shape, gpu = shape_of(server.model), gpu_of(self.gpu)
        speed = serving(shape, gpu, server.tensor_parallel, context, is_policy=server is self.policy)
        return speed.with_swap(self.swap_s)


@lru_cache
def _least_ranks(shape: Shape, gpu: Gpu) -> int:
    """The fewest GPUs on which a trainer fits."""
    room, ranks = gpu.memory_gb * MEMORY_FRACTION * GB, 1
    while True:
        rank = TrainingRank(shape, shard=ranks, max_tokens=MICRO_TOKENS, checkpointing=True)
        if max(sum(parts.values()) for parts in training_memory(rank).gpu.values()) <= room or ranks > 4096:
            return ranks
        ranks += 1


def load_scenario(path: str | Path, overrides: Sequence[str] = ()) -> Scenario:
    return load_tree(path, overrides, Scenario, "scenario")


@dataclass(slots=True)
class GroupDraw:
    """What one group will be: GroupDraw(tokens=[812, 640], verdicts={"judge": [[300], [280]]}, good=True)"""

    tokens: list[int]
    verdicts: dict[str, list[list[int]]]  # only of the judges that judge this prompt
    good: bool  # the group is accepted


@dataclass
class StepWork:
    """The draws of all prompts in one step, by prompt number; computed on demand.

    Whether a prompt is long or short, good or not, *compared with the others* is a property of the prompt, the same in
    all steps, and so is which judges it needs. The mean length and the acceptance rate are properties of the step. So a
    prompt that was aborted because it is long will be long again.
    """

    scenario: Scenario
    step: int

    def __post_init__(self) -> None:
        scenario, step = self.scenario, self.step
        progress = scenario.progress(step)
        jitter = np.random.default_rng([scenario.seed, 0, step]).standard_normal(3)
        spec = scenario.responses
        self.mean = spec.at(progress, jitter[0], step)
        self.acceptance = min(1.0, scenario.acceptance.at(progress, jitter[1], step))
        self.verdict_means = {j.name: j.verdict.at(progress, jitter[2], step) for j in scenario.judges}
        judged = [((scenario.samples, judge.repeats), judge.verdict.shared) for judge in scenario.judges]
        self._shapes = (((scenario.samples,), spec.shared), *judged)
        self._judged = tuple(judge.prompts for judge in scenario.judges)

    def __getitem__(self, number: int) -> GroupDraw:
        scenario = self.scenario
        chunk, i = divmod(number, CHUNK)
        (of_responses, *of_verdicts), uniform, needed = _noise(scenario.seed, chunk, self._shapes, self._judged)
        tokens, verdicts = _lengths(scenario.responses, self.mean, of_responses[i].tolist()), {}
        for judge, normal, is_needed in zip(scenario.judges, of_verdicts, needed, strict=True):
            if is_needed[i]:
                flat = _lengths(judge.verdict, self.verdict_means[judge.name], normal[i].ravel().tolist())
                verdicts[judge.name] = [flat[k : k + judge.repeats] for k in range(0, len(flat), judge.repeats)]
        return GroupDraw(tokens, verdicts, uniform[i] < self.acceptance)


def _lengths(spec: Lengths, mean: float, normal: list[float]) -> list[int]:
    longest = spec.longest
    if spec.modes:
        drawn = [round(mean * math.exp(x)) for x in np.interp(normal, *_mixture(spec)).tolist()]
    else:
        median, sigma = mean * math.exp(-(spec.sigma**2) / 2), spec.sigma
        drawn = [round(median * math.exp(sigma * n)) for n in normal]
    return [1 if n < 1 else longest if n > longest else n for n in drawn]


@lru_cache(maxsize=64)
def _mixture(spec: Lengths) -> tuple[_Floats, _Floats]:
    """Of a mixture of log-normal distributions: normal deviates, and the logarithms of length / mean at the same
    quantiles. So siblings whose deviates are similar mostly belong to the same mode."""
    rest = 1 - sum(mode.share for mode in spec.modes)
    parts = [(rest, 1.0, spec.sigma), *((mode.share, mode.factor, mode.sigma) for mode in spec.modes)]
    normals = [(share, NormalDist(math.log(factor) - sigma**2 / 2, max(sigma, 1e-3))) for share, factor, sigma in parts]
    ends = [normal.mean + k * normal.stdev for _, normal in normals for k in (-6, 6)]
    points = sorted(
        {*np.linspace(min(ends), max(ends), 512).tolist()}.union(*(_around(normal) for _, normal in normals))
    )
    below = [sum(share * normal.cdf(x) for share, normal in normals) for x in points]
    inside = [(NORMAL.inv_cdf(p), x) for p, x in zip(below, points, strict=True) if 1e-12 < p < 1 - 1e-12]
    deviates, logs = zip(*inside, strict=True)
    return np.array(deviates), np.array(logs)


def _around(normal: NormalDist) -> list[float]:
    return [normal.mean + normal.stdev * k / 8 for k in range(-48, 49)]


_Shape = tuple[tuple[int, ...], float]  # shape of a prompt's numbers, share of their variance that they have in common

CHUNK = 32  # prompts whose noise is drawn together


@lru_cache(maxsize=8192)  # large: after 1,000 steps the controllers are at different chunks, and each needs all of them
def _noise(
    seed: int, chunk: int, shapes: tuple[_Shape, ...], judged: tuple[float, ...]
) -> tuple[list[_Floats], list[float], list[list[bool]]]:
    """Per prompt, the same in all steps: normal deviates of lengths, uniform draws of acceptance, and by judge whether
    it judges the prompt. `judged`: the shares of prompts that they judge."""
    rng, normals = np.random.default_rng([seed, 1, chunk]), list[_Floats]()
    for shape, shared in shapes:
        own, common = rng.standard_normal((CHUNK, *shape)), rng.standard_normal((CHUNK, *([1] * len(shape))))
        normals.append(math.sqrt(shared) * common + math.sqrt(1 - shared) * own)
    draws = np.random.default_rng([seed, 2, chunk]).random((len(judged), CHUNK))
    needed = [(draw < share).tolist() for draw, share in zip(draws, judged, strict=True)]
    return normals, rng.random(CHUNK).tolist(), needed
