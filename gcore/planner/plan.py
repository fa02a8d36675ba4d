"""`gcore plan`: does it fit, how long is a step, which placement is fastest. Needs no GPU, no weights, no torch.

    model, judges ──> shapes ─┐
    gpu ──> hardware.json ────┼──> memory of every role and phase ──> tensor parallel sizes that fit
    workload ─────────────────┘                                              │
                                each placement at its best sizes <── estimate (steps.py) ──> PlanResult

Every GPU hosts every engine and a shard of the trainer; engines that are not used sleep. All are tried: the trainer's
state stays on the GPUs during the rollout, or its moments or all of it are in host memory. Activation checkpointing is
used only where activations do not fit without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gcore.cost import costs
from gcore.cost.costs import GB, Gpu, Shape
from gcore.cost.replica_speed import ReplicaSpeed
from gcore.cost.training_memory import OFFLOADS, Choice, Engines, Offload, TrainingRank, choose, training_memory
from gcore.placement.grid import POLICY
from gcore.planner.inputs import WIDTHS, at_least_one
from gcore.planner.inputs import Constraints as Constraints
from gcore.planner.inputs import Workload as Workload
from gcore.planner.steps import Case, Estimate, Mode, Rollouts, colocated, estimate

MIN_SEQUENCES = 32  # at the mean context; with a smaller KV cache a replica is too slow
WIDTHS_TRIED = 2  # per role: the smallest width that fits, and the next


@dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU in one phase, in GB. `problem`: why it does not fit; empty if it fits.

    GpuMemory("judge", "rollout", tp=4, weights=36.4, kv_cache=17.0, asleep=5.7, optimizer=6.1, free=8.0, sequences=67)
    """

    role: str
    phase: str
    tp: int
    weights: float = 0.0  # of a trainer: with its copies in bfloat16 and the KL reference
    gradients: float = 0.0
    optimizer: float = 0.0  # the moments of a trainer; beside an engine, all that the trainer keeps on the GPU
    activations: float = 0.0  # with temporary tensors
    kv_cache: float = 0.0
    asleep: float = 0.0  # held by sleeping engines
    free: float = 0.0
    sequences: int = 0  # in the KV cache, at the mean context
    problem: str = ""


@dataclass(frozen=True)
class PlanResult:
    """The result of `gcore plan`. `estimates`: fastest first; empty if something does not fit."""

    model: Shape
    judges: tuple[Shape, ...]
    gpu: Gpu
    gpus: int
    workload: Workload
    price: float
    memory: tuple[GpuMemory, ...]
    estimates: tuple[Estimate, ...]
    problems: tuple[str, ...]
    changes: tuple[str, ...]  # single changes after which it fits
    trainer: Choice  # memory of a trainer rank, with what was decided about checkpointing and off-load
    drift: Mapping[str, float]  # step seconds by mode if responses are twice as long and the static split stays
    shared_prompts: int = 0  # per step, that training does not compute: they are those of siblings

    @property
    def best(self) -> Estimate | None:
        return self.estimates[0] if self.estimates else None

    def of(self, mode: Mode) -> Estimate | None:
        return next((estimate for estimate in self.estimates if estimate.mode == mode), None)

    def tokens_per_s(self, estimate: Estimate) -> float:
        """Trained tokens per second of wall time, prompts included."""
        return self.workload.trained_tokens / estimate.step_s

    def dollars(self, estimate: Estimate, steps: int = 1) -> float:
        return estimate.step_s / 3600 * self.gpus * self.price * steps

    def saved_over(self, mode: Mode) -> float | None:
        """Share of the step that dynamic placement saves over another mode."""
        dynamic, other = self.of("dynamic"), self.of(mode)
        return None if dynamic is None or other is None else 1 - dynamic.step_s / other.step_s

    @property
    def host_gb(self) -> float:
        """Host memory per machine for judges' weights and, if it is off-loaded, the trainer's state."""
        best, used = self.best, min(self.gpu.per_node, self.gpus)
        if best is None:
            return 0.0
        names = [name for name in best.tp if name != POLICY]
        held = sum(shape.weight_bytes / best.tp[name] for name, shape in zip(names, self.judges, strict=True))
        return used * (held + self.trainer.host_peak) / GB

    def as_json(self) -> dict[str, Any]:
        estimates = [
            {**asdict(e), "tokens_per_s": self.tokens_per_s(e), "dollars_per_step": self.dollars(e)}
            for e in self.estimates
        ]
        saved = {mode: self.saved_over(mode) for mode in ("static", "colocated")}
        return {
            "fits": not self.problems,
            **asdict(self),
            "estimates": estimates,
            "host_gb": self.host_gb,
            "dynamic_saves": saved,
            "assumptions": {key: costs.hardware()[key] for key in ("reach", "engine", "prices")},
        }


