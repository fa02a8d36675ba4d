"""Bytes of payloads between the processes of a run, per step: tokens, logprobs, versions, masks, inline images.

    pools (requests, responses), dispatcher (samples) ──add──> Links ──take──> link/requests_within_mb, ... of a row

A payload that is a reference counts as nothing here: its bytes do not pass through a controller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

Link = Literal["requests", "responses", "samples"]  # controller -> engine or judge, back, controller -> rank
LinkScope = Literal["within", "between"]  # a node, nodes


class Links:
    """Of one controller, to the replicas of one role. `nodes`: of the controllers and of the replicas
    (Plan.nodes_of_pool); empty: one node.

    Links(rank=1, nodes=((0, 1), (0, 0, 1))).add("requests", 2, 4096)
    """

    def __init__(self, rank: int = 0, nodes: tuple[Sequence[int], Sequence[int]] = ((), ())) -> None:
        controllers, self._others = nodes
        self._own = controllers[rank] if controllers else None
        self._bytes: Counter[tuple[Link, LinkScope]] = Counter()

    def add(self, link: Link, replica: int, num_bytes: int) -> None:
        near = self._own is None or self._others[replica] == self._own
        self._bytes[link, "within" if near else "between"] += num_bytes

    def take(self) -> Counter[tuple[Link, LinkScope]]:
        """Since the last call."""
        taken, self._bytes = self._bytes, Counter()
        return taken


def link_row(parts: Iterable[Mapping[tuple[Link, LinkScope], int]]) -> dict[str, float]:
    """Megabytes per link, summed over controllers and roles. Links without bytes are left out."""
    total: Counter[tuple[Link, LinkScope]] = Counter()
    for part in parts:
        total.update(part)
    return {f"link/{link}_{reach}_mb": total[link, reach] / 1e6 for link, reach in sorted(total) if total[link, reach]}
