"""Simulates the rollout phase of a cluster, event by event: real routing and placement code, simulated devices.

    draw ──> policy replica (siblings together) ──> judges (each response alone) ──> keep, or draw another
                     ^                                     ^
                     └──── blocks change their owner ──────┘        rule: gcore/placement/rules.py, at every poll

Prompts are drawn as in a run (controller/collect.py): each controller has its share of the prompts and starts its share
of the missing groups. A rollout ends when enough groups are kept. Groups in progress are then aborted, and start first
in the next step. Devices are empty at the start of every step. The State that goes from step to step is immutable, so
that a step can be repeated under another placement rule, from the same state and with the same draws.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial

from gcore.config.sampling import acceptance_rate
from gcore.emulate.device import DeviceJob, observe
from gcore.placement.forecast import POLL_INTERVAL_S
from gcore.placement.grid import POLICY, Move, Split
from gcore.placement.meters import GroupCounts, SpeedMeter, call_quantiles, quantiles
from gcore.placement.placer import POLL_SHARE
from gcore.placement.rules import LEAST_RATE, ClusterLoad, Load, RoleSpeeds, Rule, with_needed
from gcore.placement.timeline import PlacementTimeline
from gcore.protocols import EngineStats
from gcore.simulate.fleet import Call, Clock, Fleet, SimulatedGroup
from gcore.simulate.scenario import GroupDraw, Scenario, StepWork

SPEED_POLLS = 4  # speeds are measured at every fourth poll only: faster


@dataclass(frozen=True, slots=True)
class PromptCursor:
    """Position of one controller in its prompts. PromptCursor(next_prompt=130, aborted=(2, 66)): 2 and 66 come first"""

    next_prompt: int  # of N controllers, each draws every N-th prompt
    aborted: tuple[int, ...] = ()  # prompts that were aborted in the last step; they are drawn first


@dataclass(frozen=True, slots=True)
class State:
    """What goes from step to step.

    State((PromptCursor(8), PromptCursor(9)), {"policy": (80, 512), "judge": (300,)}, 0.7, 41.5)
    """

    cursors: tuple[PromptCursor, ...]  # per controller
    lengths: Mapping[str, Sequence[float]]  # of requests that ended recently, by role: quantiles
    rate: float = 1.0  # recent share of groups that were kept; controllers also begin with 1
    seconds: float = 0.0  # of the last rollout
    busy: Mapping[str, float] = field(default_factory=dict)  # share of its slot-seconds with a request, by role
    calls: Sequence[Sequence[float]] = ()  # lengths of siblings that ended recently: quantiles
    counts: GroupCounts = field(default_factory=GroupCounts)
    speeds: SpeedMeter = field(default_factory=SpeedMeter)


@dataclass(slots=True)
class SimulatedRollout:
    """The result of one simulated rollout phase."""

    state: State  # for the next step
    timeline: PlacementTimeline
    split: Split  # at the end
    lengths: list[int] = field(default_factory=list)  # of the responses that are trained on
    wasted_tokens: int = 0  # generated for groups that were dropped or aborted
    drawn: int = 0  # groups that were started, including those aborted in the step before

    @property
    def seconds(self) -> float:
        return self.timeline.seconds


def measured_costs(scenario: Scenario, step: int, state: State) -> RoleSpeeds:
    """The scenario's speed of each role; which blocks are slower is measured, as in a run."""
    return replace(scenario.costs(step), relative=state.speeds.relative())


def first_state(scenario: Scenario) -> State:
    """Before the first step: no prompt is drawn, and lengths are the scenario's means with a typical spread."""
    spread = (0.3, 0.5, 0.7, 0.9, 1.2, 2.4) if scenario.responses.sigma else (1.0,) * 6
    lengths = {POLICY: [scenario.responses.start * f for f in spread]}
    for judge in scenario.judges:
        lengths[judge.name] = [judge.verdict.start * f for f in (0.7, 0.9, 1.0, 1.4)]
    return State(tuple(PromptCursor(rank) for rank in range(scenario.num_controllers)), lengths)


