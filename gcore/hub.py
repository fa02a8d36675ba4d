"""Ids of the Hugging Face hub -> folders on this machine. The local cache is used first, then the network.

    id, revision ──pin_model (driver)──> id, commit ──model_folder (every process)──> folder in this machine's cache

A configuration stores the id and the commit, not the folder, because every machine has its own cache. Processes that
start together on one machine download once, because huggingface_hub locks each file. This file imports neither torch
nor transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gcore.config.base import Model
from gcore.types import UserError

ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # Qwen/Qwen3-0.6B, gpt2
COMMIT = re.compile(r"[0-9a-f]{40}")
SMALL = (".json", ".model", ".txt", ".jinja", ".tiktoken")  # configuration and tokenizer
VOCABULARIES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
TIMEOUT_S = 20.0
MAX_HEADER = 100_000_000  # bytes, as in safetensors
AnyModel = TypeVar("AnyModel", bound=Model)


@dataclass(frozen=True, slots=True)
class Repo:
    """Repo("Qwen/Qwen3-0.6B", revision="main", key="model.path"); `key`: config key of the id, for error messages"""

    id: str
    revision: str | None
    key: str
    kind: str = "model"

    @property
    def is_pinned(self) -> bool:
        return COMMIT.fullmatch(self.revision or "") is not None

    @property
    def revision_key(self) -> str:
        section, _, name = self.key.rpartition(".")
        return f"{section}.tokenizer_revision" if name == "tokenizer" else f"{section}.revision"


def is_id(path: str) -> bool:
    """True if this can be an id. An existing folder of that name takes precedence."""
    return ID.fullmatch(path) is not None and not Path(path).exists()


def pin_model(model: AnyModel, key: str = "model") -> AnyModel:
    """The model with its revisions as commits. Configuration and tokenizer are in the cache afterwards."""
    changes: dict[str, str] = {}
    for name, path, revision in _paths(model):
        repo = Repo(path, revision, f"{key}.{name}")
        folder = _folder(repo, weights=False, code=model.trust_remote_code, pinning=True)
        if name == "path" and not is_id(path):
            changes["path"] = str(folder)  # of a run: the export of now
        if is_id(path):
            changes[repo.revision_key.rpartition(".")[2]] = folder.name  # .../snapshots/COMMIT
    return model.model_copy(update=changes)


def model_folder(model: Model, key: str = "model", *, weights: bool = False) -> Path:
    """The folder of model.path on this machine, with its weights if `weights`. Raises UserError if there is none."""
    repo = Repo(str(model.path), model.revision, f"{key}.path")
    return _folder(repo, weights=weights, code=model.trust_remote_code)


def tokenizer_folder(model: Model, key: str = "model") -> tuple[Path, str]:
    """The folder that has the tokenizer, and the key that names it."""
    if model.tokenizer is None:
        return model_folder(model, key), f"{key}.path"
    repo = Repo(model.tokenizer, model.tokenizer_revision, f"{key}.tokenizer")
    return _folder(repo, weights=False, code=model.trust_remote_code), repo.key


def config_file(path: str, key: str) -> Path:
    """Only config.json of the model with this id."""
    from huggingface_hub import HfApi, hf_hub_download

    repo = Repo(path, None, key)
    if (cached := _cached(repo)) is not None and (cached / "config.json").is_file():
        return cached / "config.json"
    try:
        HfApi().model_info(path, timeout=TIMEOUT_S)  # without a connection it fails at once; the download would retry
        return Path(hf_hub_download(path, "config.json"))
    except Exception as error:  # any error: `explain` makes a one-line message
        raise explain(error, repo) from error


def _paths(model: Model) -> Iterator[tuple[str, str, str | None]]:
    if model.path is not None:
        yield "path", model.path, model.revision
    if model.tokenizer is not None:
        yield "tokenizer", model.tokenizer, model.tokenizer_revision


def _folder(repo: Repo, *, weights: bool, code: bool, pinning: bool = False) -> Path:
    """`repo.id` is a hub id only with a commit, or while it is being pinned. Otherwise, if the driver used a relative
    folder, a process in another working directory would download a model of that name from the hub."""
    if not is_id(repo.id) or not (pinning or repo.is_pinned):
        folder = _newest_export(Path(repo.id))
        if not folder.is_dir():
            raise UserError(
                f"{repo.key}: no such folder: {folder} (expected a Hugging Face folder on this machine, or an id of "
                "the hub such as Qwen/Qwen3-0.6B)"
            )
        if repo.revision is not None:
            raise UserError(f"{repo.revision_key}={repo.revision}: {repo.key}={repo.id} is a folder; expected a hub id")
        if weights:
            _check_weights(folder, repo.key)
        return folder
    cached = _cached(repo)
    usable = cached is not None and (not weights or _has_weights(cached))
    if cached is not None and usable and has_vocabulary(cached) and (not pinning or _has_template(cached)):
        return cached
    try:
        return _download(repo, weights, code)
    except UserError:
        raise
    except Exception as error:  # any error: `explain` makes a one-line message
        if cached is not None and usable:
            return cached
        raise explain(error, repo) from error


def _newest_export(folder: Path) -> Path:
    """For `runs/NAME` the newest model that the run exported (checkpoint.export); other folders as they are."""
    exported = folder.glob("hf/step_*") if not (folder / "config.json").exists() else ()
    numbered = {int(path.name[5:]): path for path in exported if path.name[5:].isdigit()}
    return numbered[max(numbered)] if numbered else folder


def _cached(repo: Repo) -> Path | None:
    """The snapshot in the local cache, complete or not."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        for name in ("config.json", "tokenizer_config.json"):
            file = try_to_load_from_cache(repo.id, name, revision=repo.revision)
            if isinstance(file, str):
                return Path(file).parent
    except HFValidationError as error:
        raise UserError(f"{repo.key}={repo.id}: no such folder here, and not an id of the hub: {error}") from None
    return None


