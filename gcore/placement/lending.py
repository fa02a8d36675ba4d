"""Placement under asynchronous rollout: training is a third kind of work, and its blocks are lent to engines. Pure.

    update   the trainer's home: [ training         ]   the other blocks: engines go on, `staleness` versions ahead
    then     the home is lent:   [ generates, judges ]  until the next batch is complete, then it is taken back

The *home* is the set of blocks that hold the trainer's state. An update needs all of them, so the data-parallel group
never changes. Between two updates the home waits for a batch, or is lent: at once if the forecast of the wait is
PAYS times the cost of lending and taking back, and at the latest when it has waited as long as that cost (so an error
of the forecast at most doubles the cost of waiting). Among engines, MovingRule moves blocks as in a synchronous
rollout; its horizon are the groups that may be in progress.

`Flow` estimates the seconds that engines need for the groups of a step on n blocks: generation and judging take place
at the same time, each at its rate, and the split is the one whose slowest role is the fastest. No tail is in it: the
groups of later steps fill it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gcore.placement.grid import POLICY, TRAINER, Move, Split
from gcore.placement.rules import ClusterLoad, MovingRule, RoleSpeeds, Rule

HOME_SHARE = 0.625  # of all blocks; the others generate and judge without interruption
START_SHARE = 0.7  # of the responses that may be in progress, those that are generated; the others are judged, or wait
MARGIN = 0.03  # share of a step's time that another number of trainer blocks must win (ElasticRule)
PAYS = 2.0  # times the seconds of lending blocks and taking them back that the trainer must expect to wait
MOVING_RULE = MovingRule()


class Flow:
    """Seconds in which engines make the groups of a step, on any number of blocks."""

    def __init__(self, view: ClusterLoad, costs: RoleSpeeds) -> None:
        self.view, self.costs, self.roles = view, costs, costs.grid.roles
        self._running = math.inf if view.trainer is None else START_SHARE * view.trainer.running
        self._best: list[dict[str, int]] = []  # from one block per role to all blocks
        counts = dict.fromkeys(self.roles, 1)
        for _ in range(len(self.roles), costs.grid.num_blocks + 1):
            self._best.append(dict(counts))
            counts[max(self.roles, key=lambda role: self.role_s(role, counts[role]))] += 1

    def role_s(self, role: str, blocks: float) -> float:
        load, speed = self.view.loads[role], self.costs.speeds[role]
        replicas = blocks * self.costs.grid.per_block(role)
        if load.needed <= 0:
            return 0.0
        if not replicas:
            return math.inf
        at_once = self._running if role == POLICY else load.needed / 2
        batch = min(float(speed.max_concurrent), max(1.0, at_once / replicas))
        decoding_s = load.needed * load.mean * (speed.base_s / batch + speed.per_sequence_s)
        return (decoding_s + load.needed * load.prompt * speed.prefill_s_per_token) / replicas

    def step_s(self, counts: Mapping[str, float]) -> float:
        return max(self.role_s(role, counts[role]) for role in self.roles)

    def split(self, blocks: int) -> dict[str, int] | None:
        """The best split of this number of blocks; None: too few."""
        return self._best[blocks - len(self.roles)] if blocks >= len(self.roles) else None

    def best_s(self, blocks: int) -> float:
        counts = self.split(blocks)
        return math.inf if counts is None else self.step_s(counts)

    def both_ways_s(self, blocks: int, home: int) -> float:
        """Of lending these blocks and taking them back: switches, and the prefill of their requests on others."""
        load, speed, costs = self.view.loads[POLICY], self.costs.speeds[POLICY], self.costs
        replicas = costs.grid.num_blocks * costs.grid.per_block(POLICY) / len(self.roles)
        moved = min(self._running, replicas * speed.max_concurrent) * blocks / costs.grid.num_blocks
        prefill_s = moved * (load.prompt + load.mean / 2) * speed.prefill_s_per_token / replicas
        switches = (Move(0, TRAINER, POLICY), Move(0, POLICY, TRAINER))
        return prefill_s + sum(costs.switch_s(move, home) for move in switches)


def among_engines(split: Split, view: ClusterLoad, costs: RoleSpeeds) -> list[Move]:
    """As in a synchronous rollout, but steps wait for the longest responses: none is interrupted for a judge."""
    return [m for m in MOVING_RULE(split, view, costs) if m.source != POLICY or not view.work.get(m.block)]


class ContinuedRule(Rule):
    """In runs: all blocks are the trainer's home. Engines go on after each update, with the split before it."""

    def __call__(self, split: Split, view: ClusterLoad, costs: RoleSpeeds) -> list[Move]:
        return among_engines(split, view, costs)


