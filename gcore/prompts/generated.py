"""What tasks share: rows that are computed when they are read, and the checks of their arguments."""

from __future__ import annotations

import difflib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, overload

from gcore.types import UserError

Row = dict[str, Any]


class Generated(Sequence[Row]):
    """Rows that are computed when they are read."""

    @abstractmethod
    def _row(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._row(index)


def split_of(args: Mapping[str, Any], key: str) -> str:
    split = args.get("split", "train")
    if split not in ("train", "eval"):
        raise UserError(f"{key}.args.split: expected train or eval, got {split!r}")
    return str(split)


def nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else f"; expected one of {', '.join(known)}"