def plan(
    model: Shape,
    judges: Sequence[Shape],
    gpus: int,
    gpu: Gpu,
    workload: Workload | None = None,
    constraints: Constraints | None = None,
) -> PlanResult:
    """All placements. If something does not fit, the result contains the problems; no error is raised."""
    workload, constraints = workload or Workload(), constraints or Constraints()
    at_least_one("--gpus", gpus)
    inputs = _Inputs(model, tuple(judges), gpus, gpu, workload, constraints)
    fastest: dict[Mode, tuple[Estimate, Case]] = {}
    for mode, case in itertools.product(inputs.modes, inputs.cases()):
        now = estimate(mode, case)
        if now is not None and (mode not in fastest or now.step_s < fastest[mode][0].step_s):
            fastest[mode] = now, case
    ranked = sorted(fastest.values(), key=lambda pair: pair[0].step_s)
    chosen = ranked[0][1] if ranked else None
    trainer = inputs.trainer(chosen.offload if chosen else None)
    engines = inputs.engines(chosen)
    update = inputs.trainer_memory(trainer)
    memory = (*engines, update)
    problems = tuple(f"{fit.role} ({fit.phase}): {fit.problem}" for fit in memory if fit.problem)
    if not ranked and not problems:
        problems = (f"no placement of {len(judges) + 1} roles on {gpus} GPUs: in this mode every role needs own GPUs",)
    return PlanResult(
        model=model,
        judges=tuple(judges),
        gpu=gpu,
        gpus=gpus,
        workload=workload,
        price=gpu.price if constraints.price is None else constraints.price,
        memory=memory,
        estimates=() if problems else tuple(pair[0] for pair in ranked),
        problems=problems,
        changes=_changes(inputs) if problems else (),
        trainer=inputs.beside(trainer, engines),
        drift={} if problems else _drift(inputs, fastest),
        shared_prompts=workload.shared_prompts(model, inputs.shared_up_to(trainer)),
    )


def memory_by_width(
    model: Shape, judges: Sequence[Shape], gpus: int, gpu: Gpu, workload: Workload, constraints: Constraints
) -> list[PlanResult]:
    """Plans for every tensor parallel size of the trainer, and for micro-batches as given and twice as large. Each has
    the least off-load that fits, as a run with `training.offload: auto`."""
    results, inputs = [], _Inputs(model, tuple(judges), gpus, gpu, workload, constraints)
    wide = [tp for tp in WIDTHS if gpus % tp == 0 and tp <= gpu.per_node and model.heads % tp == 0]
    for tp, factor in itertools.product(wide, (1, 2)):
        tokens = factor * max(constraints.max_tokens_per_gpu, inputs.longest_row)
        limits = replace(constraints, trainer_tp=tp, max_tokens_per_gpu=tokens, shrink=False, modes=("colocated",))
        for level in inputs.levels:
            result = plan(model, judges, gpus, gpu, workload, replace(limits, offload=level))
            if not result.problems:
                break
        results.append(result)
    return results


