"""The seconds of a step under each placement: the forecast that runs use (placement/forecast.py) of its rollout, and
prices of the rest (cost/).

colocated      all generate │ swap │ all judge │ swap │ ... again for rejected groups │ update
static         policy and judge in parallel, streaming; the best split                │ update
dynamic        as a run: blocks move, or stay, or take turns, whichever is fastest    │ update
disaggregated  static on some of the devices, while the others train on the previous step
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from gcore.cost import costs
from gcore.cost.costs import Gpu, Shape
from gcore.cost.replica_speed import ReplicaSpeed
from gcore.cost.training_memory import Offload, TrainingRank, training_memory
from gcore.placement.forecast import Forecast, RolloutTimes, best_static_split, mean_times, poll_interval_s
from gcore.placement.grid import POLICY, DeviceGrid, Split, split_by
from gcore.placement.guard import CANDIDATES, COLOCATED, MOVING, MOVING_RULE, NUM_FORECASTS, STATIC
from gcore.placement.rules import ClusterLoad, MovingRule, RoleSpeeds, Rule, generated_s, judged_s

Mode = Literal["colocated", "static", "dynamic", "disaggregated"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class PlannedRollout:
    """PlannedRollout({"policy": 40, "judge": 24}, RolloutTimes(98.0, 61.0, 0.0, 0.0))"""

    split: Mapping[str, int]  # GPUs per role at its start
    times: RolloutTimes


class Rollouts:
    """Rollouts with the same work and the same replicas. `widths`: GPUs per replica, by role."""

    def __init__(self, view: ClusterLoad, widths: Mapping[str, int], speeds: Mapping[str, ReplicaSpeed]) -> None:
        self.view, self.widths, self.speeds = view, widths, speeds
        self.block = max(widths.values())  # GPUs that change their role together
        self._forecasts: dict[int, list[Forecast]] = {}  # by GPUs
        self._done: dict[tuple[str, int], PlannedRollout] = {}  # by candidate and GPUs

    def has_room(self, gpus: int) -> bool:
        """For all roles at the same time."""
        return gpus >= self.block * len(self.widths)

    def under(self, candidate: str, gpus: int) -> PlannedRollout:
        """`candidate`: as in guard.py, at its best split; moving: at its first one."""
        if (candidate, gpus) not in self._done:
            rule = CANDIDATES[candidate] if len(self.widths) > 1 else None
            self._done[candidate, gpus] = self._mean(gpus, self._split(candidate, self._on(gpus)), rule)
        return self._done[candidate, gpus]

    def _split(self, candidate: str, forecasts: list[Forecast]) -> Split:
        costs = forecasts[0].costs
        if candidate == COLOCATED:
            return Split((POLICY,) * costs.grid.num_blocks)
        if candidate == MOVING:
            return MOVING_RULE.begin(self.view, costs)
        first = MovingRule(patience=math.inf).begin(self.view, costs)
        _, near = best_static_split(forecasts[:1], first, max(1, costs.grid.num_blocks // 8))  # one: faster
        return best_static_split(forecasts, near, 1)[1]

    def with_split(self, split: Mapping[str, int]) -> PlannedRollout:
        """Without moves. `split`: GPUs per role."""
        gpus = sum(split.values())
        blocks = {role: split[role] // self.block for role in self.widths}
        return self._mean(gpus, split_by(DeviceGrid(gpus, self.widths), blocks), None)

    def _on(self, gpus: int) -> list[Forecast]:
        if gpus not in self._forecasts:
            costs = RoleSpeeds(DeviceGrid(gpus, self.widths), self.speeds)
            self._forecasts[gpus] = [Forecast(self.view, costs, seed) for seed in range(NUM_FORECASTS)]
        return self._forecasts[gpus]

    def _mean(self, gpus: int, split: Split, rule: Rule | None) -> PlannedRollout:
        times = mean_times(self._on(gpus), split, rule, poll_interval_s(self._in_turns_s(gpus)))
        return PlannedRollout({role: self.block * len(split.blocks(role)) for role in self.widths}, times)

    def _in_turns_s(self, gpus: int) -> float:
        """About the seconds of a rollout in which all GPUs generate, then judge."""
        loads, judges = self.view.loads, [role for role in self.widths if role != POLICY]
        judging = sum(self.widths[role] * judged_s(loads[role], self.speeds[role]) for role in judges)
        return generated_s(loads[POLICY], self.speeds[POLICY], gpus / self.widths[POLICY]) + judging / gpus


@dataclass(frozen=True)
class Case:
    """A cluster, its roles and the work of a step: the input of `estimate`."""

    gpu: Gpu
    gpus: int
    shape: Shape  # of the policy
    rollouts: Rollouts
    trained_tokens: float
    mean_length: float  # tokens per training sample: prompt and response
    offload: Offload = "none"  # what of the trainer is in host memory while engines work
    checkpointing: bool = True
    micro_tokens: int = 16384
    logprob_passes: int = 0
    critic: bool = False  # a second network of the policy's size is trained, after a pass for its values

    def weights_s(self) -> float:
        tp = self.rollouts.widths[POLICY]
        return costs.ENGINE.wake_s + costs.weight_sync_s(self.shape, self.gpu, tp, self.gpus)

    def update(self, gpus: int) -> dict[str, float]:
        """Seconds of preparation and training on `gpus`."""
        tokens, context = self.trained_tokens, self.mean_length / 2
        pass_s = costs.logprob_s(self.shape, self.gpu, gpus, tokens, context, self.micro_tokens)
        update_s = costs.training_s(self.shape, self.gpu, gpus, tokens, context, self.micro_tokens, self.checkpointing)
        return {
            "preparation": (self.logprob_passes + self.critic) * pass_s,
            "training": (1 + self.critic) * update_s,
        }

    def between_s(self) -> float:
        """Seconds to put engines to sleep before the update, and to move what is off-loaded to host memory and back."""
        bytes_moved = {"none": 0, "optimizer": 8, "all": 12}[self.offload] * self.shape.parameters / self.gpus
        bytes_moved *= 1 + self.critic
        return costs.ENGINE.sleep_s + self.gpu.host_s(2 * bytes_moved)

    def judges_wake_s(self) -> float:
        """Judges wake during the weight update of the policy: the seconds that they need in addition."""
        speeds = self.rollouts.speeds
        wakes = [speeds[POLICY].sleep_s + speed.wake_s for role, speed in speeds.items() if role != POLICY]
        return max(0.0, max(wakes, default=0.0) - self.weights_s())


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
    notes: tuple[str, ...] = ()


def estimate(mode: Mode, case: Case, split: Mapping[str, int] | None = None) -> Estimate | None:
    """A step under `mode`; None: too few devices for it. `split`: the split of static, which is searched otherwise."""
    if case.gpus % case.rollouts.block or (mode != "colocated" and not case.rollouts.has_room(case.gpus)):
        return None
    match mode:
        case "colocated":
            return colocated(case)
        case "static":
            rollout = case.rollouts.with_split(split) if split else case.rollouts.under(STATIC, case.gpus)
            return _with_update("static", case, rollout)
        case "dynamic":
            return _dynamic(case)
        case "disaggregated":
            return _disaggregated(case)


def colocated(case: Case) -> Estimate:
    rollout, roles = case.rollouts.under(COLOCATED, case.gpus), case.rollouts.widths
    rounds = round((rollout.times.turns + 1) / len(roles))
    notes = (f"{rounds} rounds of generating and judging",) if rounds > 1 and len(roles) > 1 else ()
    return replace(_with_update("colocated", case, rollout, notes), split=dict.fromkeys(roles, case.gpus))


def _dynamic(case: Case) -> Estimate:
    """The fastest of what the guard of a run chooses from (placement/guard.py)."""
    notes = {
        MOVING: "GPUs change their role during the rollout; split at its start",
        STATIC: "changing roles within a step does not pay here: the split follows drift",
        COLOCATED: "all GPUs generate, then all judge: other placements are slower here",
    }
    rollouts = {candidate: case.rollouts.under(candidate, case.gpus) for candidate in notes}
    fastest = min(rollouts, key=lambda candidate: rollouts[candidate].times.seconds)
    return _with_update("dynamic", case, rollouts[fastest], (notes[fastest],) if len(case.rollouts.widths) > 1 else ())


def _disaggregated(case: Case) -> Estimate | None:
    """The trainer has its own devices and trains on the previous step: samples are one policy version old. A critic is
    on the trainer's devices, or has a part of them for itself (placement.critic.ranks), whichever is faster.

    With more GPUs for the trainer, the update takes less time and the rollout more: the best number is where both take
    the same."""
    block, per_node = case.rollouts.block, case.gpu.per_node
    unit = math.lcm(block, per_node) if case.gpus >= 2 * per_node else block
    numbers = range(unit, case.gpus, unit * max(1, case.gpus // unit // 32))
    layouts = {n: list(training_layouts(case, n)) for n in numbers if case.rollouts.has_room(case.gpus - n)}
    fastest = {n: min(ways, key=lambda way: sum(way[1].values())) for n, ways in layouts.items() if ways}
    possible = list(fastest)

    def is_slower(trainer: int) -> bool:
        return case.rollouts.under(STATIC, case.gpus - trainer).times.seconds >= sum(fastest[trainer][1].values())

    first = bisect_left(possible, True, key=is_slower)  # with which the rollout takes longer than the update
    estimates = []
    for trainer in possible[max(0, first - 1) : first + 1]:
        rollout, (trained_on, update) = case.rollouts.under(STATIC, case.gpus - trainer), fastest[trainer]
        rollout_s = rollout.times.seconds
        stages = {**_stages(rollout.times), **update, "weights": case.weights_s()}
        step_s = max(rollout_s, sum(update.values())) + case.weights_s()
        notes = ("training runs in parallel with the next rollout: samples are one version old",)
        split = {**rollout.split, **trained_on}
        estimates.append(Estimate("disaggregated", split, case.rollouts.widths, stages, step_s, rollout_s, notes))
    return min(estimates, key=lambda each: each.step_s, default=None)


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


def _trainer_fits(case: Case, gpus: int) -> bool:
    """On GPUs of its own, with activation checkpointing."""
    rank = TrainingRank(
        case.shape,
        shard=gpus,
        max_tokens=case.micro_tokens,
        checkpointing=True,
        critic=case.shape if case.critic else None,
    )
    needed = max(sum(parts.values()) for parts in training_memory(rank).gpu.values())
    return needed <= case.gpu.memory_gb * costs.GB * costs.MEMORY_FRACTION


def _stages(times: RolloutTimes) -> dict[str, float]:
    rest = times.seconds - times.generating_s - times.switching_s
    return {"generation": times.generating_s, "rewarding": rest, "swaps": times.switching_s}


def _with_update(mode: Mode, case: Case, rollout: PlannedRollout, notes: tuple[str, ...] = ()) -> Estimate:
    """A step whose update phase is on all devices."""
    split, times = rollout.split, rollout.times
    stages = {**_stages(times), **case.update(case.gpus), "weights": case.weights_s()}
    stages["swaps"] += case.between_s() + (0.0 if mode == "colocated" else case.judges_wake_s())
    return Estimate(mode, split, case.rollouts.widths, stages, sum(stages.values()), times.seconds, notes)
