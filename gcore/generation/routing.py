"""Which replica a call goes to. Pure bookkeeping: the pool acts on it, and the simulator asks the same class.

    choose ──> a replica, or None: nobody has room ──sent──> loads ──done──> loads

A call is a few requests that stay together (siblings share their prompt). From the first rule to the last:

1. A closed replica gets nothing, and one with `limit` requests of ours gets no more. A call that is larger than the
   limit goes to a replica that has none of ours.
2. Own replicas come first. Those of other controllers are asked when no own one has room, and up to `guest_limit`.
3. The least outstanding work wins. Of equals, the one whose turn is ours: the replicas that are open stand in a circle,
   and controller r of N begins r/N of the way around. N of them that know nothing of each other so send alike to all.
4. A `key` that was seen before goes where it went then, while that is at most `margin` tokens of work above the least.

The least loaded lies on top of a heap. Its entries are lower bounds: work that is sent changes no entry, and the top is
put right when somebody looks. Replicas without room are laid aside until they have some. When replicas open, places in
the circle are given anew.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence

SENT_PER_SLOT = 2  # requests sent to a replica per sequence it decodes at once: its queue does not run empty
AFFINITY_TOKENS = 4096  # work we rather queue behind than have a prefix computed again; a choice, not a measurement
REMEMBERED = 16384  # keys; the one that was not asked for the longest goes first


def own_replicas(rank: int, num_controllers: int, num_replicas: int) -> frozenset[int] | None:
    """Replica i belongs to controller i mod N. None: there are fewer than controllers, and all are everybody's."""
    if num_replicas < num_controllers:
        return None
    return frozenset(range(rank, num_replicas, num_controllers))


class Router:
    """What one controller has outstanding at every replica, and where its next call goes.

    Router(num_replicas=4, turn=(1, 2), own={1, 3}, limit=512, guest_limit=128)
    """

    def __init__(
        self,
        num_replicas: int,
        turn: tuple[int, int] = (0, 1),
        own: Collection[int] | None = None,
        limit: int | None = None,
        guest_limit: int | None = None,
        margin: int = AFFINITY_TOKENS,
        opened: Sequence[int] | None = None,
    ) -> None:
        """`turn`: which of how many controllers this is. `own` None: all replicas are everybody's. `opened`: those that
        are open now; None: all."""
        self.loads = [0] * num_replicas  # work outstanding, by replica; to be read
        self.counts = [0] * num_replicas  # requests outstanding
        self._margin = margin
        self._own = _Tier(self, turn, limit)
        self._others = _Tier(self, turn, limit if guest_limit is None else guest_limit)
        self._tiers = [self._own] * num_replicas
        for i in () if own is None else set(range(num_replicas)).difference(own):
            self._tiers[i] = self._others
        self._one_tier = own is None
        self._memory: OrderedDict[Hashable, int] = OrderedDict()  # key -> replica
        self.open(*range(num_replicas) if opened is None else opened)

    def open(self, *numbers: int) -> None:
        for tier, some in self._sorted(numbers):
            tier.put(some)

    def close(self, *numbers: int) -> None:
        """They are sent nothing until they are opened; what they have stays outstanding."""
        for tier, some in self._sorted(numbers):
            tier.take_out(some)

    def limit(self, requests: int) -> None:
        """From now on a replica gets no more than so many of ours, and never more than it would have at the start."""
        for tier in (self._own, self._others):
            tier.set_limit(requests)

    def _sorted(self, numbers: Sequence[int]) -> list[tuple[_Tier, Sequence[int]]]:
        if self._one_tier:
            return [(self._own, numbers)]
        return [(tier, [i for i in numbers if self._tiers[i] is tier]) for tier in (self._own, self._others)]

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

    `_bounds[i]` is the entry of replica i in the heap, at most its load; other entries of it are stale, and all of the
    closed. It is None for those laid aside because a call did not fit.
    """

    def __init__(self, router: Router, turn: tuple[int, int], limit: int | None) -> None:
        self._loads, self._counts, self._most, self._limit = router.loads, router.counts, limit, limit
        self._turn = turn
        self.open: set[int] = set()
        self._more = False  # some have opened since places were given
        self._places: dict[int, int] = {}  # replica -> its place among equals
        self._bounds: dict[int, int | None] = {}
        self._heap: list[tuple[int, int, int]] = []  # bound, place, replica
        self._aside: set[int] = set()
        self._aside_room = 0  # the most that any of them had left

    def put(self, numbers: Sequence[int]) -> None:
        if numbers:
            self.open.update(numbers)
            self._more = True

    def take_out(self, numbers: Sequence[int]) -> None:
        self.open.difference_update(numbers)
        self._aside.difference_update(numbers)

    def set_limit(self, requests: int) -> None:
        self._limit = requests if self._most is None else min(self._most, requests)
        if not self._more:  # else all get their places anew
            self._take_back()

    def lighter(self, i: int) -> None:
        """Its load fell: there is a new lower bound, unless the old one still holds."""
        if i not in self.open or self._more:
            return
        bound = self._bounds[i]
        if bound is None or self._loads[i] < bound:
            self._aside.discard(i)
            self._push(i)

    def has_room(self, i: int, count: int) -> bool:
        has = self._counts[i]
        return self._limit is None or not has or has + count <= self._limit

    def least(self, count: int) -> int | None:
        """The replica with the least work among the open ones that have room for so many requests."""
        if self._more:
            self._give_places()
        if self._aside and count <= self._aside_room:  # refused a larger call; this one may fit
            self._take_back()
        heap, loads, bounds, here = self._heap, self._loads, self._bounds, self.open
        while heap:
            bound, place, i = heap[0]
            if bounds[i] != bound or i not in here:  # stale
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

    def _give_places(self) -> None:
        circle, (rank, size) = sorted(self.open), self._turn
        start, loads = rank * len(circle) // size, self._loads
        circle = circle[start:] + circle[:start]
        self._places = {i: place for place, i in enumerate(circle)}
        self._bounds |= {i: loads[i] for i in circle}
        self._heap = [(loads[i], place, i) for place, i in enumerate(circle)]
        heapq.heapify(self._heap)
        self._aside.clear()
        self._more = False

    def _lay_aside(self, i: int) -> None:
        assert self._limit is not None
        room = self._limit - self._counts[i]
        self._aside_room = max(room, self._aside_room) if self._aside else room
        self._aside.add(i)
        self._bounds[i] = None

    def _take_back(self) -> None:
        for i in self._aside:
            self._push(i)
        self._aside.clear()

    def _push(self, i: int) -> None:
        if len(self._heap) > 4 * len(self._places) + 64:  # mostly stale entries
            live = ((self._bounds[j], self._places[j], j) for j in self.open if j != i)
            self._heap = [(bound, place, j) for bound, place, j in live if bound is not None]
            heapq.heapify(self._heap)
        self._bounds[i] = self._loads[i]
        heapq.heappush(self._heap, (self._loads[i], self._places[i], i))
