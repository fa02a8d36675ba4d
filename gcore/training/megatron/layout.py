"""Where the rows of a Megatron parameter are in the tensors of the Hugging Face model. Pure.

Megatron joins tensors that Hugging Face keeps apart (queries, keys and values, group by group; gate and up) and splits
them over ranks. Every such parameter is a list of blocks of whole rows, and each block is a box in one tensor:

    linear_qkv, rank 1 of 2, 4 heads, 2 key heads of size 8 ──> rows 0-15: q_proj[16:32], 16-23: k_proj[8:16], ...

So weights, moments and parts of both are read, written and sent by Hugging Face names without a converted copy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `first` to `first + count` of a parameter are a box of the tensor `name`, which begins at `offset`.

    Block("model.norm.weight", whole=(64,), offset=(0,), first=0, count=64)
    """

    name: str
    whole: Sizes
    offset: Sizes
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Box:
    """Elements `start` to `end` of a flattened parameter, as a box of a tensor."""

    name: str
    whole: Sizes
    offset: Sizes
    shape: Sizes
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Dimensions:
    """What the layout depends on. `rank` of `size` ranks that split each matrix; `tensors`: whole shapes by name."""

    tensors: Mapping[str, Sizes]
    heads: int
    groups: int  # key and value heads
    head_size: int
    rank: int = 0
    size: int = 1


def blocks_of(parameter: str, names: Sequence[str], sizes: Sizes, shape: Dimensions) -> list[Block]:
    """`parameter`: the Megatron name, with the number of the layer in the model. `names`: the Hugging Face names of its
    parts, in order. `sizes`: of this rank's part of the parameter."""
    parts = [_tensor(name, shape.tensors) for name in names]
    if ".linear_qkv." in parameter:
        return _by_group(parts, shape)
    if ".linear_fc1." in parameter:
        count = sizes[0] // 2
        at = 0 if ".experts." in parameter else shape.rank * count  # experts are not split
        return [part.block(at, i * count, count) for i, part in enumerate(parts)]
    (part,) = parts
    if parameter.endswith(("word_embeddings.weight", "output_layer.weight")):
        at = shape.rank * sizes[0]
        return [part.block(at, 0, max(0, min(sizes[0], part.whole[0] - at)))]  # further rows only pad the matrix
    columns = 0
    if ".linear_proj." in parameter or (".linear_fc2." in parameter and ".experts." not in parameter):
        columns = shape.rank * sizes[1]  # these are split by input
    return [part.block(0, 0, sizes[0], columns)]


def is_split(parameter: str) -> bool:
    """Whether the ranks of a tensor group have different rows or columns of it. Experts are not split."""
    if ".experts." in parameter or parameter.endswith(("linear_proj.bias", "linear_fc2.bias")):
        return False
    return any(
        name in parameter for name in ("linear_qkv.", "linear_proj.", "linear_fc", "embeddings.", "output_layer.")
    )


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor, or one expert of it, or its gate or up half."""

    name: str
    whole: Sizes
    lead: Sizes = ()  # index of the expert
    row: int = 0  # where its rows begin

    def block(self, at: int, first: int, count: int, column: int = 0) -> Block:
        """Its rows from `at`, as rows from `first` of the parameter."""
        rest = (column,) if len(self.whole) - len(self.lead) > 1 else ()
        return Block(self.name, self.whole, (*self.lead, self.row + at, *rest), first, count)


def _tensor(name: str, tensors: Mapping[str, Sizes]) -> _Tensor:
    """Transformers stacks experts: experts.3.gate_proj.weight is the first half of experts.gate_up_proj[3]."""
    if name in tensors:
        return _Tensor(name, tensors[name])
    found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    assert found is not None, f"no tensor {name}"
    stacked = f"{found[1]}.{'down' if found[3] == 'down' else 'gate_up'}_proj"
    whole = tensors[stacked]
    return _Tensor(stacked, whole, (int(found[2]),), whole[1] // 2 if found[3] == "up" else 0)


def _by_group(parts: Sequence[_Tensor], shape: Dimensions) -> list[Block]:
    """The queries of a key head, the key head, its value head; then the next one."""
    rows = (shape.heads // shape.groups * shape.head_size, shape.head_size, shape.head_size)
    own, blocks, first = shape.groups // shape.size, list[Block](), 0
    for group in range(shape.rank * own, (shape.rank + 1) * own):
        for part, count in zip(parts, rows, strict=True):
            blocks.append(part.block(group * count, first, count))
            first += count
    return blocks


def boxes(blocks: Sequence[Block], sizes: Sizes, start: int, end: int) -> Iterator[Box]:
    """Elements `start` to `end` of the flattened parameter, box by box, without those that only pad it. A range may
    begin and end within a row."""
    width = math.prod(sizes[1:])
    for block in blocks:
        low, high = max(start, block.first * width), min(end, (block.first + block.count) * width)
        while low < high:
            row, column = divmod(low, width)
            if column == 0 and high - low >= width:
                count = (high - low) // width
                stop, shape = low + count * width, (count, width)
            else:
                stop = min(high, (row + 1) * width)
                shape = (1, stop - low)
            yield _box(block, len(sizes), row, column, shape, low, stop)
            low = stop


def _box(block: Block, ndim: int, row: int, column: int, shape: tuple[int, int], start: int, end: int) -> Box:
    lead = len(block.whole) - ndim
    at = (block.offset[lead] + row - block.first, *(value + column for value in block.offset[lead + 1 :]))
    return Box(block.name, block.whole, (*block.offset[:lead], *at), (*(1,) * lead, *shape[:ndim]), start, end)
