"""Configuration of the run itself: its name and length, resume and restarts; and of injected faults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from gcore.config.base import Auto, Count, FolderName, PositiveInt, Seconds, Section, Seed
from gcore.config.objects import FunctionPath

DEFAULT_STEPS = 100


class Run(Section):
    name: FolderName = "run"
    """Name of the run, without path separators; its files are in `DIR/NAME`."""
    dir: str = "runs"
    """Folder that holds the runs."""
    seed: Seed = 0
    """Seed of all randomness: data order, sampling noise, weights of a model built from scratch."""
    steps: Count | Auto = "auto"
    """Training steps. `auto`: those of `epochs`; 100 without `epochs`."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Length of the run in passes over `data.train`: `epochs` x rows / `sampling.prompts_per_step` steps, rounded up.
    Rows that are dropped (too long, bad images) do not count: all are read before the run starts. An epoch counts the
    prompts that are trained on; those that `sampling.filter` drops are drawn in addition. If `steps` is a number too,
    the run ends with the smaller one."""
    on_step: FunctionPath | None = None
    """A function that is called after each training step with its metrics, `file.py:NAME` or `package.module:NAME`. If
    it returns True, the run ends after this step, see docs/extending.md."""
    resume: str = "never"
    """`never`: start a new run (an existing run of that name is renamed); `auto`: continue from the last complete
    checkpoint if there is one; or the path of a checkpoint `.../step_N` or `.../warm_N`. With `auto`, a damaged
    checkpoint is skipped and reported."""
    resume_anyway: bool = False
    """Resume even if keys, data or the version of G-Core changed in a way that changes the results, see
    docs/checkpointing.md."""
    max_restarts: Count = 3
    """If a controller or a trainer rank dies or hangs, the run continues by itself from its last checkpoint, at most
    this many times per hour. 0: the run ends. Engines, judges and scorers are always restarted alone."""
    hang_s: Seconds = 300.0
    """A process that has not answered for this many seconds is restarted; the stacks of all processes are in their
    logs then. A move of a slot to another role that takes longer is undone (`placement.mode: dynamic`)."""
    no_progress_s: Seconds = 3600.0
    """If no controller makes progress for this many seconds, controllers and trainer ranks are restarted."""

    @property
    def folder(self) -> Path:
        return Path(self.dir) / self.name

    @property
    def total_steps(self) -> int:
        """With `epochs`, only after launch/epochs.py has counted the prompts; 0 before."""
        if self.steps == "auto":
            return DEFAULT_STEPS if self.epochs is None else 0
        return self.steps


class Fault(Section):
    kind: Literal["kill", "stop", "slow", "error", "disk_full", "short_write", "flip_byte", "outage", "cut"]
    """What happens to the process: SIGKILL, SIGSTOP, a delay of `seconds`, an exception, or a full disk. Or to the file
    that it wrote: half of it is cut, or a bit changes. Or to calls that it makes: those of a reward fail (`outage`), or
    those of another role do not arrive (`cut`)."""
    role: str
    """`trainer-0`, `engine-1`, `controller-0`, `judge-NAME-0`, ..."""
    at: str
    """A call that the role receives (`update`, `generate`, ...), a stage of a controller (`rollout`, ...), or `file`
    and `written`: before and after each file of a checkpoint. For `outage`: `reward:NAME`. For `cut`: `to:ROLE` or
    `to:ROLE:CALL`, such as `to:engine-0:generate`. `slow` can have any of them."""
    nth: PositiveInt = 1
    """Which time the process reaches this moment."""
    seconds: Seconds = 1.0
    """Length of the delay of `slow`. `outage`, `cut`: each call fails after this time."""
    calls: PositiveInt = 1
    """`outage`, `cut`: number of consecutive calls that fail."""

    @model_validator(mode="after")
    def _has_a_file(self) -> Fault:
        if self.kind in ("short_write", "flip_byte") and self.at != "written":
            raise ValueError(f"kind {self.kind} changes a file that was written; expected at=written, got at={self.at}")
        expected = {"outage": "reward:", "cut": "to:"}.get(self.kind)
        if expected is not None and not self.at.startswith(expected):
            raise ValueError(f"kind {self.kind} fails calls of the role; expected at={expected}..., got at={self.at}")
        if expected is None and self.kind != "slow" and self.at.startswith(("reward:", "to:")):
            raise ValueError(
                f"at={self.at} is a call that the role makes; expected outage, cut or slow, got {self.kind}"
            )
        if self.at.startswith("reward:") and not self.role.startswith("controller-"):
            raise ValueError(
                f"at={self.at}: controllers call rewards; expected role=controller-N, got role={self.role}"
            )
        return self


class Faults(Section):
    plan: list[Fault] = []
    """Each fault occurs once per run, see docs/recovery.md."""
