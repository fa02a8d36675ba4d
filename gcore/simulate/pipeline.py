"""Simulates a run with asynchronous rollout: engines go on while the trainer works on blocks of its own.

    groups ──kept──> ready ──a batch──> update on the trainer's blocks ──weights, WAVES parts──> version + 1, next step

As controller/collect.py does it: at most prompts x (1 + staleness) groups are in progress or ready, a step takes the
oldest ready groups, and waits for groups in progress that may be trained on only now. No group is aborted. The trainer
needs all its blocks (its home) for an update; between two updates the rule may lend them to engines. Weights reach one
part of the policy's replicas after the other, between two tokens, so generation never stops as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gcore.placement.forecast import POLL_INTERVAL_S
from gcore.placement.grid import POLICY, TRAINER, Move, Split, shares
from gcore.placement.meters import GroupCounts, call_quantiles, quantiles
from gcore.placement.placer import POLL_SHARE
from gcore.placement.rules import LEAST_RATE, ClusterLoad, Rule, TrainerLoad
from gcore.simulate.cluster import (
    SPEED_POLLS,
    SimulatedController,
    Simulation,
    State,
    expected_view,
    first_state,
    measured_costs,
)
from gcore.simulate.scenario import WAVES, GroupDraw, Scenario, StepWork

STUCK_S = 1e9  # simulated seconds of a step: the rule gives a role no block


@dataclass(slots=True)
class SimulatedStep:
    """One step: from the version before to its own."""

    step: int
    began: float
    seconds: float
    updating_s: float  # of the trainer, with the weights
    lengths: list[int]  # of the responses that are trained on
    staleness: Counter[int]  # versions behind -> groups
    busy: dict[str, float]  # slot-seconds per role
    owned: dict[str, float]
    moves: int
    wasted_tokens: int


@dataclass(slots=True)
class _Totals:
    """Since the beginning of the run."""

    busy: dict[str, float] = field(default_factory=dict)
    owned: dict[str, float] = field(default_factory=dict)
    moves: int = 0
    wasted: int = 0


class Pipeline(Simulation):
    """Simulates all steps of a run."""

    def __init__(self, scenario: Scenario, rule: Rule, ended: Callable[[int], None] = lambda _: None) -> None:
        """`ended` is called after every step."""
        state = first_state(scenario)
        costs = measured_costs(scenario, 1, state)
        first = shares(costs.grid.with_trainer())
        view = replace(expected_view(scenario, state), trainer=_trainer_load(scenario, first, state.rate))
        split = rule.begin(view, costs, first, None)
        self.home = frozenset(split.blocks(TRAINER))
        self.updating_since: float | None = None
        self._updated_s = dict.fromkeys(range(costs.grid.num_blocks), 0.0)
        super().__init__(StepWork(scenario, 1), split, rule, state)
        self.version = 0  # that the engines have
        self.taken = False  # the batch of the next version is chosen; its update waits, runs, or sends weights
        self.ready: list[tuple[int, int, list[int]]] = []  # version at the start of the group, its number, lengths
        self.batch: list[tuple[int, int, list[int]]] = []
        self.started: dict[int, int] = {}  # group in progress -> version at its start
        self.running_of: Counter[int] = Counter()  # version -> groups in progress
        self.steps: list[SimulatedStep] = []
        self._step_ended = ended
        self._works: dict[int, StepWork] = {}
        self.relative: dict[int, float] = {}  # group that would be accepted -> its length / mean of its step
        self.trained: list[int] = []  # groups
        self._home_free = self._began = 0.0
        self._decided, self._ended = 0, Counter[str]()
        self._before = _Totals(owned={})

    def run_all(self) -> list[SimulatedStep]:
        self._begin()
        self.clock.run()
        self.result.timeline.close(self.clock.now)
        self._break_cycles()
        return self.steps

    @property
    def bias(self) -> float:
        """Mean relative length of the trained groups against that of all that would be accepted. Those that are still
        in progress at the end are longer than others: a short run has some bias."""
        trained = [self.relative[number] for number in self.trained]
        return (sum(trained) / len(trained)) / (sum(self.relative.values()) / len(self.relative))

    # ---- groups ---------------------------------------------------------------------------------------------------

    def _missing(self) -> float:
        scenario = self.scenario
        ahead = scenario.staleness if self.taken else 1 + scenario.staleness
        ahead = min(ahead, scenario.steps - self.version - self.taken)  # nothing is generated for steps after the last
        return scenario.prompts * (ahead + (scenario.oversampling - 1 if ahead else 0)) - len(self.ready)

    def _to_keep(self) -> float:
        return max(float(self.scenario.prompts), self._missing())

    def _fill(self, fewer: SimulatedController | None = None) -> None:
        """A group has the lengths of the step that will train on it: so every staleness has the same work."""
        ahead = len(self.ready) + self.running * self._rate_now()
        step = self.version + self.taken + 1 + int(ahead / self.scenario.prompts)
        self.work = self._work_of(min(step, self.scenario.steps))
        super()._fill(fewer)

    def _work_of(self, step: int) -> StepWork:
        if step not in self._works:
            self._works[step] = StepWork(self.scenario, step)
        return self._works[step]

    def _start(self, number: int, draw: GroupDraw) -> None:
        self.started[number] = self.version
        self.running_of[self.version] += 1
        if draw.good:
            self.relative.setdefault(number, sum(draw.tokens) / len(draw.tokens) / self.work.mean)
        super()._start(number, draw)

    def _keep(self, number: int, tokens: list[int]) -> None:
        version = self._decide(number)
        self.ready.append((version, number, tokens))
        self._take_batch()

    def _drop(self, number: int) -> None:
        self._decide(number)
        self._take_batch()

    def _decide(self, number: int) -> int:
        version = self.started.pop(number)
        self.running_of[version] -= 1
        self._decided += 1
        return version

    @property
    def _due(self) -> int:
        """Groups of this version or an older one can be trained on only in the next step."""
        return self.version - self.scenario.staleness

    def _take_batch(self) -> None:
        """If the next step has enough groups, and waits for none in progress."""
        due = self._due
        if self.taken or len(self.ready) < self.scenario.prompts:
            return
        if any(count and version <= due for version, count in self.running_of.items()):
            return
        self.ready.sort()
        self.batch, rest = self.ready[: self.scenario.prompts], self.ready[self.scenario.prompts :]
        self.ready = [group for group in rest if group[0] > due]
        self.taken = True
        for version, number, lengths in rest:
            if version <= due:  # too old for the next step: it starts again
                self.result.wasted_tokens += sum(lengths)
                self.controllers[number % len(self.controllers)].put_back(number)
        self._update()

    # ---- the trainer ----------------------------------------------------------------------------------------------

    def _update(self) -> None:
        """Begin the update, once the trainer has all its blocks."""
        lent = [b for b in self.home if self.split[b] != TRAINER or b in self.moving]
        if lent:
            if any(block not in self.moving for block in lent):
                self._apply(self.rule(self.split, self.view(), self.costs))
            return
        if self.updating_since is not None:
            return
        now, lengths = self.clock.now, [n for _, _, group in self.batch for n in group]
        self.updating_since = start = max(now, self._home_free)
        seconds = self.scenario.training_s(lengths, len(self.home) * self.grid.slots_per_block)
        self.clock.at(start + seconds, self._send_weights, 0)

    def _send_weights(self, wave: int) -> None:
        """To one part of the policy's replicas; then to the next."""
        weights_s, now = self.costs.speeds[POLICY].weights_s, self.clock.now
        if wave == WAVES:
            self._next_step()
            return
        replicas = [replica for block in self.policy.blocks for replica in self.policy.by_block[block]]
        for replica in replicas[wave::WAVES]:
            self.policy.pause(replica, weights_s)
        self.clock.at(now + weights_s, self._send_weights, wave + 1)

    def _next_step(self) -> None:
        now, scenario = self.clock.now, self.scenario
        assert self.updating_since is not None
        for block in self.home:
            self._updated_s[block] += now - self.updating_since
        step = self.version = self.version + 1
        lengths = [n for _, _, group in self.batch for n in group]
        staleness = Counter(step - 1 - version for version, _, _ in self.batch)
        assert max(staleness) <= scenario.staleness, staleness
        self.trained += [number for _, number, _ in self.batch]
        updating_s, self.updating_since = now - self.updating_since, None
        self._record(step, now, updating_s, lengths, staleness)
        self.taken, self.batch = False, []
        if step == scenario.steps:
            self.clock.stopped = True
            return
        self._learn(now)
        expected = replace(expected_view(scenario, self.state), trainer=self.view().trainer)
        target = self.rule.begin(expected, self.costs, self.split, self.steps[-1].seconds)
        self._apply([
            Move(block, self.split[block], target[block], "split of the next step")
            for block in range(self.grid.num_blocks)
            if self.split[block] != target[block] and block not in self.moving
        ])  # fmt: skip
        home = frozenset(self.split.blocks(TRAINER))
        if home != self.home:
            assert self.costs.trainer is not None
            self.home, self._home_free = home, now + self.costs.trainer.move_s
        self._fill()
        self._take_batch()

    def _learn(self, now: float) -> None:
        """What the rule and the replicas know from the last step."""
        scenario, step, busy = self.scenario, self.version + 1, self.steps[-1].busy
        seconds = self.steps[-1].seconds
        for role, fleet in self.fleets.items():
            self._ended[role] += len(fleet.ended_lengths)
        lengths = {role: quantiles(fleet.ended_lengths) or fleet.load.lengths for role, fleet in self.fleets.items()}
        calls = call_quantiles(self.policy.ended_calls) or self.state.calls
        shares_ = {role: busy_s / (seconds * self.grid.slots) for role, busy_s in busy.items() if role != TRAINER}
        rate = self._rate_now()
        for fleet in self.fleets.values():
            fleet.ended_lengths.clear()
            fleet.ended_calls.clear()
        counts = GroupCounts().plus(self._decided, self.judging, self._ended)
        self.state = State(self.state.cursors, lengths, rate, seconds, shares_, calls, counts, self.speeds)
        self.kept = self.dropped = 0
        self.costs = measured_costs(scenario, step, self.state)
        loads = expected_view(scenario, self.state).loads
        for role, fleet in self.fleets.items():
            fleet.expect(loads[role], self.costs.speeds[role])
            fleet.retime(self.costs.speeds[role])
        self.poll_interval_s = max(POLL_INTERVAL_S, POLL_SHARE * seconds)

    def counts(self) -> GroupCounts:
        ended = {role: self._ended[role] + len(fleet.ended_lengths) for role, fleet in self.fleets.items()}
        return GroupCounts().plus(self._decided, self.judging, ended)

    # ---- placement ------------------------------------------------------------------------------------------------

    def _poll(self, _: None) -> None:
        assert self.clock.now - self._began < STUCK_S, f"step {self.version + 1} never ends: {self.split}"
        self._polls += 1
        if self._polls % SPEED_POLLS == 0:
            self._measure_speeds()
        self._apply(self.rule(self.split, self.view(), self.costs))
        self.clock.at(self.clock.now + self.poll_interval_s, self._poll, None)

    def _apply(self, moves: list[Move]) -> None:
        for move in moves:
            self._move(move)

    def _arrive(self, move: Move) -> None:
        super()._arrive(move)
        if self.taken and move.target == TRAINER:
            self._update()

    def _switch_s(self, move: Move) -> float:
        return self.costs.switch_s(move, len(self.home))

    def view(self) -> ClusterLoad:
        view = super().view()
        trainer = TrainerLoad(
            self.home,
            updating=self.updating_since is not None,
            ready=self.taken and self.updating_since is None,
            missing=max(0.0, self.scenario.prompts - len(self.ready)),
            due=sum(count for version, count in self.running_of.items() if version <= self._due),
            running=_most_running(self.scenario, self._rate_now()),
            waited_s=self.clock.now - self._began,
        )
        return replace(view, trainer=trainer, groups=self.scenario.prompts, samples=self.scenario.samples)

    def _busy_of(self, role: str, block: int) -> float:
        if role != TRAINER:
            return super()._busy_of(role, block)
        since = self.updating_since
        now_s = self.clock.now - since if since is not None and block in self.home else 0.0
        return self._updated_s[block] + max(0.0, now_s)

    def _record(self, step: int, now: float, updating_s: float, lengths: list[int], staleness: Counter[int]) -> None:
        timeline, spb, before = self.result.timeline, self.grid.slots_per_block, self._before
        busy = {
            role: spb * sum(self._busy_of(role, block) for block in range(self.grid.num_blocks))
            for role in (*self.fleets, TRAINER)
        }
        owned = dict(timeline.owned_s)
        for role, seconds in timeline.owned_until(now).items():
            owned[role] = owned.get(role, 0.0) + seconds
        row = SimulatedStep(
            step,
            self._began,
            now - self._began,
            updating_s,
            lengths,
            staleness,
            {role: seconds - before.busy.get(role, 0.0) for role, seconds in busy.items()},
            {role: seconds - before.owned.get(role, 0.0) for role, seconds in owned.items()},
            len(timeline.moves) - before.moves,
            self.result.wasted_tokens - before.wasted,
        )
        self._before = _Totals(busy, owned, len(timeline.moves), self.result.wasted_tokens)
        self._began = timeline.step_began(step + 1, now)
        self.steps.append(row)
        self._step_ended(step)


def _trainer_load(scenario: Scenario, split: Split, rate: float) -> TrainerLoad:
    home = frozenset(split.blocks(TRAINER))
    return TrainerLoad(home, False, False, scenario.prompts, 0, _most_running(scenario, rate))


def _most_running(scenario: Scenario, rate: float) -> float:
    return scenario.prompts * scenario.samples * (1 + scenario.staleness) / max(rate, LEAST_RATE)
