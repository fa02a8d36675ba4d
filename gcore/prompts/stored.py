"""Where rows are stored: files (files.py), folders, hub ids (from the local cache if possible), or a Python program.

openai/gsm8k, subset, revision ──cached?──> Arrow files in this machine's cache ──split──> rows
                                   └── no: `datasets` downloads and converts one commit
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from gcore import user_files
from gcore.config.data import Dataset
from gcore.config.objects import is_object, object_of
from gcore.hub import COMMIT, TIMEOUT_S, Repo, explain, is_id
from gcore.prompts.files import READERS, DatasetRows, computed_rows, read_file, reject_media, short
from gcore.types import UserError


def read_rows(spec: Dataset, key: str, media: Collection[str] = ()) -> DatasetRows:
    """Rows of a file, a folder or a hub id, or those that a Python program passed. `media`: columns of images are
    allowed, and are not decoded."""
    if spec.path is not None and is_object(spec.path):
        rows: Any = object_of(spec.path, f"{key}.path")
        if len(rows) and not isinstance(rows[0], Mapping):
            raise UserError(f"{key}: the first row is {short(rows[0])}; expected a mapping from column to value")
        return computed_rows(len(rows), lambda index: dict(rows[index]), spec.size)
    path = user_files.find(spec.path or "")
    if is_hub_dataset(spec) and spec.revision is not None:  # the driver has pinned it
        return _read_id(spec, key, media)
    if not path.exists():
        raise UserError(f"{key}.path: no such file or folder: {path} (expected one on this machine, or a hub id)")
    if spec.revision is not None:
        raise UserError(f"{key}.revision={spec.revision}: {path} is on this machine; expected a hub id")
    if path.is_dir():
        return _read_folder(spec, key, media)
    if unused := [name for name in ("subset", "split") if getattr(spec, name) is not None]:
        raise UserError(f"{key}.{unused[0]}: {path} is a file; expected a dataset's folder or a hub id")
    return read_file(path, spec.size, key, media)


def media_folder(spec: Dataset) -> Path | None:
    """The folder that paths of images in the dataset are relative to; None for tasks and hub ids."""
    if spec.path is None or is_hub_dataset(spec):
        return None
    path = user_files.find(spec.path)
    return path if path.is_dir() else path.parent


def is_hub_dataset(spec: Dataset) -> bool:
    return spec.path is not None and is_id(spec.path) and not spec.path.endswith(tuple(READERS))


def pin_rows(spec: Dataset, key: str) -> Dataset:
    """A hub dataset with its commit, subset and split filled in; other datasets unchanged."""
    if not is_hub_dataset(spec):
        return spec
    builder, commit = _prepared(spec, key)
    split = _split(builder.info.splits, spec, key)
    return spec.model_copy(update={"revision": commit, "subset": builder.config.name, "split": split})


def _read_id(spec: Dataset, key: str, media: Collection[str]) -> DatasetRows:
    """Rows of a hub dataset whose commit is pinned."""
    builder, _ = _prepared(spec, key)
    split = _split(builder.info.splits, spec, key)
    try:
        return _rows(builder.as_dataset(split=split), spec.size, key, media)
    except ValueError as error:  # an invalid slice such as train[x]
        raise UserError(f"{key}.split={split}: {' '.join(str(error).split())}") from None


def _read_folder(spec: Dataset, key: str, media: Collection[str]) -> DatasetRows:
    """Rows of a folder written by save_to_disk, or of data files such as a copy of a hub dataset."""
    datasets, path = _library(spec, key), str(spec.path)
    try:
        dataset = datasets.load_from_disk(path)
    except FileNotFoundError:
        try:
            dataset = datasets.load_dataset(path, name=spec.subset)
        except Exception as error:  # ValueError, DataFilesNotFoundError, DatasetGenerationError, ...
            first = " ".join(str(error).split())[:300]
            raise UserError(f"{key}.path: {path} is not a dataset folder: {first}") from None
    if isinstance(dataset, datasets.DatasetDict):
        split = _split(dataset, spec, key)
        if split not in dataset:
            raise UserError(f"{key}.split={split}: no such split in {path}; expected one of {', '.join(dataset)}")
        dataset = dataset[split]
    elif spec.split is not None:
        raise UserError(f"{key}.split={spec.split}: {path} has no splits; expected {key}.split unset")
    return _rows(dataset, spec.size, key, media)


def _rows(dataset: Any, size: int | None, key: str, media: Collection[str]) -> DatasetRows:
    """`media`: images stay as they are stored, {"bytes": ..., "path": ...}: `datasets` would decode them unchecked."""
    num_rows = len(dataset) if size is None else min(size, len(dataset))
    if media:
        table = dataset.with_format("arrow")
        return DatasetRows(num_rows, lambda i: table[i : i + 1].to_pylist()[0], dataset.column_names)
    reject_media(dataset.features.to_dict(), key)
    return DatasetRows(num_rows, dataset.with_format(None).__getitem__, dataset.column_names)


def _library(spec: Dataset, key: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError:
        raise UserError(
            f"{key}.path={spec.path}: folders and hub ids need the package datasets: pip install 'gcore-rl[datasets]'"
        ) from None


def _split(splits: Any, spec: Dataset, key: str) -> str:
    """The split to read. data.eval must name its split, so that it is not the training split by accident."""
    names = list(splits or ())
    if spec.split is not None:
        if spec.split.partition("[")[0] in names:  # train[:1000] is a part of train
            return spec.split
        raise UserError(f"{key}.split={spec.split}: no such split in {spec.path}; expected one of {', '.join(names)}")
    if "train" in names and not key.startswith("data.eval"):
        return "train"
    raise UserError(f"{key}.split: not set, and {spec.path} has {', '.join(names)}; expected one of them")


# ---- hub ids ----


def _prepared(spec: Dataset, key: str) -> tuple[Any, str]:
    """A builder with its files in the cache, so that splits can be opened; and the commit."""
    datasets, path = _library(spec, key), str(spec.path)
    repo = Repo(path, spec.revision, f"{key}.path", "dataset")
    datasets.utils.logging.set_verbosity_error()
    if (cached := _cached(spec, offline=False)) is not None:
        return cached
    commit = ""
    try:
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        commit = str(HfApi().dataset_info(path, revision=spec.revision, timeout=TIMEOUT_S).sha)
        with contextlib.suppress(EntryNotFoundError):  # records the revision's commit in the local cache
            hf_hub_download(path, "README.md", repo_type="dataset", revision=spec.revision)
        builder = datasets.load_dataset_builder(path, name=spec.subset, revision=commit)
        builder.download_and_prepare()
        return builder, commit
    except Exception as error:  # see explain
        if isinstance(error, ValueError) and "onfig" in str(error):  # Config name is missing; BuilderConfig not found
            raise _no_subset(datasets, spec, commit, key, error) from None
        if (cached := _cached(spec, offline=True)) is not None:
            return cached
        raise explain(error, repo) from error


def _no_subset(datasets: Any, spec: Dataset, commit: str, key: str, error: Exception) -> UserError:
    try:
        has = "has " + ", ".join(datasets.get_dataset_config_names(spec.path, revision=commit))
    except Exception:
        has = " ".join(str(error).split())[:300]
    given = "not set" if spec.subset is None else repr(spec.subset)
    return UserError(f"{key}.subset: {given}, and {spec.path} {has}; expected one of them")


def _cached(spec: Dataset, offline: bool) -> tuple[Any, str] | None:
    """The builder and commit from cached Arrow files: CACHE/openai___gsm8k/SUBSET/VERSION/COMMIT. None if there are
    none. `offline`: the hub did not answer; if only one subset is cached, it is used."""
    from datasets import config as settings
    from datasets.naming import camelcase_to_snakecase
    from datasets.packaged_modules.cache.cache import Cache

    owner, _, name = str(spec.path).rpartition("/")
    root = Path(settings.HF_DATASETS_CACHE) / "___".join([*([owner] if owner else []), camelcase_to_snakecase(name)])
    commit = _commit(spec)
    commits = [
        folder
        for folder in root.glob(f"{spec.subset or '*'}/*/{commit or '*'}")
        if COMMIT.fullmatch(folder.name) and (folder / "dataset_info.json").is_file()
    ]
    commits.sort(key=lambda folder: folder.stat().st_mtime)
    subsets = {folder.parts[-3] for folder in commits}
    if not commits or (spec.revision is not None and commit is None):
        return None
    if spec.subset is None and subsets != {"default"} and not (offline and len(subsets) == 1):
        return None
    *_, subset, version, commit = commits[-1].parts
    builder = Cache(dataset_name=name, config_name=subset, version=version, hash=commit, repo_id=str(spec.path))
    return builder, commit


def _commit(spec: Dataset) -> str | None:
    """The commit of the revision if the hub's local cache has it, else None."""
    from huggingface_hub import constants

    if spec.revision is not None and COMMIT.fullmatch(spec.revision):
        return spec.revision
    folder = "datasets--" + str(spec.path).replace("/", "--")
    file = Path(constants.HF_HUB_CACHE) / folder / "refs" / (spec.revision or "main")
    return file.read_text().strip() if file.is_file() else None
