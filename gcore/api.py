"""The Python interface: `from gcore import Config, train`. The same runs as `gcore train` and `gcore eval`.

    train(recipe, "training.lr=1e-5", reward=right) ──> Result: metrics, samples, checkpoints

Functions and rows are passed as objects (config/objects.py), also from a notebook or a script and to the processes of
Ray. Errors are exceptions: UserError for what the user can fix, RoleError and RoleDied for a process that failed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gcore import shipped
from gcore.checkpoint import store
from gcore.checkpoint.export import export as export_policy
from gcore.checkpoint.export import locate
from gcore.config.load import override, read_tree, validate
from gcore.config.objects import is_object
from gcore.config.tree import Config
from gcore.driver.interrupt import outside_of_loops
from gcore.driver.supervise import run
from gcore.observe.metrics import read_rows
from gcore.observe.report import summary_text
from gcore.observe.samples import read_samples
from gcore.observe.values import Row, kind, number, step_of
from gcore.protocols import RoleError
from gcore.types import UserError

Recipe = Config | str | Path | Mapping[str, Any]
Functions = Callable[..., Any] | Sequence[Any] | Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Result:
    """A finished run. Everything is read from its folder. Result(Path("runs/mine"), Config(...))"""

    folder: Path
    config: Config

    @property
    def rows(self) -> list[Row]:
        """One row of metrics per training step and per evaluation, as in metrics.jsonl, without the warm start."""
        return [row for row in read_rows(self.folder) if kind(row) != "warm_start"]

    @property
    def metrics(self) -> Row:
        """The last value of every metric."""
        newest: Row = {}
        for row in self.rows:
            newest |= row
        return newest

    def history(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of one metric: result.history("reward/mean")"""
        return [(step_of(row), value) for row in self.rows if (value := number(row, name)) is not None]

    @property
    def samples(self) -> list[Row]:
        """Groups of samples with their rewards, a few per step, as in samples.html."""
        return read_samples(self.folder)

    @property
    def checkpoints(self) -> list[Path]:
        """Complete ones, oldest first."""
        return store.complete_checkpoints(self.folder)

    @property
    def best(self) -> Path | None:
        """The checkpoint with the highest `checkpoint.best_metric`; None if none was evaluated at its step."""
        scores = {path: store.read_manifest(path).get("score") for path in self.checkpoints}
        scored = {path: score for path, score in scores.items() if score is not None}
        return max(scored, key=lambda path: scored[path]) if scored else None

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    def export(self, folder: str | Path, checkpoint: Path | None = None) -> Path:
        """Write the policy of a checkpoint (default: the last) as a Hugging Face folder."""
        export_policy(checkpoint or self.folder, Path(folder))
        return Path(folder)

    def __str__(self) -> str:
        return summary_text(self.folder)

    def _repr_html_(self) -> str:
        """In a notebook: the summary and the reward curve."""
        import base64
        import html

        text = f"<pre>{html.escape(str(self))}</pre>"
        if not (curve := self.folder / "reward.png").is_file():
            return text
        return f'{text}<img src="data:image/png;base64,{base64.b64encode(curve.read_bytes()).decode()}" width="640">'


os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: idle threads must not burn a shared core


def train(
    recipe: Recipe,
    *overrides: str,
    reward: Functions | None = None,
    workflow: Callable[..., Any] | None = None,
    filter: Callable[..., Any] | None = None,
    data: Any = None,
    on_step: Callable[[Row], Any] | None = None,
) -> Result:
    """Train a policy. `recipe`: a Config, the path of a YAML file, or a mapping; `overrides`: as on the command line.

    `reward`: a function, a list of functions, or name -> function: they replace `rewards.functions`.
    `workflow`, `filter`: replace `workflow` and `sampling.filter`.
    `data`: rows to train on, a list of dicts or a datasets.Dataset: replaces `data.train`.
    `on_step`: called in this process after each training step with its metrics; True ends the run: `run.on_step`.
    """
    objects = {"workflow": workflow, "sampling.filter": filter, "data.train": data, "run.on_step": on_step}
    config = make_config(recipe, *overrides, reward=reward, objects=objects)
    _run(partial(run, config))
    return Result(config.run.folder, config)


def evaluate(
    target: Recipe | Result,
    *overrides: str,
    reward: Functions | None = None,
    workflow: Callable[..., Any] | None = None,
    data: Any = None,
) -> Row:
    """The metrics `eval/...` of a result, a run's folder or checkpoint (`runs/NAME/step_N`), or a recipe's model.

    `data`: rows to evaluate on instead of `data.eval`. A result keeps the functions of its run; for a folder of a run
    that was started from Python, pass them again.
    """
    recipe = target.config if isinstance(target, Result) else target
    place = target.folder if isinstance(target, Result) else target
    if isinstance(place, str | Path):
        if not shipped.named(place, "recipes").exists():
            raise UserError(f"{place}: no such run or recipe; expected runs/NAME, runs/NAME/step_N or a YAML file")
        if Path(place).is_dir():
            folder, checkpoint = locate(Path(place))
            if recipe is place:
                recipe = folder / "config.yaml"
                if is_object(read_tree(recipe)["sampling"]["filter"]):  # not used in evaluations
                    overrides = ("sampling.filter=none", *overrides)
            overrides = (f"run.resume={checkpoint}", *overrides)
    overrides = ("checkpoint.keep_best=0", *overrides)  # its metric may be of another evaluation
    # `data` also stands for the training set, which is not used, and which may have been rows of another program
    objects = {"workflow": workflow, "data.train": data, "data.eval": data}
    config = make_config(recipe, *overrides, reward=reward, objects=objects)
    if config.data.eval is None:
        raise UserError(f"{target}: no prompts to evaluate on (key: data.eval)")
    metrics: Row = _run(partial(run, config, "eval"))
    return metrics


def make_config(
    recipe: Recipe, *overrides: str, reward: Functions | None = None, objects: Mapping[str, Any] | None = None
) -> Config:
    """One configuration of a recipe, overrides, and objects by key (None: as in the recipe). Raises UserError with all
    problems."""
    match recipe:
        case Config():
            tree, name = recipe.model_dump(exclude_unset=True), "Config"
        case Mapping():
            tree, name = dict(recipe), "recipe"
        case _:
            tree, name = read_tree(recipe), str(recipe)
    tree = _copied(tree)
    for word in overrides:
        override(tree, word)
    objects = {**(objects or {}), "rewards.functions": None if reward is None else _functions(reward)}
    for key, value in objects.items():
        if value is not None:
            section, _, last = key.rpartition(".")
            if section and not isinstance(tree.get(section), dict):
                tree[section] = {}
            (tree[section] if section else tree)[last] = value
    return validate(tree, name, Config)


def _copied(tree: Any) -> Any:
    """Sections and lists are copied, and changed later; objects are the caller's."""
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree


def _functions(reward: Functions) -> list[Any]:
    if isinstance(reward, Mapping):
        return [{"name": name, "path": function} for name, function in reward.items()]
    return [reward] if callable(reward) else list(reward)


def _run(function: Callable[[], Any]) -> Any:
    try:
        return outside_of_loops(function)
    except RoleError as error:
        if error.user_error:
            raise UserError(error.message) from error
        error.add_note(f"first traceback, from {error.role}:\n{error.traceback}")
        raise
