"""A wheel of this checkout, in an environment and a folder of its own: recipes by name, and the quickstart learns."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from gcore import shipped
from tests.e2e.helpers import rows, steps

ROOT = Path(__file__).parents[2]
SOURCES = ("gcore", *shipped.FOLDERS, "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
# what a recipe needs first, by the words of the message
NEEDS = {
    "distill": "rewards.judges.0.model.path=runs/teacher: no such file or folder",
    "panel": "rewards.models.0.model.path: no such folder: runs/panel/scorer",
    "reward_model": "data.train.path: no such file or folder: runs/pairs/train.jsonl",
    "smollm2": "model.path=models/smollm2: no such file or folder",
}
NEEDS_PACKAGE = {"diffusion": "diffusers", "vision": "PIL", "vllm_judge": "vllm"}
NEEDS_HUB = ("gsm8k",)

pytestmark = pytest.mark.release


def environment() -> dict[str, str]:
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {k: v for k, v in os.environ.items() if k not in left_out} | {"HF_HUB_OFFLINE": "1"}


def ran(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), cwd=cwd, env=environment(), capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Only G-Core is installed anew; other packages are those of this environment, without its editable G-Core."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = ran("git", "ls-files", "-z", *SOURCES, cwd=ROOT).stdout.split("\0")
    for name in filter(None, listed):
        if (ROOT / name).exists():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    built = ran(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, folder / "source", cwd=folder)
    assert built.returncode == 0, built.stdout + built.stderr
    made = ran(sys.executable, "-m", "venv", "--without-pip", folder / "fresh", cwd=folder)
    assert made.returncode == 0, made.stderr
    python = folder / "fresh" / "bin" / "python"
    (wheel,) = folder.glob("gcore_rl-*.whl")
    done = ran(*pip, "--python", python, "install", "--no-deps", wheel, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (packages,) = (folder / "fresh" / "lib").glob("python*/site-packages")
    # A line of a .pth file is a path; the .pth files in that folder, such as that of a checkout, are not read.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return SimpleNamespace(python=python, command=python.with_name("gcore"), packages=packages)


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    return tmp_path


def test_it_is_the_wheel_and_not_the_checkout(installed, empty):
    code = "import gcore, importlib.util as u; print(gcore.__file__, u.find_spec('tests'), u.find_spec('recipes'))"
    done = ran(installed.python, "-c", code, cwd=empty)
    assert done.stdout.split() == [str(installed.packages / "gcore" / "__init__.py"), "None", "None"], done.stderr


def test_every_recipe_by_its_name(installed, empty):
    names = sorted(shipped.names("recipes"))
    listed = ran(installed.command, "recipes", cwd=empty).stdout
    assert [line.split()[0] for line in listed.splitlines()] == names
    for name in names:
        done = ran(installed.command, "train", name, "--dry-run", cwd=empty)
        said = done.stdout + done.stderr
        if name in NEEDS:
            assert done.returncode == 2 and NEEDS[name] in done.stderr, said
            assert f"({name} needs: " in done.stderr.splitlines()[-1]
        elif name in NEEDS_HUB:
            assert done.returncode == 2 and ("HF_HUB_OFFLINE forbids" in done.stderr or "vllm" in done.stderr), said
        elif done.returncode:
            code = f"import {NEEDS_PACKAGE.get(name, 'gcore')}"
            assert done.returncode == 2 and ran(installed.python, "-c", code, cwd=empty).returncode, said
        else:
            assert "rewards" in done.stdout, said


def test_the_schema_is_with_them(installed, empty):
    printed = ran(installed.command, "schema", cwd=empty).stdout
    folder = installed.packages / "gcore" / "shipped" / "recipes"
    assert printed == (folder / "schema.json").read_text() == (ROOT / "recipes" / "schema.json").read_text()


def test_what_an_example_makes(installed, empty):
    """The first lines of a recipe name commands of the repository; they work after `gcore recipes --copy`."""
    copied = ran(installed.command, "recipes", "--copy", ".", cwd=empty)
    assert copied.returncode == 0 and {path.name for path in empty.iterdir()} == set(shipped.FOLDERS)
    again = ran(installed.command, "recipes", "--copy", ".", cwd=empty)
    assert again.returncode == 2 and "recipes, scenarios, examples: exists" in again.stderr
    assert ran(installed.python, "examples/pairs.py", "runs/pairs", cwd=empty).returncode == 0
    done = ran(installed.command, "train", "recipes/reward_model.yaml", "--dry-run", cwd=empty)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_quickstart_learns(installed, empty):
    shorter = ("run.steps=30", "training.warm_start.steps=200")
    done = ran(installed.command, "train", "quickstart", *shorter, cwd=empty)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = [row["eval/accuracy"] for row in rows(empty / "runs" / "quickstart") if "eval/accuracy" in row]
    rewards = [row["reward/mean"] for row in steps(rows(empty / "runs" / "quickstart"))]
    assert accuracy[0] <= 0.5 and accuracy[-1] >= 0.85, accuracy
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
