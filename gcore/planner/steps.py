"""Estimates the seconds of a step under each placement, by closed formulas: a fluid of requests, then a tail.

    colocated      all generate │ swap │ all judge │ swap │ ... again for rejected groups │ update
    static         policy and judge in parallel, streaming; the best split        │ update
    dynamic        as static, and a device whose replica has drained changes role │ update
    disaggregated  static on some of the devices, while the others train on the previous step

The times of the roles come from roles.py. Co-location and static splits are estimates. Dynamic is a lower bound: it
assumes that no device is idle while there is work (gcore/simulate/cluster.py simulates the real rule). `estimate` is
the only entry point, so that a simulator can replace it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Literal, get_args

import numpy as np

from gcore.cost import costs
from gcore.cost.costs import Gpu
from gcore.cost.training_memory import Offload, TrainingRank, training_memory
from gcore.planner.roles import Role

Mode = Literal["colocated", "static", "dynamic", "disaggregated"]
MODES: tuple[Mode, ...] = get_args(Mode)
MARGINS = (1.0, 1.1, 1.25, 1.5)  # groups started in a round / groups expected to be needed
ENOUGH = 0.5  # fewer missing groups than this count as none
POLICY = "policy"


@dataclass(frozen=True)
class Case:
    """A cluster, its roles and the work of a step: the input of `estimate`. The first role is the policy."""

    gpu: Gpu
    gpus: int
    roles: tuple[Role, ...]
    prompts: int
    trained_tokens: float
    mean_length: float  # tokens per training sample: prompt and response
    acceptance: float = 1.0
    offload: Offload = "none"  # what of the trainer is in host memory while engines work
    checkpointing: bool = True
    micro_tokens: int = 16384
    logprob_passes: int = 0
    critic: bool = False  # a second network of the policy's size is trained, after a pass for its values
    swap_s: float | None = None  # replaces the estimate

    @property
    def policy(self) -> Role:
        return self.roles[0]

    @property
    def judges(self) -> tuple[Role, ...]:
        return self.roles[1:]

    @property
    def block(self) -> int:
        """GPUs that change their role together: as many as the widest replica spans."""
        return max(role.tp for role in self.roles)

    @property
    def draws(self) -> float:
        """Prompts drawn per step with streaming: a rejected group is replaced at once."""
        return self.prompts / self.acceptance

    def into_s(self, judge: Role) -> float:
        """Seconds to put the awake engine to sleep and wake a judge."""
        return self.swap_s if self.swap_s is not None else costs.swap_s(judge.shape, self.gpu, judge.tp)

    def weights_s(self, trainer_gpus: int) -> float:
        policy = self.policy
        return costs.ENGINE.wake_s + costs.weight_sync_s(policy.shape, self.gpu, policy.tp, trainer_gpus)

    def update(self, gpus: int) -> dict[str, float]:
        """Seconds of preparation and training on `gpus`."""
        shape, tokens, context = self.policy.shape, self.trained_tokens, self.mean_length / 2
        pass_s = costs.logprob_s(shape, self.gpu, gpus, tokens, context, self.micro_tokens)
        update_s = costs.training_s(shape, self.gpu, gpus, tokens, context, self.micro_tokens, self.checkpointing)
        return {
            "preparation": (self.logprob_passes + self.critic) * pass_s,
            "training": (1 + self.critic) * update_s,
        }

    def between_s(self) -> float:
        """Seconds to put engines to sleep before the update, and to move what is off-loaded to host memory and back."""
        bytes_moved = {"none": 0, "optimizer": 8, "all": 12}[self.offload] * self.policy.shape.parameters / self.gpus
        bytes_moved *= 1 + self.critic
        return costs.sleep_s() + costs.offload_s(bytes_moved, self.gpu)


@dataclass(frozen=True)
class Estimate:
    """Estimate("static", {"policy": 40, "judge": 24}, {"policy": 2, "judge": 4}, {"generation": 61.0, ...}, 98.0, 70.0)

    The stages add up to the step, except where training runs in parallel with the rollout (disaggregated).
    """

    mode: Mode
    split: Mapping[str, int]  # GPUs per role
    tp: Mapping[str, int]
    stages: Mapping[str, float]
    step_s: float
    rollout_s: float
    notes: tuple[str, ...] = field(default=())


def estimate(mode: Mode, case: Case, split: Mapping[str, int] | None = None) -> Estimate | None:
    """A step under `mode`; None: too few devices for it. `split`: the split of static, which is searched otherwise."""
    estimators: dict[Mode, Callable[[Case, Mapping[str, int] | None], Estimate | None]] = {
        "colocated": _colocated,
        "static": _static,
        "dynamic": _dynamic,
        "disaggregated": _disaggregated,
    }
    return None if case.gpus % case.block else estimators[mode](case, split)


def missing_after(wanted: float, acceptance: float, margin: float) -> float:
    """Expected number of missing groups, with binomial noise, if `margin` times the mean need was drawn."""
    spread = math.sqrt(margin * wanted * (1 - acceptance))
    if spread == 0:
        return 0.0
    z, normal = (margin - 1) * wanted / spread, NormalDist()
    return spread * (normal.pdf(z) - z * (1 - normal.cdf(z)))


def _rounds(case: Case, margin: float) -> list[float]:
    """Prompts drawn per round, if the number of missing groups is known only at the end of a round."""
    rounds: list[float] = []
    missing = float(case.prompts)
    while missing > ENOUGH and len(rounds) < 10:
        rounds.append(margin * missing / case.acceptance)
        missing = missing_after(missing, case.acceptance, margin)
    return rounds


def _colocated(case: Case, split: Mapping[str, int] | None = None) -> Estimate:
    everything = {role.name: case.gpus for role in case.roles}

    def with_margin(margin: float) -> tuple[float, dict[str, float], int]:
        rounds = _rounds(case, margin)
        generation = sum(case.policy.span(case.gpus, draws).total_s for draws in rounds)
        rewarding = sum(judge.span(case.gpus, draws).total_s for judge in case.judges for draws in rounds)
        swaps = len(rounds) * sum(case.into_s(judge) for judge in case.judges)
        back_s = case.swap_s if case.swap_s is not None else costs.sleep_s() + case.weights_s(case.gpus)
        swaps += (len(rounds) - 1) * back_s if case.judges else 0.0
        stages = {"generation": generation, "rewarding": rewarding, "swaps": swaps}
        return sum(stages.values()), stages, len(rounds)

    margins = MARGINS if case.acceptance < 1 else (1.0,)
    rollout_s, stages, num = min((with_margin(margin) for margin in margins), key=lambda found: found[0])
    notes = (f"{num} rounds of generating and judging",) if num > 1 else ()
    return _finish("colocated", case, everything, stages, rollout_s, case.between_s(), notes)


def _static(case: Case, split: Mapping[str, int] | None = None) -> Estimate | None:
    if split is None:
        split = _best_split(case, case.gpus)
    if split is None:
        return None
    generation, rollout_s = _streaming(case, split)
    stages = {"generation": generation, "rewarding": rollout_s - generation, "swaps": 0.0}
    return _finish("static", case, split, stages, rollout_s, case.between_s() + _judges_wake_s(case))


def _dynamic(case: Case, split: Mapping[str, int] | None = None) -> Estimate | None:
    """Work-conserving: a policy replica that has drained becomes a judge. Each change of role costs a swap.

    The policy may start with more devices than under a fixed split, since it gives them back later. If changing roles
    does not pay, the static split stays.
    """
    static = _static(case)
    if static is None or not case.judges:
        return static and _copy_as(static, "dynamic")
    judging = sum(judge.device_s(static.split[judge.name], case.draws) for judge in case.judges)
    swap_s = max(case.into_s(judge) for judge in case.judges)
    ends = max(judge.tail_s for judge in case.judges)
    best: tuple[float, float, int] | None = None
    for gpus in range(case.block, case.gpus + 1, case.block):
        span = case.policy.span(gpus, case.draws)
        times, done = case.policy.arrivals(gpus, case.draws)
        remaining = gpus * (np.maximum(0.0, span.own_s - times) + swap_s) + judging * (1 - done)  # GPU-seconds
        generation = span.total_s + _late_s(case)
        rollout_s = max(generation + _verdict_s(case), float(np.max(times + remaining / case.gpus)) + ends)
        if best is None or rollout_s < best[0]:
            best = rollout_s, generation, gpus
    assert best is not None
    rollout_s, generation, gpus = best
    if rollout_s >= static.rollout_s:
        return _copy_as(static, "dynamic", ("changing roles within a step does not pay here: the split follows drift",))
    begin = {POLICY: gpus, **_shared_out(case, case.gpus - gpus, static.split)}
    stages = {"generation": generation, "rewarding": rollout_s - generation, "swaps": 0.0}
    notes = (
        "a bound: drained policy replicas become judges, no GPU is idle while there is work; split at the step's start",
    )
    return _finish("dynamic", case, begin, stages, rollout_s, case.between_s() + _judges_wake_s(case), notes)


def _disaggregated(case: Case, split: Mapping[str, int] | None = None) -> Estimate | None:
    """The trainer has its own devices and trains on the previous step: samples are one policy version old. A critic is
    on the trainer's devices, or has a part of them for itself (placement.critic.ranks), whichever is faster."""
    unit = math.lcm(case.block, case.gpu.per_node) if case.gpus >= 2 * case.gpu.per_node else case.block
    best: Estimate | None = None
    stride = unit * max(1, case.gpus // unit // 32)
    for trainer in range(stride, case.gpus, stride):
        fastest = min(training_layouts(case, trainer), key=lambda layout: sum(layout[1].values()), default=None)
        found = _best_split(case, case.gpus - trainer)
        if fastest is None or found is None:
            continue
        generation, rollout_s = _streaming(case, found)
        (trained_on, update), weights_s = fastest, case.weights_s(case.gpus)
        stages = {
            "generation": generation,
            "rewarding": rollout_s - generation,
            "swaps": 0.0,
            **update,
            "weights": weights_s,
        }
        step_s = max(rollout_s, sum(update.values())) + weights_s
        if best is None or step_s < best.step_s:
            notes = ("training runs in parallel with the next rollout: samples are one version old",)
            split = {**found, **trained_on}
            best = Estimate("disaggregated", split, _widths(case), stages, step_s, rollout_s, notes)
    return best


def training_layouts(case: Case, gpus: int) -> Iterator[tuple[dict[str, int], dict[str, float]]]:
    """Ways to train on `gpus` that fit: GPUs of trainer and critic, and seconds of preparation and training."""
    if _trainer_fits(case, gpus):
        yield {"trainer": gpus}, case.update(gpus)
    if not case.critic:
        return
    policy, critic = replace(case, critic=False), replace(case, critic=False, logprob_passes=1)
    unit = case.gpu.per_node if gpus > case.gpu.per_node else 1
    for own in range(unit, gpus, unit):
        if _trainer_fits(policy, gpus - own) and _trainer_fits(critic, own):
            both = policy.update(gpus - own), critic.update(own)  # at the same time
            yield {"trainer": gpus - own, "critic": own}, {name: max(part[name] for part in both) for name in both[0]}


def _finish(
    mode: Mode,
    case: Case,
    split: Mapping[str, int],
    stages: Mapping[str, float],
    rollout_s: float,
    moving_s: float,
    notes: tuple[str, ...] = (),
) -> Estimate:
    """Add the update phase, on all devices, to a rollout."""
    whole = {**stages, **case.update(case.gpus), "weights": case.weights_s(case.gpus)}
    whole["swaps"] += moving_s
    return Estimate(mode, dict(split), _widths(case), whole, sum(whole.values()), rollout_s, notes)


def _copy_as(other: Estimate, mode: Mode, notes: tuple[str, ...] = ()) -> Estimate:
    return Estimate(mode, other.split, other.tp, other.stages, other.step_s, other.rollout_s, notes)


def _shared_out(case: Case, gpus: int, like: Mapping[str, int]) -> dict[str, int]:
    """`gpus` among the judges in proportion to another split, in whole blocks; the first judges get the remainder."""
    whole, blocks = sum(like[judge.name] for judge in case.judges), gpus // case.block
    shares = {judge.name: blocks * like[judge.name] // whole for judge in case.judges}
    for judge in case.judges[: blocks - sum(shares.values())]:
        shares[judge.name] += 1
    return {name: case.block * share for name, share in shares.items()}


def _widths(case: Case) -> dict[str, int]:
    return {role.name: role.tp for role in case.roles}


def _trainer_fits(case: Case, gpus: int) -> bool:
    """On GPUs of its own, with activation checkpointing."""
    shape = case.policy.shape
    rank = TrainingRank(
        shape, shard=gpus, max_tokens=case.micro_tokens, checkpointing=True, critic=shape if case.critic else None
    )
    needed = max(sum(parts.values()) for parts in training_memory(rank).gpu.values())
    return needed <= case.gpu.memory_gb * costs.GB * costs.MEMORY_FRACTION


# ---- streaming ---------------------------------------------------------------------------------------------


def _ends(case: Case, split: Mapping[str, int]) -> dict[str, float]:
    """When each role would be done if the other roles were never the bottleneck.

    For a judge: the maximum, over all times t, of t plus the work that arrives after t. Before t it may have been idle.
    """
    gpus = split[POLICY]
    times, done = case.policy.arrivals(gpus, case.draws)
    ends = {POLICY: case.policy.span(gpus, case.draws).total_s + _late_s(case) + _verdict_s(case)}
    for judge in case.judges:
        work_s = judge.device_s(split[judge.name], case.draws) / split[judge.name]
        ends[judge.name] = float(np.max(times + work_s * (1 - done))) + judge.tail_s
    return ends


def _streaming(case: Case, split: Mapping[str, int]) -> tuple[float, float]:
    """Seconds until the last response, and until the last verdict."""
    ends = _ends(case, split)
    return ends[POLICY] - _verdict_s(case), max(ends.values())


def _late_s(case: Case) -> float:
    """Extra seconds for late rejections: the time of one group. Earlier ones are replaced while other groups run."""
    return case.policy.latency_s() if len(_rounds(case, 1.0)) > 1 else 0.0


def _verdict_s(case: Case) -> float:
    """Seconds from the last response to the last verdict: one group alone."""
    return max((judge.latency_s() for judge in case.judges), default=0.0)


def _judges_wake_s(case: Case) -> float:
    """Judges wake during the weight update of the policy: the seconds that they need in addition."""
    wakes = [case.into_s(judge) for judge in case.judges]
    return max(0.0, max(wakes, default=0.0) - case.weights_s(case.gpus))


def _best_split(case: Case, gpus: int) -> dict[str, int] | None:
    """Greedy: give each block to the role that would be done last. This is optimal, since more devices never harm.

    In clusters of more than 64 blocks, several blocks are given at a time at first: at most 1/64 of the remaining ones.
    """
    block, left = case.block, gpus // case.block - len(case.roles)
    if left < 0:
        return None
    split = {role.name: block for role in case.roles}
    while left:
        ends, given = _ends(case, split), max(1, left // 64)
        split[max(ends, key=lambda name: ends[name])] += given * block
        left -= given
    return split