@dataclass
class LendingRule(Rule):
    """`home`: blocks of the trainer; None: HOME_SHARE of all."""

    home: int | None = None
    flow: Flow | None = None  # of the current step

    def begin(self, view: ClusterLoad, costs: RoleSpeeds, last: Split, took_s: float | None) -> Split:
        first, self.flow = self.flow is None, Flow(view, costs)
        return self._first_split(self.flow) if first else last

    def _first_split(self, flow: Flow) -> Split:
        """Beside the home one block per judge, the rest generates: judges have no work at first."""
        costs, num, roles = flow.costs, flow.costs.grid.num_blocks, flow.roles
        assert costs.trainer is not None
        home = self.home
        if home is None:
            home = min(max(costs.trainer.least, round(HOME_SHARE * num)), max(costs.trainer.least, num - len(roles)))
        rest = num - home
        if 2 * home < num:
            counts = flow.split(rest) or {}
        else:
            counts = {role: 1 for role in roles if role != POLICY} if rest >= len(roles) else {}
        owners = [role for role, count in counts.items() if role != POLICY for _ in range(count)]
        return Split((*[POLICY] * (rest - len(owners)), *owners, *[TRAINER] * home))

    def __call__(self, split: Split, view: ClusterLoad, costs: RoleSpeeds) -> list[Move]:
        trainer = view.trainer
        assert trainer is not None and self.flow is not None
        if trainer.ready or trainer.updating:
            lent = [b for b in sorted(trainer.home) if split[b] != TRAINER and b not in view.moving]
            if lent:
                return [Move(b, split[b], TRAINER, "a batch is complete") for b in lent]
        elif moves := self._lend(split, view, self.flow):
            return moves
        if trainer.updating and 2 * len(trainer.home) >= costs.grid.num_blocks:
            return []  # soon most blocks come back
        return among_engines(split, view, costs)

    def _lend(self, split: Split, view: ClusterLoad, flow: Flow) -> list[Move]:
        """Home blocks to engines, unless the next batch is complete soon."""
        trainer = view.trainer
        assert trainer is not None
        waiting = [b for b in sorted(trainer.home) if split[b] == TRAINER and b not in view.moving]
        counts = {role: split.owners.count(role) for role in flow.roles}
        target = flow.split(sum(counts.values()) + len(waiting))
        if not waiting:
            return []
        cost_s, apart_s = flow.both_ways_s(len(waiting), len(trainer.home)), flow.step_s(counts)
        part = trainer.missing / max(1.0, view.groups)  # of the groups of a step that the batch still needs
        with_lent_s = flow.step_s(target) if target is not None else math.inf
        wait_s = part * min(apart_s, with_lent_s + cost_s)
        if wait_s <= PAYS * cost_s and trainer.waited_s < cost_s and apart_s < math.inf:
            return []
        moves, goal = list[Move](), target or dict.fromkeys(flow.roles, 1)
        for block in waiting:
            # judges first: their requests are shorter, so less is interrupted when the block is taken back
            lacking = [role for role in flow.roles if role != POLICY and goal[role] > counts[role]]
            role = max(lacking or flow.roles, key=lambda role: goal[role] - counts[role])
            counts[role] += 1
            moves.append(Move(block, TRAINER, role, f"lent: a batch in about {max(wait_s, cost_s):.1f} s"))
        return moves


@dataclass
class ElasticRule(LendingRule):
    """For comparison: the data-parallel group grows and shrinks between steps, and the trainer lends nothing."""

    def begin(self, view: ClusterLoad, costs: RoleSpeeds, last: Split, took_s: float | None) -> Split:
        first, self.flow = self.flow is None, Flow(view, costs)
        flow, trainer, num = self.flow, costs.trainer, costs.grid.num_blocks
        assert trainer is not None

        def step_s(home: int) -> float:
            return max(trainer.update_s(home), flow.best_s(num - home))

        best = min(range(trainer.least, max(trainer.least, num - len(flow.roles)) + 1), key=step_s)
        if first:
            counts = flow.split(num - best) or {}
            return Split((*[role for role, n in counts.items() for _ in range(n)], *[TRAINER] * best))
        now = len(last.blocks(TRAINER))
        return _with_home(last, best, flow) if step_s(best) < (1 - MARGIN) * step_s(now) else last

    def _lend(self, split: Split, view: ClusterLoad, flow: Flow) -> list[Move]:
        return []


def _with_home(split: Split, blocks: int, flow: Flow) -> Split:
    """The trainer has more or fewer blocks; the others keep their roles as far as possible."""
    owners, home = list(split.owners), split.blocks(TRAINER)
    counts = {role: split.owners.count(role) for role in flow.roles}
    target = flow.split(len(owners) - blocks) or dict.fromkeys(flow.roles, 0)
    for block in home[blocks:]:
        owners[block] = max(flow.roles, key=lambda role: target[role] - counts[role])
        counts[owners[block]] += 1
    for _ in range(blocks - len(home)):
        role = max(flow.roles, key=lambda role: counts[role] - target[role])
        owners[max(b for b, owner in enumerate(owners) if owner == role)] = TRAINER
        counts[role] -= 1
    return Split(tuple(owners))
