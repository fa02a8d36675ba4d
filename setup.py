"""A wheel also has the folders of gcore/shipped.py, inside of the package; pyproject.toml has everything else."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = ("recipes", "scenarios", "examples")


class BuildWithFolders(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in FOLDERS:
                target = Path(self.build_lib, "gcore", "shipped", name)
                shutil.copytree(name, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithFolders})
