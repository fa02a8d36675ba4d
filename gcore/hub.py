"""Ids of the Hugging Face hub -> folders on this machine. The local cache is used first, then the network.

    id, revision ──pin_model (driver)──> id, commit ──model_folder (every process)──> folder in this machine's cache

A configuration stores the id and the commit, not the folder, because every machine has its own cache. Processes that
start together on one machine download once, because huggingface_hub locks each file. This file imports neither torch
nor transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
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
AnyModel = TypeVar("AnyModel", bound=Model)


@dataclass(frozen=True, slots=True)
class Repo:
    """Repo("Qwen/Qwen3-0.6B", revision="main", key="model.path"); `key`: config key of the id, for error messages"""

    id: str
    revision: str | None
    key: str
    kind: str = "model"
    code: bool = False  # also its Python files

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
    for name in ("path", "tokenizer"):
        if getattr(model, name) is not None:
            repo = _repo(model, key, name)
            folder = _folder(repo, weights=False, pinning=True)
            if is_id(repo.id):
                changes[repo.revision_key.rpartition(".")[2]] = folder.name  # .../snapshots/COMMIT
            elif name == "path":
                changes["path"] = str(folder)  # of a run: the export of now
    return model.model_copy(update=changes)


def model_folder(model: Model, key: str = "model", *, weights: bool = False) -> Path:
    """The folder of model.path on this machine, with its weights if `weights`. Raises UserError if there is none."""
    return _folder(_repo(model, key, "path"), weights=weights)


def tokenizer_folder(model: Model, key: str = "model") -> tuple[Path, str]:
    """The folder that has the tokenizer, and the key that names it."""
    repo = _repo(model, key, "path" if model.tokenizer is None else "tokenizer")
    return _folder(repo, weights=False), repo.key


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


def _repo(model: Model, key: str, name: str) -> Repo:
    """Of model.path or of model.tokenizer."""
    revision = model.revision if name == "path" else model.tokenizer_revision
    return Repo(str(getattr(model, name)), revision, f"{key}.{name}", code=model.trust_remote_code)


def _folder(repo: Repo, *, weights: bool, pinning: bool = False) -> Path:
    """`repo.id` is a hub id only with a commit, or while it is being pinned. Otherwise, if the driver used a relative
    folder, a process in another working directory would download a model of that name from the hub."""
    if not is_id(repo.id) or not (pinning or COMMIT.fullmatch(repo.revision or "")):
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
        return _download(repo, weights)
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
                return all((folder / name).is_file() for name in _files_of(index))
            except (ValueError, KeyError):
                return False
        if (folder / name).is_file():
            return True
    return False


def _files_of(index: Path) -> set[str]:
    return set(json.loads(index.read_text())["weight_map"].values())


def _check_weights(folder: Path, key: str) -> None:
    """UserError if a folder of the user has no weights, or an incomplete file, which libraries would not name."""
    from safetensors import SafetensorError, safe_open

    if (folder / "model_index.json").is_file():  # a pipeline of diffusers
        folder = folder / "transformer"
    if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin", "*.pt", "*.gguf")):
        raise UserError(f"{key}={folder}: no weights there; expected files *.safetensors")
    for index in folder.glob("*.safetensors.index.json"):
        try:
            names = _files_of(index)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{key}: {index} cannot be read: {type(error).__name__}: {error}") from None
        if missing := sorted(name for name in names if not (folder / name).is_file()):
            raise UserError(f"{key}={folder}: no file {missing[0]}, which {index.name} names")
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "np"):  # compares its header with its size
                pass
        except (OSError, SafetensorError) as error:
            problem = f"{file.stat().st_size:,} bytes, {str(error).removeprefix('Error while deserializing header: ')}"
            raise UserError(
                f"{key}: {file} is no complete safetensors file: {problem}; copy or download it again"
            ) from None


def _has_template(folder: Path) -> bool:
    """If False, the snapshot is of a base model or lacks a file: the caller checks the hub."""
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"
    try:
        return file.is_file() and bool(json.loads(file.read_text()).get("chat_template"))
    except ValueError:
        return False


def _download(repo: Repo, weights: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    info = HfApi().model_info(repo.id, revision=repo.revision, timeout=TIMEOUT_S)
    names = wanted([file.rfilename for file in info.siblings or ()], weights, repo.code)
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

    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        chain.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    last = chain[-1]

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