def expected_view(scenario: Scenario, state: State) -> ClusterLoad:
    """The view before a step: the last step's lengths, and the number of needed groups."""
    needed = scenario.prompts / max(state.rate, LEAST_RATE) * scenario.samples
    policy = Load(
        waiting=round(needed * scenario.oversampling),
        needed=needed,
        lengths=state.lengths[POLICY],
        longest=[max(call) for call in state.calls],
        prompt=scenario.prompt_length / scenario.samples,
        busy=state.busy.get(POLICY, 0.0),
    )
    loads = {POLICY: policy}
    for judge in scenario.judges:
        loads[judge.name] = Load(
            needed=needed / scenario.samples * state.counts.per_group(judge.name, scenario.samples * judge.repeats),
            lengths=state.lengths[judge.name],
            prompt=(scenario.prompt_length + scenario.read_by_judges(policy.mean)) / judge.repeats,
            busy=state.busy.get(judge.name, 0.0),
        )
    return ClusterLoad(loads, groups=scenario.prompts, rate=state.rate, samples=scenario.samples, calls=state.calls)


class SimulatedController:
    """The prompts of one controller: those to draw and those in progress."""

    def __init__(self, cursor: PromptCursor, size: int) -> None:
        self._aborted, self._next, self._size = deque(cursor.aborted), cursor.next_prompt, size
        self.running: set[int] = set()

    def draw(self) -> int:
        if self._aborted:
            number = self._aborted.popleft()
        else:
            number, self._next = self._next, self._next + self._size
        self.running.add(number)
        return number

    def put_back(self, number: int) -> None:
        """It starts again, before others."""
        self._aborted.append(number)

    def cursor(self) -> PromptCursor:
        """For the next step: prompts in progress are aborted."""
        return PromptCursor(self._next, (*self._aborted, *sorted(self.running)))


