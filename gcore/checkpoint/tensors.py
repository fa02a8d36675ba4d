"""Folders of sharded tensors (torch.distributed.checkpoint): each rank writes its shards; any number of ranks reads.

write (N ranks) ──> folder: .metadata (where each shard is), __RANK_0.distcp ──> read_into (M ranks, sharded anew)
                                                                            └──> read (one process, some tensors)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from gcore.types import UserError


def write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Collective: all ranks pass the same names. Of a tensor that several ranks hold, one of them writes it."""
    writer = FileSystemWriter(folder, sync_files=False)  # store.commit writes to disk what it checksums
    metadata = save(dict(tensors), storage_writer=writer)
    files = {info.relative_path for info in (metadata.storage_data or {}).values()}
    if missing := sorted(name for name in files if not (folder / name).is_file()):
        raise UserError(
            f"{folder} lacks {missing[0]}, which another trainer rank wrote; expected a folder that the machines of "
            "all trainer ranks share (key: run.dir)"
        )


def read_into(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Collective: fill the tensors, which may be sharded differently than those that were written."""
    with torch.no_grad():
        load(dict(tensors), storage_reader=FileSystemReader(folder))


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the whole tensors."""
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: tuple(entry.size) for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def read(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Some tensors, whole and in float32. Not a collective."""
    known = shapes(folder)
    found = {name: torch.empty(known[name]) for name in names}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(dict(found), storage_reader=FileSystemReader(folder), no_dist=True)
    return found
