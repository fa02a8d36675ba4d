"""Which replica a call goes to. Pure bookkeeping: the pool acts on it, and the simulator asks the same class.

    choose ──> a replica, or None: nobody has room ──sent──> loads ──done──> loads

A call is a few requests that stay together (siblings share their prompt). From the first rule to the last:

1. A closed replica gets nothing, and one with `limit` requests of ours gets no more. A call that is larger than the
   limit goes to a replica that has none of ours.
2. Own replicas come first. Those of other controllers are asked when no own one has room, and up to `guest_limit`.
3. The least outstanding work wins; of equals the first from `first` on, so that controllers begin at different ones.
4. A `key` that was seen before goes where it went then, while that is at most `margin` tokens of work above the least.

The least loaded lies on top of a heap. Its entries are lower bounds: work that is sent changes no entry, and the top is
put right when somebody looks. Replicas without room are laid aside until they have some.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Hashable

AFFINITY_TOKENS = 4096  # work we rather queue behind than have a prefix computed again; a choice, not a measurement
REMEMBERED = 16384  # keys; the one that was not asked for the longest goes first


def own_replicas(rank: int, num_controllers: int, num_replicas: int) -> frozenset[int] | None:
    """Replica i belongs to controller i mod N. None: there are fewer than controllers, and all are everybody's."""
    if num_replicas < num_controllers:
        return None
    return frozenset(range(rank, num_replicas, num_controllers))


class Router:
    """What one controller has outstanding at every replica, and where its next call goes.

    Router(num_replicas=4, first=1, own={1, 3}, limit=512, guest_limit=128)
    """

    def __init__(
        self,
        num_replicas: int,
        first: int = 0,
        own: Collection[int] | None = None,
        limit: int | None = None,
        guest_limit: int | None = None,
        margin: int = AFFINITY_TOKENS,
    ) -> None:
        self.loads = [0] * num_replicas  # work outstanding, by replica; to be read
        self.counts = [0] * num_replicas  # requests outstanding
        self._margin = margin
        self._own, self._others = _Tier(self, limit), _Tier(self, limit if guest_limit is None else guest_limit)
        self._tiers: list[_Tier] = []  # by replica
        self._memory: OrderedDict[Hashable, int] = OrderedDict()  # key -> replica
        for i in range(num_replicas):
            self._tiers.append(self._own if own is None or i in own else self._others)
            self._tiers[i].join(i, (i - first) % num_replicas)

    def open(self, i: int) -> None:
        self._tiers[i].put(i)

    def close(self, i: int) -> None:
        """It is sent nothing until it is opened; what it has stays outstanding."""
        self._tiers[i].take_out(i)

    def limit(self, requests: int) -> None:
        """From now on a replica gets no more than so many of ours, and never more than it would have at the start."""
        for tier in (self._own, self._others):
            tier.set_limit(requests)

    def is_open(self, i: int) -> bool:
        return i in self._tiers[i].open

    def choose(self, *, key: Hashable = None, count: int = 1) -> int | None:
        """A replica for `count` requests that stay together; None: nobody has room for them. The key is remembered."""
        tier, best = self._own, self._own.least(count)
        if best is None:
            tier, best = self._others, self._others.least(count)
            if best is None:
                return None
        if key is None:
            return best
        known = self._memory.get(key)
        if (
            known is not None
            and known in tier.open
            and self.loads[known] <= self.loads[best] + self._margin
            and tier.has_room(known, count)
        ):
            best = known
        self._memory[key] = best
        self._memory.move_to_end(key)
        if len(self._memory) > REMEMBERED:
            self._memory.popitem(last=False)
        return best

    def sent(self, i: int, work: int, count: int = 1) -> None:
        self.loads[i] += work
        self.counts[i] += count

    def done(self, i: int, work: int, count: int = 1) -> None:
        """What was sent is answered, lost or taken back."""
        self.loads[i] -= work
        self.counts[i] -= count
        self._tiers[i].lighter(i)


class _Tier:
    """Replicas of equal standing under one limit.

    `_bounds[i]` is the entry of replica i in the heap, at most its load; other entries of it are stale. It is None for
    the closed, and for those laid aside because a call did not fit.
    """

    def __init__(self, router: Router, limit: int | None) -> None:
        self._loads, self._counts, self._most, self._limit = router.loads, router.counts, limit, limit
        self.open: set[int] = set()
        self._places: dict[int, int] = {}  # replica -> its place among equals
        self._bounds: dict[int, int | None] = {}
        self._heap: list[tuple[int, int, int]] = []  # bound, place, replica
        self._aside: set[int] = set()
        self._aside_room = 0  # the most that any of them had left

    def join(self, i: int, place: int) -> None:
        self._places[i], self._bounds[i] = place, None
        self.put(i)

    def put(self, i: int) -> None:
        self.open.add(i)
        self._aside.discard(i)
        self._push(i)

    def take_out(self, i: int) -> None:
        self.open.discard(i)
        self._aside.discard(i)
        self._bounds[i] = None

    def set_limit(self, requests: int) -> None:
        self._limit = requests if self._most is None else min(self._most, requests)
        for i in list(self._aside):
            self.put(i)

    def lighter(self, i: int) -> None:
        """Its load fell: there is a new lower bound, unless the old one still holds."""
        if i not in self.open:
            return
        bound = self._bounds[i]
        if bound is None:  # laid aside
            self.put(i)
        elif self._loads[i] < bound:
            self._push(i)

    def has_room(self, i: int, count: int) -> bool:
        has = self._counts[i]
        return self._limit is None or not has or has + count <= self._limit

    def least(self, count: int) -> int | None:
        """The replica with the least work among the open ones that have room for so many requests."""
        if self._aside and count <= self._aside_room:  # refused a larger call; this one may fit
            for i in list(self._aside):
                self.put(i)
        heap, loads, bounds = self._heap, self._loads, self._bounds
        while heap:
            bound, place, i = heap[0]
            if bounds[i] != bound:  # stale
                heapq.heappop(heap)
            elif loads[i] != bound:  # more was sent since
                bounds[i] = loads[i]
                heapq.heapreplace(heap, (loads[i], place, i))
            elif self.has_room(i, count):
                return i
            else:
                heapq.heappop(heap)
                self._lay_aside(i)
        return None

    def _lay_aside(self, i: int) -> None:
        assert self._limit is not None
        room = self._limit - self._counts[i]
        self._aside_room = max(room, self._aside_room) if self._aside else room
        self._aside.add(i)
        self._bounds[i] = None

    def _push(self, i: int) -> None:
        if len(self._heap) > 4 * len(self._places) + 64:  # mostly stale entries
            live = ((bound, self._places[j], j) for j, bound in self._bounds.items() if bound is not None and j != i)
            self._heap = list(live)
            heapq.heapify(self._heap)
        self._bounds[i] = self._loads[i]
        heapq.heappush(self._heap, (self._loads[i], self._places[i], i))