def has_vocabulary(folder: Path) -> bool:
    return any(any(folder.glob(name)) for name in VOCABULARIES)


def _has_weights(folder: Path) -> bool:
    """True if all weights are there: other tools may have cached only some of the files."""
    for name in WEIGHTS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                shards = set(json.loads(index.read_text())["weight_map"].values())
            except (ValueError, KeyError):
                return False
            return all((folder / shard).is_file() for shard in shards)
        if (folder / name).is_file():
            return True
    return False


def _check_weights(folder: Path, key: str) -> None:
    """UserError if a folder of the user has no weights, or an incomplete file, which libraries would not name."""
    if (folder / "model_index.json").is_file():  # a pipeline of diffusers
        folder = folder / "transformer"
    if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin", "*.pt", "*.gguf")):
        raise UserError(f"{key}={folder}: no weights there; expected files *.safetensors")
    for index in folder.glob("*.safetensors.index.json"):
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{key}: {index} cannot be read: {type(error).__name__}: {error}") from None
        if missing := sorted(name for name in names if not (folder / name).is_file()):
            raise UserError(f"{key}={folder}: no file {missing[0]}, which {index.name} names")
    for file in sorted(folder.glob("*.safetensors")):
        if problem := _damage(file):
            raise UserError(f"{key}: {file} is no complete safetensors file: {problem}; copy or download it again")


def _damage(file: Path) -> str:
    """What is wrong with a safetensors file, by its header and its size; empty: nothing."""
    try:
        size = file.stat().st_size
        with file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            if not 0 < length <= min(size - 8, MAX_HEADER):
                return f"{size:,} bytes, and no header"
            header = json.loads(content.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return f"its header is damaged: {type(error).__name__}: {error}"
    expected = 8 + length + max(ends, default=0)
    return "" if size == expected else f"{size:,} bytes; its header says {expected:,}"


def _has_template(folder: Path) -> bool:
    """If False, the snapshot is of a base model or lacks a file: the caller checks the hub."""
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"
    try:
        return file.is_file() and bool(json.loads(file.read_text()).get("chat_template"))
    except ValueError:
        return False


def _download(repo: Repo, weights: bool, code: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    info = HfApi().model_info(repo.id, revision=repo.revision, timeout=TIMEOUT_S)
    names = wanted([file.rfilename for file in info.siblings or ()], weights, code)
    if weights and not any(name.endswith((".safetensors", ".bin")) for name in names):
        raise UserError(f"{repo.key}={repo.id}: has no weights; expected a model with safetensors")
    if not names:
        raise UserError(f"{repo.key}={repo.id}: has neither config.json nor a tokenizer; expected a language model")
    return Path(snapshot_download(repo.id, revision=repo.revision, allow_patterns=names))


def wanted(names: Iterable[str], weights: bool, code: bool) -> list[str]:
    """Which files of a model to download: never the same weights in two formats, no folders (original/, onnx/)."""
    top = [name for name in names if "/" not in name]
    small = [name for name in top if name.endswith((*SMALL, ".py") if code else SMALL)]
    if not weights:
        return small
    tensors = [name for name in top if name.endswith(".safetensors") and not name.startswith("consolidated")]
    return small + (tensors or [name for name in top if name.startswith("pytorch_model") and name.endswith(".bin")])


def explain(error: Exception, repo: Repo) -> UserError:
    """A one-line message for any exception of huggingface_hub or datasets."""
    from huggingface_hub import constants, errors

    chain: list[BaseException] = [error]
    while True:
        last = chain[-1]
        cause = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if cause is None:
            break
        chain.append(cause)

    def has(kind: type[Exception]) -> bool:
        return any(isinstance(link, kind) for link in chain)

    prefix, what = f"{repo.key}={repo.id}: no such file or folder here", repo.kind
    if has(errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{'datasets/' if what == 'dataset' else ''}{repo.id}"
        return UserError(f"{repo.key}={repo.id}: gated on the hub; accept its terms at {page} and set HF_TOKEN")
    if has(errors.RevisionNotFoundError):
        return UserError(f"{repo.revision_key}={repo.revision}: {repo.id} has no such branch, tag or commit")
    if has(errors.RepositoryNotFoundError):
        return UserError(f"{prefix}, and no such {what} on the hub (set HF_TOKEN if it is private)")
    prefix += f", not in the local cache ({constants.HF_HUB_CACHE if what == 'model' else constants.HF_HOME})"
    if has(errors.OfflineModeIsEnabled):
        return UserError(f"{prefix}, and HF_HUB_OFFLINE forbids access to the hub")
    what, first = type(last).__name__, " ".join(str(last).split())[:200]
    if any(has(kind) for kind in (ConnectionError, TimeoutError)) or any("httpx" in type(c).__module__ for c in chain):
        return UserError(f"{prefix}, and {constants.ENDPOINT} does not respond: {what}: {first}")
    return UserError(f"{repo.key}={repo.id}: cannot be loaded from the hub: {what}: {first}")
