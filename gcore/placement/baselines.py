"""Placement rules without forecasts: two modes of runs (static, colocated), and rules for comparison. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gcore.placement.grid import POLICY, Move, Split, shares
from gcore.placement.rules import ClusterLoad, RoleSpeeds, Rule


@dataclass(frozen=True, slots=True)
class StaticRule(Rule):
    """The split chosen before the run stays."""

    split: Split

    def begin(self, view: ClusterLoad, costs: RoleSpeeds, last: Split, took_s: float | None) -> Split:
        return self.split


@dataclass(frozen=True, slots=True)
class StartingAtRule(StaticRule):
    """Every rollout begins with the same split; another rule moves blocks during it."""

    rule: Rule

    def __call__(self, split: Split, view: ClusterLoad, costs: RoleSpeeds) -> list[Move]:
        return self.rule(split, view, costs)


class _AllGenerateFirst(Rule):
    def begin(self, view: ClusterLoad, costs: RoleSpeeds, last: Split, took_s: float | None) -> Split:
        return Split((POLICY,) * costs.grid.num_blocks)


class ColocatedRule(_AllGenerateFirst):
    """All devices belong to one role at a time: first generation of all samples, then judging of all."""

    def __call__(self, split: Split, view: ClusterLoad, costs: RoleSpeeds) -> list[Move]:
        now = split[0]
        if view.moving or view.loads[now].in_progress:
            return []
        for role in costs.grid.roles:
            if role != now and view.loads[role].in_progress:
                return [Move(b, now, role, f"{now} is done, {role} takes all blocks") for b in split.blocks(now)]
        return []


class ColocatedEarlyRule(ColocatedRule):
    """As `ColocatedRule`, but generation pauses as soon as there are enough responses to judge. Unfinished responses
    continue later."""

    def __call__(self, split: Split, view: ClusterLoad, costs: RoleSpeeds) -> list[Move]:
        if split[0] == POLICY and not view.moving and view.loads[POLICY].needed <= 0:
            waiting = [role for role in costs.grid.roles if role != POLICY and view.loads[role].in_progress]
            if waiting:
                return [Move(b, POLICY, waiting[0], "enough responses exist") for b in split.blocks(POLICY)]
        return super().__call__(split, view, costs)


class EarlySwapRule(_AllGenerateFirst):
    """All devices generate. Each block changes to judging as soon as it has drained, and back when prompts wait."""

    def __call__(self, split: Split, view: ClusterLoad, costs: RoleSpeeds) -> list[Move]:
        moves, policy = list[Move](), view.loads[POLICY]
        judges = [role for role in costs.grid.roles if role != POLICY and view.loads[role].in_progress]
        for block, owner in enumerate(split.owners):
            if block in view.moving or view.work.get(block, 0.0):
                continue
            if owner == POLICY and not policy.waiting:
                blocks = {role: 1 + split.owners.count(role) + sum(m.target == role for m in moves) for role in judges}
                if judges:
                    target = max(judges, key=lambda role: view.loads[role].in_progress / blocks[role])
                    moves.append(Move(block, owner, target, "drained"))
            elif owner != POLICY and not view.loads[owner].waiting:
                other = [role for role in costs.grid.roles if role != owner and view.loads[role].waiting]
                if other:
                    moves.append(Move(block, owner, other[0], f"drained, {other[0]} waits"))
        return moves


class ProportionalRule(Rule):
    """Blocks in proportion to the busy time of each role in the last rollout; no moves."""

    def begin(self, view: ClusterLoad, costs: RoleSpeeds, last: Split, took_s: float | None) -> Split:
        return shares(costs.grid, {role: view.loads[role].busy for role in costs.grid.roles})


@dataclass(frozen=True, slots=True)
class UtilisationRule(Rule):
    """The paper's rule, as far as it is published: slots move one by one from the least to the most utilised role."""

    high: float = 0.9
    low: float = 0.7
    cool_down_s: float = 10.0

    def __call__(self, split: Split, view: ClusterLoad, costs: RoleSpeeds) -> list[Move]:
        if view.moving or view.since_move_s < self.cool_down_s:
            return []
        busy = {role: view.loads[role].busy for role in costs.grid.roles}
        most, least = max(busy, key=lambda r: busy[r]), min(busy, key=lambda r: busy[r])
        spare = split.blocks(least)
        if busy[most] < self.high or busy[least] > self.low or len(spare) < 2:
            return []
        block = min(spare, key=lambda b: view.work.get(b, 0.0))
        return [Move(block, least, most, f"{most} is {busy[most]:.0%} busy, {least} {busy[least]:.0%}")]
