"""Recipes, scenarios and examples: folders of the repository, which a wheel has inside of `gcore`.

named("quickstart", "recipes")     ──> .../recipes/quickstart.yaml
find("examples/digits.py")         ──> .../examples/digits.py, if there is no such file here
"""

from __future__ import annotations

import shutil
from pathlib import Path

from gcore.types import UserError

PACKAGE = Path(__file__).parent
ROOT = PACKAGE / "shipped" if (PACKAGE / "shipped").is_dir() else PACKAGE.parent  # a wheel (setup.py), or a checkout
FOLDERS = ("recipes", "scenarios", "examples")


def find(name: str | Path) -> Path:
    """The user's file of this name. If there is none: the shipped one with this path in the repository."""
    path = Path(name).expanduser()
    shipped = ROOT / path
    is_shipped = path.parts[:1] and path.parts[0] in FOLDERS and ".." not in path.parts and shipped.is_file()
    return shipped if is_shipped and not path.exists() else path


def named(name: str | Path, folder: str) -> Path:
    """The same, also for the name of a shipped YAML file alone."""
    path = find(name)
    shipped = ROOT / folder / f"{path}.yaml"
    return shipped if str(path) in names(folder) and not path.exists() else path


def names(folder: str) -> dict[str, str]:
    """Name -> the first sentence of its comment."""
    return {path.stem: _title(path.read_text()) for path in sorted((ROOT / folder).glob("*.yaml"))}


def _title(text: str) -> str:
    lines = (line.removeprefix("#").strip() for line in text.splitlines() if not line.startswith("# yaml-language"))
    comment: list[str] = []
    for line in lines:
        if not line:
            break
        comment.append(line)
    return " ".join(comment).partition(". ")[0].rstrip(".:")


def copy_to(folder: Path) -> list[Path]:
    """Copies all of them, as the repository has them. Raises UserError instead of overwriting."""
    targets = [folder / name for name in FOLDERS]
    if existing := [str(target) for target in targets if target.exists()]:
        raise UserError(f"{', '.join(existing)}: exists; expected a folder without {', '.join(FOLDERS)}")
    for name, target in zip(FOLDERS, targets, strict=True):
        shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
    return targets
