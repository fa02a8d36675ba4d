"""Sections about the run itself: its length, resume and restarts; checkpoints, evaluations and what a user sees of it;
and injected faults."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from gcore.config.base import Auto, Count, FolderName, NonNegative, PositiveInt, Seconds, Section, Seed
from gcore.config.objects import FunctionPath

DEFAULT_STEPS = 100
OF_A_SET = ("accuracy", "reward_mean", "response_length", "prompts", "failed")  # eval/NAME
SET_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
Tracker = Literal["tensorboard", "wandb", "mlflow"]


def _set_name(name: str) -> str:
    if not SET_NAME.fullmatch(name) or name in OF_A_SET:
        raise ValueError(
            f"got the name {name!r} of an evaluation set; expected letters, digits, . _ - (and not a metric)"
        )
    return name


SetName = Annotated[str, AfterValidator(_set_name)]


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


class Checkpoint(Section):
    every: Count = 50
    """Steps between checkpoints; there is also one at the end. 0: only at the end. The same applies to the warm start
    (`warm_N`)."""
    memory_every: Count = 0
    """Steps between checkpoints in the memory of the machine (`/dev/shm`), of which the newest is kept. If a process
    dies, the run continues from it if it is newer than the one on disk. It needs as much memory as a checkpoint, twice
    while it is written. 0: none. On one machine only."""
    asynchronous: bool = True
    """Write checkpoints while the run goes on, from a copy in host memory, see docs/checkpointing.md. Off-loaded
    moments are written from where they are if a copy of them does not fit. false: the run waits until the files are
    written, and nothing is copied: less host memory."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_every: Count = 0
    """Also keep checkpoints of steps that are multiples of this number. 0: none."""
    keep_best: Count = 0
    """Also keep this number of checkpoints with the highest `best_metric`, of those with an evaluation at their step,
    see `observe.eval_every`."""
    best_metric: str = "eval/accuracy"
    """The metric of `keep_best`; higher is better: `eval/pass@8`, `eval/NAME/accuracy`, ..."""
    on_failure: Literal["continue", "stop"] = "continue"
    """If a checkpoint, or a file of metrics, samples or spans, cannot be written (full disk): `continue`: the run goes
    on with a warning and tries again at the next one; `stop`: the run ends. The last complete checkpoint is kept. A run
    whose last checkpoint fails ends with an error."""
    copy_to: str | None = None
    """A URL that fsspec can open (`s3://bucket/runs`; needs its driver, such as `s3fs`): each checkpoint is also copied
    to `URL/NAME/step_N`, in the background. `run.resume=auto` fetches the newest copy if it is newer than what
    `run.dir` has."""
    export: bool = False
    """Also export the policy of each checkpoint as a Hugging Face folder, `runs/NAME/hf/step_N`, in a process of its
    own. It is deleted with its checkpoint."""


class Evaluation(Section):
    samples: PositiveInt = 1
    """Responses per held-out prompt. 1: one greedy response. More: sampled ones, the workflow runs once for each of
    them, and `eval/pass@K` and `eval/mean@N` are logged; `eval/accuracy` is then the mean over all of them."""
    k: list[PositiveInt] | Auto = "auto"
    """The K of `eval/pass@K`, at most `samples`: the probability that at least one of K responses passes, by the
    unbiased estimator over all `samples`. `auto`: powers of two up to `samples`, and `samples`."""
    success: float = 1.0
    """A response passes if its accuracy (`rewards.accuracy`) is at least this number."""
    temperature: NonNegative | Auto = "auto"
    """Sampling temperature if `samples` is above 1; `auto`: as `generation.temperature`."""
    top_p: Annotated[float, Field(gt=0, le=1)] | Auto = "auto"
    """Nucleus sampling if `samples` is above 1; `auto`: as `generation.top_p`."""
    top_k: Count | Auto = "auto"
    """Sample among the k most likely tokens if `samples` is above 1; `auto`: as `generation.top_k`."""

    @property
    def sampled(self) -> bool:
        return self.samples > 1

    @property
    def ks(self) -> list[int]:
        if not self.sampled:
            return []
        if self.k != "auto":
            return sorted(set(self.k))
        return sorted({*(2**i for i in range(self.samples.bit_length())), self.samples})

    @property
    def sampling(self) -> dict[str, Any]:
        """Keys of `generation` that have other values in evaluations."""
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        return {"keep_sampling_mask": False, **{name: value for name, value in given.items() if value != "auto"}}

    def metrics(self, sets: Iterable[str]) -> list[str]:
        """Names of the metrics that can select a checkpoint. `sets`: names of the evaluation sets."""
        own = ["accuracy", "reward_mean", *(f"pass@{k}" for k in self.ks)]
        own += [f"mean@{self.samples}"] if self.sampled else []
        return [f"eval/{name}" for name in own] + [f"eval/{s}/{name}" for s in sets if s for name in own]

    @model_validator(mode="after")
    def _enough(self) -> Evaluation:
        if self.k != "auto" and (too_large := [k for k in self.k if k > self.samples]):
            raise ValueError(
                f"k={too_large} exceeds samples={self.samples}: pass@K needs at least K samples per prompt"
            )
        return self


class EndpointSettings(Section):
    host: str = "127.0.0.1"
    """Address that the endpoint of `ctx.serve` listens on, or the name of an interface of every node, such as `eth0`.
    The default: only processes of the same machine reach it."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """One port for the sessions of all controllers of a node, for the whole run. 0: each controller has a free port of
    its own, while it has sessions."""
    tls_certificate: str | None = None
    """File with the certificate, in PEM; then addresses begin with https. Needs `tls_key`."""
    tls_key: str | None = None
    """File with the key of the certificate."""
    idle_timeout_s: Seconds = 1800.0
    """A session without requests for this time is closed: its agent is gone. Its group is dropped and counted in
    `sampling/dropped_session_left`, as a failure, see `rewards.max_error_frac`."""

    @model_validator(mode="after")
    def _check(self) -> EndpointSettings:
        if self.host in ("", "0.0.0.0", "::", "*"):
            raise ValueError(f"host: got {self.host!r}; expected the address or name of one interface")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key: got one of them; expected both or none")
        return self

    @property
    def is_local(self) -> bool:
        return self.host == "localhost" or self.host.startswith("127.") or self.host in ("::1", "lo")


class Observe(Section):
    eval_every: Count = 0
    """Steps between evaluations. 0: only before and after training."""
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """Terminal output; `live`: a live panel; `plain`: one line per step; `auto`: `live` on a terminal, else `plain`."""
    trackers: list[Tracker] = ["tensorboard"]
    """Where metrics go beside `metrics.jsonl`: `tensorboard`, `wandb` (Weights & Biases) and `mlflow`. The packages of
    the last two have to be installed."""
    prometheus: str | int | None = None
    """Serve the latest value of each metric for Prometheus at `/metrics` of this port, such as `9090`: on the loopback
    interface. `HOST:PORT`: on another interface, where everyone who can connect can read the metrics."""
    trace: bool = True
    """Write `trace.json` for Perfetto."""
    samples_per_step: Count = 2
    """Groups per step whose prompt, answers, rewards and verdicts are logged in `samples/` and shown by `samples.html`;
    the same number of held-out prompts per evaluation. 0: none. A long run logs every n-th step, about 2,000 groups in
    total."""
    logs: bool = True
    """With Ray, the output of each process goes to `logs/ROLE.log` in the run directory, at most 20 MB per file; above
    this, the middle is removed. false: the output stays in Ray's log folder."""
    min_free_disk_mb: Count = 200
    """Minimum free disk space in the run directory to start a run."""


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
