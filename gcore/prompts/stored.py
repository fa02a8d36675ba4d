"""What the package `datasets` reads: hub ids (the local cache first), and folders of datasets.

openai/gsm8k, subset, revision ──cached?──> Arrow files in this machine's cache ──split──> rows
                                   └── no: downloaded and converted by `datasets`, at one commit
"""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

from gcore.config.base import Stored
from gcore.hub import COMMIT, TIMEOUT_S, Repo, explain
from gcore.prompts.files import Rows, refuse_media
from gcore.types import UserError


def pin_dataset(spec: Any, key: str) -> Any:
    """A dataset of the hub with its commit, subset and split. `spec` is a Stored, of any kind."""
    builder, commit = _prepared(spec, key)
    split = _split(builder.info.splits, spec, key)
    return spec.model_copy(update={"revision": commit, "subset": builder.config.name, "split": split})


def read_id(spec: Stored, size: int | None, key: str) -> Rows:
    """Of a dataset that is pinned."""
    builder, _ = _prepared(spec, key)
    split = _split(builder.info.splits, spec, key)
    try:
        return _rows(builder.as_dataset(split=split), size, key)
    except ValueError as error:  # a slice that is not one: train[x]
        raise UserError(f"{key}.split={split}: {' '.join(str(error).split())}") from None


def read_folder(spec: Stored, size: int | None, key: str) -> Rows:
    """What save_to_disk wrote, or a folder of data files such as a copy of a dataset on the hub."""
    datasets, path = _library(spec, key), str(spec.path)
    try:
        found = datasets.load_from_disk(path)
    except FileNotFoundError:
        try:
            found = datasets.load_dataset(path, name=spec.subset)
        except Exception as error:  # ValueError, DataFilesNotFoundError, DatasetGenerationError, ...
            first = " ".join(str(error).split())[:300]
            raise UserError(f"{key}.path: {path} is not a dataset folder: {first}") from None
    if isinstance(found, datasets.DatasetDict):
        split = _split(found, spec, key)
        if split not in found:
            raise UserError(f"{key}.split={split}: {path} has {', '.join(found)}")
        found = found[split]
    elif spec.split is not None:
        raise UserError(f"{key}.split={spec.split}: {path} has no splits")
    return _rows(found, size, key)


def _rows(dataset: Any, size: int | None, key: str) -> Rows:
    refuse_media(dataset.features.to_dict(), key)
    num_rows = len(dataset) if size is None else min(size, len(dataset))
    return Rows(num_rows, dataset.with_format(None).__getitem__, dataset.column_names)


def _library(spec: Stored, key: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError:
        raise UserError(
            f"{key}.path={spec.path}: the package datasets reads folders and hub ids; pip install 'gcore-rl[datasets]'"
        ) from None


def _split(splits: Any, spec: Stored, key: str) -> str:
    """A held-out set must not turn out to be the training split: there, the split is named."""
    names = list(splits or ())
    if spec.split is not None:
        if spec.split.partition("[")[0] in names:  # train[:1000] is a part of train
            return spec.split
        raise UserError(f"{key}.split={spec.split}: {spec.path} has {', '.join(names)}")
    if "train" in names and key.endswith("train"):
        return "train"
    raise UserError(f"{key}.split: not set, and {spec.path} has {', '.join(names)}; expected one of them")


# ---- hub ids ----


def _prepared(spec: Stored, key: str) -> tuple[Any, str]:
    """A builder whose files are in the cache, so that splits can be opened; and the commit."""
    datasets, path = _library(spec, key), str(spec.path)
    repo = Repo(path, spec.revision, f"{key}.path", "dataset")
    datasets.utils.logging.set_verbosity_error()
    if (cached := _cached(spec, asked=False)) is not None:
        return cached
    commit = ""
    try:
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        commit = str(HfApi().dataset_info(path, revision=spec.revision, timeout=TIMEOUT_S).sha)
        with contextlib.suppress(EntryNotFoundError):  # lets the local cache know which commit the revision is
            hf_hub_download(path, "README.md", repo_type="dataset", revision=spec.revision)
        builder = datasets.load_dataset_builder(path, name=spec.subset, revision=commit)
        builder.download_and_prepare()
        return builder, commit
    except Exception as error:  # see explain
        if isinstance(error, ValueError) and "onfig" in str(error):  # Config name is missing; BuilderConfig not found
            raise _no_subset(datasets, spec, commit, key, error) from None
        if (cached := _cached(spec, asked=True)) is not None:
            return cached
        raise explain(error, repo) from error


def _no_subset(datasets: Any, spec: Stored, commit: str, key: str, error: Exception) -> UserError:
    try:
        has = "has " + ", ".join(datasets.get_dataset_config_names(spec.path, revision=commit))
    except Exception:
        has = " ".join(str(error).split())[:300]
    given = "not set" if spec.subset is None else repr(spec.subset)
    return UserError(f"{key}.subset: {given}, and {spec.path} {has}; expected one of them")


def _cached(spec: Stored, asked: bool) -> tuple[Any, str] | None:
    """The same from Arrow files that `datasets` made before: CACHE/openai___gsm8k/SUBSET/VERSION/COMMIT. None: there
    are none. `asked`: the hub did not answer, so that the only subset that is there will do."""
    from datasets import config as settings
    from datasets.naming import camelcase_to_snakecase
    from datasets.packaged_modules.cache.cache import Cache

    owner, _, name = str(spec.path).rpartition("/")
    root = Path(settings.HF_DATASETS_CACHE) / "___".join([*([owner] if owner else []), camelcase_to_snakecase(name)])
    commit = _commit(spec)
    found = [
        folder
        for folder in root.glob(f"{spec.subset or '*'}/*/{commit or '*'}")
        if COMMIT.fullmatch(folder.name) and (folder / "dataset_info.json").is_file()
    ]
    found.sort(key=lambda folder: folder.stat().st_mtime)
    subsets = {folder.parts[-3] for folder in found}
    if not found or (spec.revision is not None and commit is None):
        return None
    if spec.subset is None and subsets != {"default"} and not (asked and len(subsets) == 1):
        return None
    *_, subset, version, commit = found[-1].parts
    builder = Cache(dataset_name=name, config_name=subset, version=version, hash=commit, repo_id=str(spec.path))
    return builder, commit


def _commit(spec: Stored) -> str | None:
    """The commit of the revision, as far as the hub's local cache knows."""
    from huggingface_hub import constants

    if spec.revision is not None and COMMIT.fullmatch(spec.revision):
        return spec.revision
    folder = "datasets--" + str(spec.path).replace("/", "--")
    file = Path(constants.HF_HUB_CACHE) / folder / "refs" / (spec.revision or "main")
    return file.read_text().strip() if file.is_file() else None