class Simulation:
    """Simulates one rollout phase. Does not change the given state."""

    def __init__(self, work: StepWork, split: Split, rule: Rule, state: State) -> None:
        scenario: Scenario = work.scenario
        self.scenario, self.work, self.rule, self.state = scenario, work, rule, state
        self.speeds = deepcopy(state.speeds)
        self.costs = measured_costs(scenario, work.step, state)
        self.grid = self.costs.grid
        self.poll_interval_s = max(POLL_INTERVAL_S, POLL_SHARE * state.seconds)
        self.controllers = [SimulatedController(cursor, len(state.cursors)) for cursor in state.cursors]
        self.clock = Clock()
        loads = expected_view(scenario, state).loads
        self.fleets = {
            role: Fleet(
                role,
                self.grid,
                self.costs.speeds[role],
                loads[role],
                self.clock,
                self._stage_ended,
                controllers=len(state.cursors),
                relative=partial(scenario.replica_speed, role),
            )
            for role in self.grid.roles
        }
        self.policy = self.fleets[POLICY]
        self.longest_response = scenario.responses.longest
        self.kept = self.dropped = self.running = self.judging = 0  # groups
        self._wanted = 0  # groups in progress per controller after the last fill
        self.split = split.check(self.grid.with_trainer() if self.costs.trainer else self.grid)
        self.moving: set[int] = set()
        self.result = SimulatedRollout(state, PlacementTimeline(self.grid, split, self._busy_of, work.step, 0.0), split)
        self._busy_before: dict[str, float] = dict.fromkeys(self.fleets, 0.0)
        self._last_move = -math.inf
        self._polls = 0
        self._stats_before: dict[tuple[str, int], EngineStats] = {}

    def run(self) -> SimulatedRollout:
        self._begin()
        self.clock.run()
        result = self._finish()
        self._break_cycles()
        return result

    def _begin(self) -> None:
        for role, fleet in self.fleets.items():
            for block in self.split.blocks(role):
                self._open(block)
            fleet.open(replica for block in fleet.blocks for replica in fleet.by_block[block])
        self._fill()
        self.clock.at(self.poll_interval_s, self._poll, None)

    # ---- groups ---------------------------------------------------------------------------------------------------

    def _fill(self, fewer: SimulatedController | None = None) -> None:
        """Every controller starts as many groups as its share of the missing ones needs, at the acceptance rate.

        `fewer`: the only controller with fewer groups in progress than after the last fill. The others are filled only
        if the wanted number has grown.
        """
        scenario = self.scenario
        rate = max(self._rate_now(), 1 / scenario.max_oversampling)
        wanted = math.ceil(self._missing() / len(self.controllers) / rate - 1e-9)
        checked = self.controllers if fewer is None or wanted > self._wanted else [fewer]
        self._wanted = wanted
        short = [c for c in checked if len(c.running) < wanted]
        drawn = [controller.draw() for controller in short for _ in range(wanted - len(controller.running))]
        for number in sorted(drawn):
            self._start(number, self.work[number])

    def _missing(self) -> float:
        """Groups that should be in progress if all are accepted."""
        return self.scenario.prompts * self.scenario.oversampling - self.kept

    def _to_keep(self) -> float:
        """Groups that the rule looks ahead."""
        return self.scenario.prompts - self.kept

    def _rate_now(self) -> float:
        return acceptance_rate(self.state.rate, self.kept, self.dropped, self.scenario.prompts)

    def _start(self, number: int, draw: GroupDraw) -> None:
        self.running += 1
        self.result.drawn += 1
        prompt = self.scenario.prompt_length
        jobs = [DeviceJob(tokens, 0) for tokens in draw.tokens]
        jobs[0].prompt = prompt  # siblings share the prefix: it is prefilled once
        work = len(jobs) * (prompt + self.longest_response)
        self.policy.send(Call(SimulatedGroup(number, draw, len(jobs)), jobs, work))

    def _judge(self, group: SimulatedGroup) -> None:
        draw: GroupDraw = group.draw
        judges = [judge for judge in self.scenario.judges if judge.name in draw.verdicts]
        group.unfinished = sum(judge.repeats for judge in judges) * len(draw.tokens)
        prompt = self.scenario.prompt_length
        for judge in judges:
            fleet = self.fleets[judge.name]
            for response, repeats in zip(draw.tokens, draw.verdicts[judge.name], strict=True):
                # once; its other verdicts find it in the prefix cache
                prefill = prompt + round(self.scenario.read_by_judges(response))
                for i, tokens in enumerate(repeats):
                    jobs = [DeviceJob(tokens, 0 if i else prefill)]
                    fleet.send(Call(group, jobs, prefill + judge.verdict.longest))

    def _stage_ended(self, fleet: Fleet, group: SimulatedGroup) -> None:
        self.clock.at(self.clock.now + self.scenario.rpc_s, self._next_stage, (fleet, group))

    def _next_stage(self, ended: tuple[Fleet, SimulatedGroup]) -> None:
        fleet, group = ended
        tokens: list[int] = group.draw.tokens
        if fleet is self.policy:
            fleet.ended_calls.append(tuple(tokens))
            if group.draw.verdicts:
                self.judging += 1
                self._judge(group)
                return
        else:
            self.judging -= 1
        self.running -= 1
        controller = self.controllers[group.number % len(self.controllers)]
        controller.running.discard(group.number)
        if group.draw.good:
            self.kept += 1
            self._keep(group.number, tokens)
        else:
            self.dropped += 1
            self.result.wasted_tokens += sum(tokens)
            self._drop(group.number)
        self._fill(controller)

    def _keep(self, number: int, tokens: list[int]) -> None:
        self.clock.stopped = self.kept >= self.scenario.prompts
        self.result.lengths.extend(tokens)

    def _drop(self, number: int) -> None:
        """A group was not accepted."""

    # ---- placement ------------------------------------------------------------------------------------------------

    def _poll(self, _: None) -> None:
        self._polls += 1
        if self._polls % SPEED_POLLS == 0:
            self._measure_speeds()
        for move in self.rule(self.split, self.view(), self.costs):
            self._move(move)
        self.clock.at(self.clock.now + self.poll_interval_s, self._poll, None)

    def _measure_speeds(self) -> None:
        before, self._stats_before = self._stats_before, {}
        for role, fleet in self.fleets.items():
            polled = []
            for block in fleet.blocks:
                for replica in fleet.by_block[block]:
                    now = EngineStats(replica.running, 0, replica.busy_s, replica.generated)
                    self._stats_before[role, replica.index] = now
                    if (last := before.get((role, replica.index))) is not None:
                        polled.append((block, last, now))
            self.speeds.add(role, polled)

    def counts(self) -> GroupCounts:
        ended = {role: len(fleet.ended_lengths) for role, fleet in self.fleets.items()}
        return self.state.counts.plus(self.kept + self.dropped, self.judging, ended)

    def view(self) -> ClusterLoad:
        """The view that the controllers would have now."""
        groups = self._to_keep() / max(self._rate_now(), LEAST_RATE)  # still to judge
        samples, counts = self.scenario.samples, self.counts()
        work: dict[int, float] = {}
        loads = {role: self._load(fleet, work) for role, fleet in self.fleets.items()}
        per_group = {j.name: counts.per_group(j.name, samples * j.repeats) for j in self.scenario.judges}
        per_group[POLICY] = samples
        loads = with_needed(loads, groups, self.running - self.judging, self.judging, per_group)
        since_s = self.clock.now - self._last_move
        return ClusterLoad(loads, work, frozenset(self.moving), since_s, self.clock.now, rate=self._rate_now())

    def _load(self, fleet: Fleet, work: dict[int, float]) -> Load:
        blocks = fleet.blocks
        requests, running, made, busy_s = observe([fleet.by_block[block] for block in blocks], self.clock.now)
        work.update(zip(blocks, requests, strict=True))
        waiting = fleet.queued + sum(requests) - running
        since, self._busy_before[fleet.name] = busy_s - self._busy_before[fleet.name], busy_s
        busy = since / (len(blocks) * fleet.per_block * self.poll_interval_s) if blocks else 1.0
        age = made / running if running else 0.0
        return replace(fleet.load, running=running, waiting=waiting, age=age, busy=min(1.0, busy))

    def _move(self, move: Move) -> None:
        """Drain by migration, sleep, wake. No role owns the block until the end of the move."""
        now, source = self.clock.now, self.fleets.get(move.source)
        if source is not None:  # None: the trainer
            source.close(source.by_block[move.block])
            source.blocks.remove(move.block)
            self._busy_before[move.source] -= self._busy_of(move.source, move.block) * source.per_block
        self.result.timeline.move_started(move, now)
        self.moving.add(move.block)
        self._last_move = now
        self.split = self.split.after([move])
        if source is not None:
            for replica in source.by_block[move.block]:
                source.evict(replica, self.scenario.prompt_length)
        self.clock.at(now + self._switch_s(move), self._arrive, move)

    def _switch_s(self, move: Move) -> float:
        return self.costs.switch_s(move)

    def _arrive(self, move: Move) -> None:
        self.moving.discard(move.block)
        self.result.timeline.move_ended(move.block, self.clock.now)
        fleet = self.fleets.get(move.target)
        if fleet is None:  # the trainer
            return
        self._open(move.block)
        fleet.open(fleet.by_block[move.block])
        # later: blocks that arrive at the same time share the work
        self.clock.at(self.clock.now, Fleet.dispatch, fleet)

    def _open(self, block: int) -> None:
        fleet, now = self.fleets[self.split[block]], self.clock.now
        insort(fleet.blocks, block)
        for replica in fleet.by_block[block]:
            replica.at = max(replica.at, now)
        self._busy_before[fleet.name] += self._busy_of(fleet.name, block) * fleet.per_block

    def _busy_of(self, role: str, block: int) -> float:
        fleet = self.fleets[role]
        for replica in fleet.by_block[block]:
            fleet.sync(replica)
        return sum(replica.busy_s for replica in fleet.by_block[block]) / fleet.per_block

    # ---- the end --------------------------------------------------------------------------------------------------

    def _finish(self) -> SimulatedRollout:
        result, now, timeline = self.result, self.clock.now, self.result.timeline
        timeline.close(now)
        result.split = self.split
        result.wasted_tokens += self.policy.wasted()
        lengths = {role: quantiles(fleet.ended_lengths) or fleet.load.lengths for role, fleet in self.fleets.items()}
        calls = call_quantiles(self.policy.ended_calls) or self.state.calls
        cursors = tuple(controller.cursor() for controller in self.controllers)
        counts = self.counts().halved()
        shares = {role: busy_s / (now * self.grid.slots) for role, busy_s in timeline.busy_s.items()}
        result.state = State(cursors, lengths, self._rate_now(), now, shares, calls, counts, self.speeds)
        return result

    def _break_cycles(self) -> None:
        """Without reference cycles the simulation is freed by reference counting: no garbage collection is needed."""
        self.clock.events.clear()
        for fleet in self.fleets.values():
            fleet.ended = _after_the_end


def _after_the_end(fleet: Fleet, group: SimulatedGroup) -> None:
    raise AssertionError("the rollout is over")
