"""The user's code and small files of a recipe: found, imported, and sent to the processes on other machines.

driver: pack(names) ──bytes──> Ray ──> a process on a node: unpack ──> find("rewards.py"), load_function("my_package:f")

The archive contains the files that the recipe names, under the names in the recipe, and the modules that the driver has
imported from outside of the installation: those that the files import. A process on a node uses these copies also if a
file of that name exists there, which may be another version.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import io
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gcore import shipped
from gcore.config.objects import is_object, object_of
from gcore.types import UserError

FOLDER = "GCORE_USER_FILES"  # environment: the unpacked archive
INDEX, MODULES = "index.json", "modules"
MAX_MB = 32  # of one file or package; larger ones must be on all nodes
SUFFIXES = (".py", ".json", ".jsonl", ".yaml", ".yml", ".toml", ".txt", ".csv", ".jinja", ".j2")  # of a package
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same files make the same archive


@dataclass(frozen=True, slots=True)
class Archive:
    """Archive(data=b"PK...", left_out={"data/train.jsonl": 911})"""

    data: bytes  # empty: nothing to send
    left_out: dict[str, int]  # too large: name in the recipe, or of a package -> MB


def find(name: str) -> Path:
    """The file that a recipe names `name`: the driver's copy if it sent one, otherwise the file of this machine, or
    one of G-Core's examples."""
    if folder := os.environ.get(FOLDER):
        index: dict[str, str] = json.loads((Path(folder) / INDEX).read_text())
        if name in index:
            return Path(folder) / index[name]
    return shipped.find(name)


def template_text(value: str, key: str) -> str:
    """A Jinja template, or the content of the file that `value` names: a template contains a brace."""
    if "{" in value:
        return value
    file = find(value)
    if not file.is_file():
        raise UserError(f"{key}: no such file: {file} (expected a path, or a Jinja template)")
    return file.read_text(encoding="utf-8")


def pack(names: Iterable[str]) -> Archive:
    """`names`: files of the recipe; those that are no files here are ignored."""
    members: dict[str, Path] = {}
    index: dict[str, str] = {}
    left_out: dict[str, int] = {}
    for name in sorted(set(names)):
        file = shipped.find(name)
        if not file.is_file():
            continue
        if (size := file.stat().st_size >> 20) >= MAX_MB:
            left_out[name] = size
            continue
        index[name] = f"files/{len(index)}/{file.name}"
        members[index[name]] = file
    for name, files in own_modules().items():
        if (size := sum(file.stat().st_size for file in files.values()) >> 20) >= MAX_MB:
            left_out[name] = size
        else:
            members |= {f"{MODULES}/{place}": file for place, file in files.items()}
    if not members:
        return Archive(b"", left_out)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(zipfile.ZipInfo(INDEX, EPOCH), json.dumps(index))
        for place, file in sorted(members.items()):
            archive.writestr(zipfile.ZipInfo(place, EPOCH), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return Archive(stream.getvalue(), left_out)


def own_modules() -> dict[str, dict[str, Path]]:
    """Packages and modules that this process has imported from outside of the installation, without G-Core itself:
    {"my_package": {"my_package/__init__.py": Path(...), "my_package/words.txt": Path(...)}}"""
    paths = sysconfig.get_paths()
    installed = [sys.prefix, sys.base_prefix, *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))]
    roots = {Path(path).resolve() for path in installed}
    modules: dict[str, dict[str, Path]] = {}
    for name in sorted({name.partition(".")[0] for name in sys.modules}):
        module = sys.modules.get(name)
        if name in ("gcore", "__main__") or name.startswith("gcore_user_") or module is None:
            continue
        places = list(getattr(module, "__path__", ())) or [getattr(module, "__file__", None) or ""]
        for path in (Path(place).resolve() for place in places if place):
            if not (path.is_dir() or (path.is_file() and path.suffix == ".py")):
                continue
            if {"site-packages", "dist-packages"} & {*path.parts} or any(map(path.is_relative_to, roots)):
                continue
            files = {path.name: path} if path.is_file() else _files(path, name)
            modules.setdefault(name, {}).update(files)
    return modules


def _files(folder: Path, name: str) -> dict[str, Path]:
    files = (path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    return {f"{name}/{path.relative_to(folder).as_posix()}": path for path in files}


def unpack(data: bytes) -> None:
    """On a node. This process and its children use the files. Processes with the same archive share a folder."""
    root = Path(tempfile.gettempdir()) / f"gcore-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    about = root.lstat()
    if root.is_symlink() or about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise UserError(f"{root}: expected a folder that only this user can write to; remove it")
    folder = root / f"files-{hashlib.sha256(data).hexdigest()[:16]}"
    if not folder.exists():
        temporary = tempfile.mkdtemp(dir=root)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            archive.extractall(temporary)
        try:
            os.rename(temporary, folder)
        except OSError:  # another process was first
            shutil.rmtree(temporary, ignore_errors=True)
    modules = str(folder / MODULES)
    os.environ[FOLDER] = str(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (modules, os.environ.get("PYTHONPATH"))))
    sys.path.insert(0, modules)
    importlib.invalidate_caches()


# ---- a function by its path -----------------------------------------------------------------------------------------


def load_function(path: str, key: str = "rewards.functions.path") -> Callable[..., Any]:
    """`package.module:function` or `file.py:function`. `key` is the config key of the path, for messages."""
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise UserError(f"{key}: expected package.module:function or file.py:function, got {path!r}")
    function: Callable[..., Any]
    if is_object(path):
        function = object_of(path, key)
    else:
        module = _imported(place, key)
        if not hasattr(module, name):
            close = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("__")], 1)
            raise UserError(f"{key}: {place} has no {name!r}" + (f"; did you mean {close[0]}?" if close else ""))
        function = getattr(module, name)
    if not callable(function):
        raise UserError(f"{key}: {path} is of type {type(function).__name__}; expected a function")
    return function


def _imported(place: str, key: str) -> ModuleType:
    file = find(place).resolve() if place.endswith(".py") else None
    if file is not None and not file.is_file():
        where = "" if Path(place).is_absolute() else f" in the current folder, {Path.cwd()}"
        raise UserError(f"{key}: no such file: {place}{where}")
    try:
        return importlib.import_module(place) if file is None else _import_file(file)
    except (Exception, SystemExit) as error:
        raise UserError(f"{key}: {place} does not import: {one_line(error)}") from error


def _import_file(file: Path) -> ModuleType:
    """Imports a file under a unique name and registers the module, so that its classes pickle and its dataclasses
    resolve."""
    unique = f"gcore_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
