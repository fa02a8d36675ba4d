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

A heap holds the open replicas by load. Its entries are lower bounds: sending work changes no entry, and `least`
corrects the top entry when it reads it. Replicas without room are removed from the heap until they have room. When
replicas open, the tie order is computed again.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

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
    owned: list[set[int]] = [set() for _ in room]
    far = []
    for replica, node in enumerate(nodes[1]):
        near = [r for r, place in enumerate(nodes[0]) if place == node and room[r]]
        if not near:
            far.append(replica)
            continue
        owner = max(near, key=lambda r: (room[r], -r))
        owned[owner].add(replica)
        room[owner] -= 1
    for replica in far:
        owner = max(range(num_controllers), key=lambda r: (room[r], -r))
        owned[owner].add(replica)
        room[owner] -= 1
    return frozenset(owned[rank])


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """Most outstanding requests of a controller per replica. ReplicaLimits(own=96, guest=48)"""

    own: int
    guest: int  # at replicas of other controllers


def limits_of(slots: int, per_call: int = 1) -> ReplicaLimits:
    """`slots`: sequences that a replica decodes at the same time. `per_call`: requests that stay together. The second
    call is sent before the first has ended: a call frees its room only when all of its requests have ended."""
    return ReplicaLimits(max(round(OWN_PER_SLOT * slots), slots + per_call), max(1, round(GUEST_PER_SLOT * slots)))


def shared_limit(slots: int, num_controllers: int) -> int:
    """The same where placement moves replicas, so that no controller owns one: a share of every replica."""
    return max(math.ceil(SHARED_PER_SLOT * slots / num_controllers), round(LEAST_PER_SLOT * slots), 1)


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
        self._margin = margin
        self._own = _Tier(self, controller, limit)
        self._others = _Tier(self, controller, limit if guest_limit is None else guest_limit)
        self._tiers = [self._own] * num_replicas
        for i in () if own is None else set(range(num_replicas)).difference(own):
            self._tiers[i] = self._others
        self._one_tier = own is None
        self._replica_of: OrderedDict[Hashable, int] = OrderedDict()  # key -> replica
        self.open(*range(num_replicas) if opened is None else opened)

    def open(self, *numbers: int) -> None:
        for tier, members in self._by_tier(numbers):
            tier.add(members)

    def close(self, *numbers: int) -> None:
        """They get no calls until they are opened. Their requests stay outstanding."""
        for tier, members in self._by_tier(numbers):
            tier.remove(members)

    def limit(self, requests: int) -> None:
        """New maximum of outstanding requests per replica; the limits of the constructor still apply."""
        for tier in (self._own, self._others):
            tier.set_limit(requests)

    def _by_tier(self, numbers: Sequence[int]) -> list[tuple[_Tier, Sequence[int]]]:
        if self._one_tier:
            return [(self._own, numbers)]
        return [(tier, [i for i in numbers if self._tiers[i] is tier]) for tier in (self._own, self._others)]

    def is_open(self, i: int) -> bool:
        return i in self._tiers[i].open

    def choose(self, *, key: Hashable = None, count: int = 1) -> int | None:
        """A replica for `count` requests that stay together; None: no replica has room. Remembers the key."""
        tier, best = self._own, self._own.least(count)
        if best is None:
            tier, best = self._others, self._others.least(count)
            if best is None:
                return None
        if key is None:
            return best
        known = self._replica_of.get(key)
        if (
            known is not None
            and known in tier.open
            and self.loads[known] <= self.loads[best] + self._margin
            and tier.has_room(known, count)
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
        self._tiers[i].load_decreased(i)


class _Tier:
    """Replicas with the same precedence and limit.

    `_bounds[i]` is the valid heap entry of replica i, at most its load. Other entries of i, and all entries of closed
    replicas, are stale. `_bounds[i]` is None for a full replica: a call did not fit, so it is not in the heap.
    """

    def __init__(self, router: Router, controller: tuple[int, int], limit: int | None) -> None:
        self._loads, self._counts, self._initial_limit, self._limit = router.loads, router.counts, limit, limit
        self._controller = controller
        self.open: set[int] = set()
        self._outdated = False  # replicas have opened since the heap was built
        self._places: dict[int, int] = {}  # replica -> its place in the tie order
        self._bounds: dict[int, int | None] = {}
        self._heap: list[tuple[int, int, int]] = []  # bound, place, replica
        self._full: set[int] = set()
        self._full_room = 0  # the largest remaining room of any of them

    def add(self, numbers: Sequence[int]) -> None:
        if numbers:
            self.open.update(numbers)
            self._outdated = True

    def remove(self, numbers: Sequence[int]) -> None:
        self.open.difference_update(numbers)
        self._full.difference_update(numbers)

    def set_limit(self, requests: int) -> None:
        self._limit = requests if self._initial_limit is None else min(self._initial_limit, requests)
        if not self._outdated:  # else the heap is rebuilt anyway
            self._restore_full()

    def load_decreased(self, i: int) -> None:
        """The load decreased: push a new lower bound, unless the old one is still valid."""
        if i not in self.open or self._outdated:
            return
        bound = self._bounds[i]
        if bound is None or self._loads[i] < bound:
            self._full.discard(i)
            self._push(i)

    def has_room(self, i: int, count: int) -> bool:
        has = self._counts[i]
        return self._limit is None or not has or has + count <= self._limit

    def least(self, count: int) -> int | None:
        """The least loaded open replica that has room for `count` requests."""
        if self._outdated:
            self._rebuild()
        if self._full and count <= self._full_room:  # a larger call did not fit; this one may
            self._restore_full()
        heap, loads, bounds, opened = self._heap, self._loads, self._bounds, self.open
        while heap:
            bound, place, i = heap[0]
            if bounds[i] != bound or i not in opened:  # stale
                heapq.heappop(heap)
            elif loads[i] != bound:  # more work was sent since
                bounds[i] = loads[i]
                heapq.heapreplace(heap, (loads[i], place, i))
            elif self.has_room(i, count):
                return i
            else:
                heapq.heappop(heap)
                self._mark_full(i)
        return None

    def _rebuild(self) -> None:
        circle, (rank, size) = sorted(self.open), self._controller
        start, loads = rank * len(circle) // size, self._loads
        circle = circle[start:] + circle[:start]
        self._places = {i: place for place, i in enumerate(circle)}
        self._bounds |= {i: loads[i] for i in circle}
        self._heap = [(loads[i], place, i) for place, i in enumerate(circle)]
        heapq.heapify(self._heap)
        self._full.clear()
        self._outdated = False

    def _mark_full(self, i: int) -> None:
        assert self._limit is not None
        room = self._limit - self._counts[i]
        self._full_room = max(room, self._full_room) if self._full else room
        self._full.add(i)
        self._bounds[i] = None

    def _restore_full(self) -> None:
        for i in self._full:
            self._push(i)
        self._full.clear()

    def _push(self, i: int) -> None:
        if len(self._heap) > 4 * len(self._places) + 64:  # mostly stale entries
            live = ((self._bounds[j], self._places[j], j) for j in self.open if j != i)
            self._heap = [(bound, place, j) for bound, place, j in live if bound is not None]
            heapq.heapify(self._heap)
        self._bounds[i] = self._loads[i]
        heapq.heappush(self._heap, (self._loads[i], self._places[i], i))
