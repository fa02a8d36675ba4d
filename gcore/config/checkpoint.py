"""Section `checkpoint`: when checkpoints are saved, and which are kept."""

from __future__ import annotations

from typing import Literal

from gcore.config.base import Count, PositiveInt, Section


class Checkpoint(Section):
    every: Count = 50
    """Steps between checkpoints; there is also one at the end. 0: only at the end. The same applies to the warm start
    (`warm_N`)."""
    memory_every: Count = 0
    """Steps between checkpoints in the memory of the machine (`/dev/shm`), of which the newest is kept. If a process
    dies, the run continues from it if it is newer than the one on disk. It needs as much memory as a checkpoint, twice
    while it is written. 0: none. On one machine only."""
    asynchronous: bool = True
    """Write checkpoints while the run goes on, from a copy in host memory, see docs/checkpointing.md. false: the run
    waits until the files are written, and nothing is copied: less host memory."""
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