@dataclass(frozen=True)
class _Inputs:
    """The inputs of a plan, and what follows from them for every placement: memory, useful widths, roles."""

    model: Shape
    judges: tuple[Shape, ...]
    gpus: int
    gpu: Gpu
    workload: Workload
    constraints: Constraints

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Without a judge there is nothing to split: static and dynamic are then the same as co-location."""
        wanted = self.constraints.modes
        return wanted if self.judges else tuple(mode for mode in wanted if mode not in ("static", "dynamic")) or wanted

    @property
    def shapes(self) -> dict[str, Shape]:
        names = ["judge"] if len(self.judges) == 1 else [f"judge {i + 1}" for i in range(len(self.judges))]
        return {POLICY: self.model, **dict(zip(names, self.judges, strict=True))}

    @property
    def usable(self) -> float:
        """GB of a GPU."""
        return self.gpu.memory_gb * costs.MEMORY_FRACTION

    @property
    def levels(self) -> tuple[Offload, ...]:
        wanted = self.constraints.offload
        return OFFLOADS if wanted == "auto" else (wanted,)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest sequence on one rank."""
        return -(-self.workload.longest // self.constraints.trainer_context)

    def rank(self, micro_tokens: int, offload: Offload = "none") -> TrainingRank:
        limits = self.constraints
        shard = max(1, self.gpus // limits.trainer_tp)
        return TrainingRank(
            *(self.model, shard, limits.trainer_tp, micro_tokens, limits.checkpointing is True, limits.kl),
            offload=offload,
            critic=self.model if limits.critic else None,
        )

    def trainer(self, offload: Offload | None = None) -> Choice:
        """Memory of a rank at this off-load (None: the least that fits), with the largest micro-batch that fits: from
        max_tokens_per_gpu, halved down to a rank's part of the longest sequence."""
        if offload is None:
            tries = [self.trainer(level) for level in self.levels]
            return next((each for each in tries if not self.trainer_memory(each).problem), tries[-1])
        total, checkpointing = self.gpu.memory_gb * GB, self.constraints.checkpointing
        asleep = costs.ENGINE.asleep_gb * len(self.shapes) * GB
        engines = Engines(0.0, asleep, asleep)  # `engine_memory` checks the phases in which one is awake
        tokens = max(self.constraints.max_tokens_per_gpu, self.longest_row)
        while True:
            choice = choose(self.rank(tokens), engines, total, checkpointing, offload)
            if not self.trainer_memory(choice).problem or tokens <= self.longest_row or not self.constraints.shrink:
                return choice
            tokens = max(tokens // 2, self.longest_row)

    def trainer_memory(self, choice: Choice) -> GpuMemory:
        """The phase with the highest peak."""
        parts = {name: size / GB for name, size in choice.gpu[choice.worst].items()}
        needed = choice.peak / GB
        problem = "" if needed <= self.usable else f"needs {needed:.0f} GB per GPU, {self.usable:.0f} GB can be used"
        if self.gpus % self.constraints.trainer_tp:
            problem = f"--trainer-tp {self.constraints.trainer_tp} does not divide {self.gpus} GPUs"
        elif (ranks := self.gpus // self.constraints.trainer_tp) % (context := self.constraints.trainer_context):
            problem = f"--trainer-context {context} does not divide {ranks} data-parallel ranks"
        return GpuMemory(
            "trainer",
            choice.worst,
            choice.rank.tensor_parallel,
            weights=sum(parts.get(name, 0.0) for name in ("weights", "copies", "reference", "critic", "buckets")),
            gradients=parts.get("gradients", 0.0),
            optimizer=parts.get("moments", 0.0) + parts.get("critic moments", 0.0),
            activations=parts.get("activations", 0.0) + parts.get("work", 0.0),
            asleep=parts.get("engines", 0.0),
            free=self.gpu.memory_gb - needed,
            problem=problem,
        )

    def beside(self, trainer: Choice, engines: Sequence[GpuMemory]) -> Choice:
        """The trainer's memory with that of awake engines: at the start the policy, in the rollout the one with the
        largest share, in the weight update the policy without its KV cache."""
        held = [(fit.weights + fit.kv_cache + fit.asleep) * GB for fit in engines]
        awake = {
            "start": held[0],
            "rollout": max(held),
            "weight update": (engines[0].weights + costs.ENGINE.asleep_gb * len(self.shapes)) * GB,
        }
        gpu = {
            phase: {**parts, "engines": awake.get(phase, parts.get("engines", 0.0))}
            for phase, parts in trainer.gpu.items()
        }
        return replace(trainer, gpu=gpu)

    def engine_memory(self, name: str, tp: int, offload: Offload) -> GpuMemory:
        shape, work = self.shapes[name], self.workload
        trainer = {
            phase: sum(parts.values()) / GB for phase, parts in training_memory(self.rank(1, offload)).gpu.items()
        }
        updating = trainer["weight update"] + costs.ENGINE.asleep_gb * len(self.shapes)
        # the policy is awake at the start, when it gets its first weights; judges sleep then
        state = max(trainer["start"], trainer["rollout"]) if name == POLICY else trainer["rollout"]
        asleep = costs.ENGINE.asleep_gb * (len(self.shapes) - 1)
        available = self.usable - state - asleep
        tokens = costs.kv_tokens(shape, self.gpu, tp, available)
        weights = shape.weight_bytes / tp / GB
        longest = work.longest + (0 if name == POLICY else work.longest_verdict)
        sequences = min(int(tokens / work.context(name)), costs.ENGINE.max_sequences)
        problem = ""
        if weights > available:
            problem = f"weights need {weights:.0f} GB per GPU, {max(0.0, available):.0f} GB are available"
        elif name == POLICY and weights + updating > self.usable:
            problem = f"a weight update needs {weights + updating:.0f} GB per GPU, {self.usable:.0f} GB can be used"
        elif tokens < longest:
            problem = f"KV cache of {tokens} tokens, the longest sequence has {longest}"
        elif sequences < MIN_SEQUENCES:
            problem = f"KV cache for {sequences} sequences, expected at least {MIN_SEQUENCES}"
        elif shape.heads % tp:
            problem = f"{shape.heads} attention heads are not divisible by {tp}"
        kv = max(0.0, available - weights)
        free = self.gpu.memory_gb - weights - kv - state - asleep
        return GpuMemory(name, "rollout", tp, weights, 0.0, state, 0.0, kv, asleep, free, sequences, problem)

    def options(self) -> list[tuple[Offload, tuple[int, ...]]]:
        """Pairs of: off-load, width per role. Only those that fit."""
        fitting: list[tuple[Offload, tuple[int, ...]]] = []
        for level in self.levels:
            if self.trainer_memory(self.trainer(level)).problem:
                continue
            useful = [
                [tp for tp in self.widths(name) if not self.engine_memory(name, tp, level).problem][:WIDTHS_TRIED]
                for name in self.shapes
            ]
            fitting += [(level, widths) for widths in itertools.product(*useful)]
        return fitting

    def cases(self) -> list[Case]:
        """One for each choice of widths: with the off-load that makes co-location fastest."""
        by_widths: dict[tuple[int, ...], list[Case]] = {}
        for level, widths in self.options():
            if self.gpus % max(widths) == 0:
                by_widths.setdefault(widths, []).append(self.case(level, widths))
        return [min(cases, key=lambda case: colocated(case).step_s) for cases in by_widths.values()]

    def widths(self, name: str) -> list[int]:
        return [tp for tp in self.constraints.widths(name) if self.gpus % tp == 0 and tp <= self.gpu.per_node]

    def engines(self, case: Case | None) -> tuple[GpuMemory, ...]:
        """Memory of the engines of a case; without a case, each at its first width that fits, else at the widest."""
        if case is not None:
            return tuple(self.engine_memory(name, tp, case.offload) for name, tp in case.rollouts.widths.items())
        best = []
        for name in self.shapes:
            tries = [self.engine_memory(name, tp, self.levels[-1]) for tp in self.widths(name)]
            if not tries:
                sizes = ", ".join(map(str, self.constraints.widths(name)))
                problem = f"none of tensor parallel {sizes} divides {self.gpus} GPUs"
                best.append(GpuMemory(name, "rollout", 0, problem=problem))
                continue
            best.append(next((fit for fit in tries if not fit.problem), tries[-1]))
        return tuple(best)

    def shared_up_to(self, trainer: Choice) -> int:
        """Tokens of a micro-batch in which siblings share their prompt; 0: they do not."""
        return trainer.rank.max_tokens if self.constraints.trainer_context == 1 else 0

    def case(self, offload: Offload, widths: Sequence[int]) -> Case:
        work, trainer, by_role = self.workload, self.trainer(offload), dict(zip(self.shapes, widths, strict=True))
        speeds = {role: self.speed(role, tp, offload) for role, tp in by_role.items()}
        return Case(
            gpu=self.gpu,
            gpus=self.gpus,
            shape=self.model,
            rollouts=Rollouts(work.expected(self.model, list(speeds)[1:]), by_role, speeds),
            trained_tokens=work.training_work(self.model, self.shared_up_to(trainer)),
            mean_length=work.prompt_length + work.response_length,
            offload=offload,
            checkpointing=trainer.rank.checkpointing,
            micro_tokens=trainer.rank.max_tokens,
            logprob_passes=work.logprob_passes,
            critic=self.constraints.critic,
        )

    def speed(self, role: str, tp: int, offload: Offload) -> ReplicaSpeed:
        shape, context, is_policy = self.shapes[role], self.workload.context(role), role == POLICY
        sequences = max(1, self.engine_memory(role, tp, offload).sequences)
        speed = costs.speed_of(shape, self.gpu, tp, context, sequences, is_policy)
        return speed.with_swap(self.constraints.swap_s)


def _drift(inputs: _Inputs, fastest: Mapping[Mode, tuple[Estimate, Case]]) -> dict[str, float]:
    """Step seconds with responses twice as long. Static keeps the split that was best before."""
    later = replace(inputs, workload=inputs.workload.stretched(2.0))
    drift: dict[str, float] = {}
    for mode, (before, case) in fastest.items():
        longer = later.case(case.offload, list(case.rollouts.widths.values()))
        after = estimate(mode, longer, before.split if mode == "static" else None)
        if after is not None:
            drift[mode] = after.step_s
    return drift


CONTEXT = "--trainer-context"


def _changes(inputs: _Inputs) -> tuple[str, ...]:
    """Single changes after which everything fits."""
    more = [inputs.gpus * factor for factor in (2, 4, 8, 16)]
    tries = [(f"{gpus} GPUs (--gpus)", replace(inputs, gpus=gpus)) for gpus in more]
    bigger = sorted((g for g in costs.GPUS.values() if g.memory_gb > inputs.gpu.memory_gb), key=lambda g: g.memory_gb)
    tries += [(f"{g.memory_gb:.0f} GB of {g.title} (--gpu {g.name})", replace(inputs, gpu=g)) for g in bigger]
    free = replace(inputs.constraints, policy_tp=None, judge_tp=None)
    tries.append(("without --policy-tp and --judge-tp", replace(inputs, constraints=free)))
    for context in (2, 4, 8, 16, 32):
        if context > inputs.constraints.trainer_context:
            shared = replace(inputs.constraints, trainer_context=context)
            tries.append((f"{context} ranks per long sequence ({CONTEXT})", replace(inputs, constraints=shared)))
    half = inputs.workload.max_response_length // 2
    if half >= inputs.workload.response_length:
        shorter = replace(inputs.workload, max_response_length=half)
        tries.append((f"responses cut at {half} (--max-response-length)", replace(inputs, workload=shorter)))
    works = [text for text, other in tries if other.options()]
    least = [next((text for text in works if text.endswith(f"({option})")), "") for option in ("--gpus", CONTEXT)]
    rest = (text for text in works if not text.endswith(("(--gpus)", f"({CONTEXT})")))
    return tuple(text for text in (*least, *rest) if text)
