"""Which replica a call goes to. Pure bookkeeping, used by the pool and by the simulator.

    choose ──> a replica, or None: no replica has room ──sent──> loads ──done──> loads

A call is a few requests that stay together (siblings share their prompt). The rules, in order of precedence:

1. A closed replica gets no calls, nor does one with `limit` requests of this controller. A call that is larger than the
   limit goes to a replica that has no request of this controller.
2. Own replicas come first: on several nodes, those of the controller's node. Replicas of other controllers are used if
   no own replica has room, up to `guest_limit`.
3. The replica with the least outstanding work wins. Ties: the open replicas form a circle, and controller r of N starts
   at r/N of the circle. So N controllers spread their calls evenly without communication.
4. A `key` goes to the same replica as before if that replica has at most `margin` tokens more work than the least
   loaded one.

The order of the circle is computed again when replicas open. A choice looks at every open replica, which takes about a
microsecond for 8 of them and 20 for 512.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

# Requests of a controller per decoding slot of a replica. Chosen with the skew table of docs/controllers.md: requests
# in a deep queue at an engine cannot go to an idle one, and too few requests of others leave an engine idle.
OWN_PER_SLOT = 1.5
GUEST_PER_SLOT = 0.75  # at replicas of other controllers
SHARED_PER_SLOT = 2.0  # of all controllers together, where no controller owns a replica
LEAST_PER_SLOT = 0.5  # of one controller there: the others may have no requests
AFFINITY_TOKENS = 4096  # extra queued work accepted to reuse a cached prefix; chosen, not measured
MAX_KEYS = 4096  # remembered, in 0.7 MB; the least recently used key is dropped first


def own_replicas(
    rank: int, num_controllers: int, num_replicas: int, nodes: tuple[Sequence[int], Sequence[int]] = ((), ())
) -> frozenset[int] | None:
    """Replica i belongs to controller i mod N. None: fewer replicas than controllers, which share all of them. `nodes`:
    of the controllers and of the replicas. On several nodes, each controller has as many replicas as otherwise, but
    those of its own node first, so that requests and samples do not cross the network."""
    if num_replicas < num_controllers:
        return None
    if len(set(nodes[1])) < 2:
        return frozenset(range(rank, num_replicas, num_controllers))
    room = [len(range(r, num_replicas, num_controllers)) for r in range(num_controllers)]
    owners: dict[int, int] = {}
    for is_near in (True, False):  # those that no controller of their node has room for come last
        for replica, node in enumerate(nodes[1]):
            able = [r for r, place in enumerate(nodes[0]) if room[r] and (place == node or not is_near)]
            if replica not in owners and able:
                owners[replica] = max(able, key=lambda r: (room[r], -r))
                room[owners[replica]] -= 1
    return frozenset(replica for replica, owner in owners.items() if owner == rank)


def limits_of(slots: int, per_call: int = 1) -> tuple[int, int]:
    """Most outstanding requests of a controller at a replica of its own, and at one of another controller: (96, 48).

    `slots`: sequences that a replica decodes at the same time. `per_call`: requests that stay together. The second
    call is sent before the first has ended: a call frees its room only when all of its requests have ended."""
    return max(round(OWN_PER_SLOT * slots), slots + per_call), max(1, round(GUEST_PER_SLOT * slots))


def shared_limit(slots: int, num_controllers: int) -> int:
    """The same where placement moves replicas, so that no controller owns one: a share of every replica."""
    return max(math.ceil(SHARED_PER_SLOT * slots / num_controllers), round(LEAST_PER_SLOT * slots), 1)


@dataclass(slots=True)
class _Tier:
    """Replicas with the same precedence and limit."""

    most: float  # the largest limit
    limit: float  # of outstanding requests per replica, now
    open: set[int] = field(default_factory=set)
    circle: list[int] = field(default_factory=list)  # those that were open when it was made; ties go to the first one
    outdated: bool = False  # replicas have opened since then


class Router:
    """One controller's outstanding work per replica, and the choice for its next call.

    Router(num_replicas=4, controller=(1, 2), own={1, 3}, limit=512, guest_limit=128)
    """

    def __init__(
        self,
        num_replicas: int,
        controller: tuple[int, int] = (0, 1),
        own: Collection[int] | None = None,
        limit: int | None = None,
        guest_limit: int | None = None,
        margin: int = AFFINITY_TOKENS,
        opened: Sequence[int] | None = None,
    ) -> None:
        """`controller`: its index and the number of controllers. `own` None: all replicas are shared. `opened`: the
        replicas that are open now; None: all."""
        self.loads = [0] * num_replicas  # outstanding work per replica; read by others
        self.counts = [0] * num_replicas  # outstanding requests per replica
        self._margin, self._controller = margin, controller
        most = math.inf if limit is None else limit
        guests = most if guest_limit is None else guest_limit
        first, second = self._tiers = _Tier(most, most), _Tier(guests, guests)
        self._tier_of = [first if own is None or i in own else second for i in range(num_replicas)]
        self._replica_of: OrderedDict[Hashable, int] = OrderedDict()  # key -> replica
        self.open(*range(num_replicas) if opened is None else opened)

    def open(self, *numbers: int) -> None:
        for i in numbers:
            self._tier_of[i].open.add(i)
            self._tier_of[i].outdated = True

    def close(self, *numbers: int) -> None:
        """They get no calls until they are opened. Their requests stay outstanding."""
        for i in numbers:
            self._tier_of[i].open.discard(i)

    def limit(self, requests: int) -> None:
        """New maximum of outstanding requests per replica; the limits of the constructor still apply."""
        for tier in self._tiers:
            tier.limit = min(tier.most, requests)

    def is_open(self, i: int) -> bool:
        return i in self._tier_of[i].open

    def choose(self, *, key: Hashable = None, count: int = 1) -> int | None:
        """A replica for `count` requests that stay together; None: no replica has room. Remembers the key."""
        first, second = self._tiers
        best = self._least(first, count)
        if best is None:
            best = self._least(second, count)
        if best is None or key is None:
            return best
        known = self._replica_of.get(key)
        if (
            known is not None
            and self._tier_of[known] is self._tier_of[best]
            and self.is_open(known)
            and self.loads[known] <= self.loads[best] + self._margin
            and (not self.counts[known] or self.counts[known] + count <= self._tier_of[known].limit)
        ):
            best = known
        self._replica_of[key] = best
        self._replica_of.move_to_end(key)
        if len(self._replica_of) > MAX_KEYS:
            self._replica_of.popitem(last=False)
        return best

    def sent(self, i: int, work: int, count: int = 1) -> None:
        self.loads[i] += work
        self.counts[i] += count

    def done(self, i: int, work: int, count: int = 1) -> None:
        """The requests were answered, lost or recalled."""
        self.loads[i] -= work
        self.counts[i] -= count

    def _least(self, tier: _Tier, count: int) -> int | None:
        """The least loaded open replica that has room for `count` requests."""
        if tier.outdated:
            circle, (rank, size) = sorted(tier.open), self._controller
            start = rank * len(circle) // size
            tier.circle, tier.outdated = circle[start:] + circle[:start], False
        loads, counts, best, room = self.loads, self.counts, None, tier.limit - count
        for i in tier.circle:
            has_room = not counts[i] or counts[i] <= room
            if has_room and i in tier.open and (best is None or loads[i] < loads[best]):
                best = i
        return best
