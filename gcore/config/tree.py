"""The configuration tree of `gcore train`. Every key is a field with a docstring.

Imports neither torch nor ray, so that `gcore train --dry-run`, editors and tests load it fast. Unknown keys are errors.
Each fact is configured once: derived values are properties, or are resolved by `controller/plan.py`.
The reference in docs/configuration.md is generated from this file (`python -m gcore.config.reference`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gcore.config.algorithm import Algorithm as Algorithm
from gcore.config.algorithm import with_preset
from gcore.config.base import (
    Auto,
    Count,
    EmulatedTraining,
    Fraction,
    NonNegative,
    PositiveInt,
    Seconds,
    Section,
    Serving,
    Stored,
    check_emulated,
    check_lora,
)
from gcore.config.base import BuildModel as BuildModel
from gcore.config.base import Lora as Lora
from gcore.config.base import Model as Model
from gcore.config.base import PolicyModel as PolicyModel
from gcore.config.rewards import HttpReward as HttpReward
from gcore.config.rewards import Judge as Judge
from gcore.config.rewards import RewardFunction as RewardFunction
from gcore.config.rewards import Rewards as Rewards
from gcore.config.rewards import ScalarReward as ScalarReward
from gcore.config.run import Faults as Faults
from gcore.config.run import Run as Run
from gcore.config.sampling import Sampling as Sampling


class Dataset(Stored):
    task: str | None = None
    """A generated task instead of `path`: `arithmetic`, `needle`, or `reasoning_gym/NAME` (needs the extra
    `reasoning-gym`)."""
    args: dict[str, Any] = {}
    """Arguments of the task."""
    size: PositiveInt | None = None
    """Use at most this many rows."""
    prompt_column: str = "auto"
    """Column with the prompt: a string or a list of messages. `auto`: `prompt`, `question`, `input` or `messages`."""
    answer_column: str = "auto"
    """Column with the reference answer. `auto`: `answer`, `ground_truth`, `label`, `solution` or verl's
    `reward_model.ground_truth`."""

    @model_validator(mode="after")
    def _one_source(self) -> Dataset:
        if (self.path is None) == (self.task is None):
            raise ValueError("set exactly one of path (a file, folder or hub id) and task (a generated task)")
        if self.task is not None and (unused := [k for k in Stored.model_fields if getattr(self, k) is not None]):
            raise ValueError(f"{', '.join(unused)}: only for datasets with a path; this one has a task")
        return self


class Data(Section):
    train: Dataset
    """Prompts to train on."""
    eval: Dataset | None = None
    """Held-out prompts: responses are sampled greedily, scored by `rewards` and logged as `eval/accuracy`."""
    system_prompt: str | None = None
    """System message before every prompt that is a string; needs a chat template."""
    max_prompt_length: PositiveInt = 512
    """Maximum length of a prompt in tokens, after the chat template. Longer ones are dropped and reported at load."""
    shuffle: bool = True
    """Use a seeded random order of the rows in each epoch."""


class Generation(Serving):
    max_response_length: PositiveInt = 256
    """Maximum number of tokens per response."""
    temperature: NonNegative = 1.0
    """Sampling temperature of the rollouts."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 is off. With top-p or top-k, sampling uses a truncated distribution, but logprobs and
    importance weights are those of the full distribution, see `keep_sampling_mask`."""
    top_k: Count = 0
    """Sample among the k most likely tokens; 0 is off. For importance weights see `top_p`."""
    keep_sampling_mask: bool = False
    """Correct for top-p and top-k: the engine also returns the set of tokens that it sampled from at each step, and all
    logprobs (engine, trainer, reference) are normalised over this set. Only `embedded`: other engines do not return
    the set."""
    sleep: Literal["auto", 0, 1, 2] = "auto"
    """vLLM: GPU memory that engines free during training. 0: none; 1: all, weights move to host memory; 2: all, weights
    are dropped. `auto`: 2 on GPUs (1 with `model.lora`), 0 on CPU and if generation continues during training."""

    @model_validator(mode="after")
    def _mask(self) -> Generation:
        if self.keep_sampling_mask and self.engine != "embedded":
            raise ValueError(
                f"keep_sampling_mask=true needs engine=embedded: engine={self.engine} does not return the set of "
                "tokens that top_p and top_k keep; set generation.keep_sampling_mask=false, or top_p=1 and top_k=0"
            )
        return self


class WarmStart(Section):
    steps: Count = 100
    """Supervised steps before reinforcement learning."""
    batch_size: PositiveInt = 64
    """Demonstrations per step, over all controllers."""
    lr: NonNegative = 1e-3
    """Peak learning rate: linear warm-up over the first tenth of the steps, then linear decay to 0."""


class Training(Section):
    backend: Literal["fsdp", "emulated"] = "fsdp"
    """`fsdp`: PyTorch FSDP2; `emulated`: does not train, only sleeps for the time of an update."""
    emulated: EmulatedTraining | None = None
    """`emulated`: speed of the trainer."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of forward and backward; weights and optimizer stay in float32. `auto`: as in `generation.dtype`."""
    lr: NonNegative = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warm-up. `linear` and `cosine` end with `run.steps`, also if some steps have
    fewer updates than `algorithm.mini_batches`, or none."""
    warmup_steps: Count = 0
    """Optimizer steps of linear warm-up; skipped steps do not count."""
    min_lr_ratio: Fraction = 0.0
    """Final learning rate of `linear` and `cosine`, as a fraction of `lr`."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Betas of AdamW."""
    eps: NonNegative = 1e-8
    """Epsilon of AdamW."""
    weight_decay: NonNegative = 0.0
    """AdamW; applies only to matrices, see `weight_decay_norms`."""
    weight_decay_norms: bool = False
    """Apply weight decay also to norms and biases (parameters of fewer than two dimensions)."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this global norm."""
    max_tokens_per_gpu: PositiveInt = 16384
    """Maximum number of tokens per micro-batch and rank; a training step has as many micro-batches as it needs."""
    context_parallel: PositiveInt = 1
    """Maximum number of data-parallel ranks that compute a long sample together, each a part of the sequence; a power
    of two that divides the number of data-parallel ranks. Samples that fit on one rank and do not cost far more than
    others stay on one. 1: never. See docs/balance.md."""
    compile: bool | Auto = "auto"
    """Compile each decoder layer: faster steps after about ten seconds in the first one. `auto`: on GPUs; a layer that
    does not compile runs eagerly, with a warning in the trainer's log."""
    context_attention: Literal["auto", "ulysses", "ring"] = "auto"
    """How ranks that share a sequence compute its attention. `ulysses`: each computes some heads of the whole sequence;
    their number must divide the heads. `ring`: keys and values pass from rank to rank. `auto`: `ulysses` where it is
    possible. See docs/long_context.md."""
    activation_checkpointing: bool | Auto = "auto"
    """Keep only the input of each decoder layer and recompute the rest in the backward pass: less memory, about a third
    more compute. `auto`: only if the activations of `max_tokens_per_gpu` tokens do not fit on the GPU beside the rest;
    never on a CPU. `--dry-run` prints the choice, see docs/planner.md."""
    offload: Literal["auto", "none", "optimizer", "all"] = "auto"
    """What of the trainer is in host memory while engines use its GPU. `none`: nothing; `optimizer`: the two moments of
    AdamW, of which a part at a time is on the GPU during optimizer steps; `all`: the moments, the weights (on the GPU
    from the first pass of a step to the weight update) and the KL reference (on the GPU only during its own passes).
    `auto`: the least with which generation and training fit; `none` on a CPU."""
    max_bad_updates: PositiveInt = 3
    """Updates with NaN or infinite gradients are skipped and counted, and their samples are written to
    `runs/NAME/bad_batches/` (the first 8 of each rank); this number of them in a row ends the run."""
    warm_start: WarmStart | None = None
    """Supervised training on the dataset's answers before reinforcement learning."""

    @model_validator(mode="after")
    def _halves(self) -> Training:
        if self.context_parallel & (self.context_parallel - 1):
            raise ValueError(f"context_parallel={self.context_parallel}; expected a power of two")
        return self


class PolicyPlacement(Section):
    replicas: PositiveInt | Auto = "auto"
    """Engine processes; `auto`: one per `generation.tensor_parallel` GPUs, or one per CPU core (at most 4 per node)."""
    engines_per_gpu: PositiveInt | Auto = "auto"
    """Engine processes on each GPU. Several divide `generation.gpu_memory_utilization` and the requests; they need
    `placement.mode: shared` and `generation.tensor_parallel: 1`. `auto`: 2 for a small model with vLLM, whose GPU would
    wait for Python, if the memory suffices; else 1, see docs/engines.md. Only with `replicas: auto`."""
    threads: PositiveInt | Auto = "auto"
    """CPU threads per process; `auto`: 1, with which results do not depend on the other sequences of a batch."""

    @model_validator(mode="after")
    def _one_number(self) -> PolicyPlacement:
        if self.replicas != "auto" and self.engines_per_gpu != "auto":
            raise ValueError(
                f"replicas={self.replicas} and engines_per_gpu={self.engines_per_gpu}; expected at most one of the two"
            )
        return self


class TrainerPlacement(Section):
    ranks: PositiveInt | Auto = "auto"
    """Trainer processes; `auto`: one per GPU, or one per CPU core (at most 4 per node)."""
    tensor_parallel: PositiveInt = 1
    """Ranks that split each matrix of the model (tensor parallelism); such a group trains on the same samples. Must
    divide `ranks`; a group of this size stays within a node."""
    shard: PositiveInt | Auto = "auto"
    """Data-parallel ranks that share one copy of weights and optimizer state; each group of this size has its own copy
    (HSDP). Must divide `ranks` / `tensor_parallel`. `auto`: all of them on GPUs, 1 on CPU."""
    threads: PositiveInt | Auto = "auto"
    """CPU threads per process; `auto`: cores of a node divided by its ranks."""

    @model_validator(mode="after")
    def _whole_groups(self) -> TrainerPlacement:
        if self.ranks != "auto" and self.ranks % self.tensor_parallel:
            raise ValueError(f"tensor_parallel={self.tensor_parallel} must divide ranks={self.ranks}")
        return self


class Placement(Section):
    mode: Literal["shared", "static", "dynamic", "colocated", "disaggregated", "auto"] = "shared"
    """Which role uses which devices during rollouts. `shared`: every role has its own replicas, always awake, and GPU i
    has the i-th replica of each role. `disaggregated`: the same, but every replica and trainer rank has its own GPUs.
    The other modes divide `slots` among the policy and the judges; a slot has one role at a time. `static`: by
    `split`; `dynamic`: slots move between roles during the run, see docs/placement.md; `colocated`: all slots generate,
    then all judge. `auto`: the fastest mode on these GPUs by the planner's estimate; `shared` on CPU and without
    judges."""
    slots: PositiveInt | Auto = "auto"
    """Devices to divide; `auto`: the GPUs, or the CPU cores. A replica uses `tensor_parallel` slots. Every role has a
    replica for every position, which sleeps while another role has the slot; `replicas` does not apply."""
    split: dict[str, PositiveInt] = {}
    """Slots per role, by the names `policy` and the judges': `{policy: 3, judge: 1}`. `static` keeps this split,
    `dynamic` starts with it. Default: an even split."""
    poll_interval_s: Seconds = 0.25
    """Seconds between polls of the roles' remaining work; at least a hundredth of the last rollout."""
    move_timeout_s: Seconds = 120.0
    """A move that takes longer is undone."""
    weights: Literal["auto", "host", "broadcast"] = "auto"
    """How the trainer's weights reach engines in other processes. `host`: through shared memory of the machine;
    `broadcast`: from GPU to GPU by NCCL (by gloo on a CPU). `auto`: CUDA IPC handles on a shared GPU, `broadcast`
    with `disaggregated`, `host` on CPU."""
    policy: PolicyPlacement = PolicyPlacement()
    """The policy's engines."""
    trainer: TrainerPlacement = TrainerPlacement()
    """The trainer."""
    object_store_mb: PositiveInt | Auto = "auto"
    """Shared memory for data sent between processes, in MB; `auto`: 256 plus twice the model."""


class Checkpoint(Section):
    every: Count = 50
    """Steps between checkpoints; there is also one at the end. 0: only at the end. The same applies to the warm start
    (`warm_N`)."""
    asynchronous: bool = True
    """Write checkpoints while the run goes on, from a copy in host memory, see docs/checkpointing.md. false: the run
    waits until the files are written."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_every: Count = 0
    """Also keep checkpoints of steps that are multiples of this number. 0: none."""
    keep_best: Count = 0
    """Also keep this number of checkpoints with the highest held-out accuracy (`eval/accuracy`), of those with an
    evaluation at their step, see `observe.eval_every`."""
    on_failure: Literal["continue", "stop"] = "continue"
    """If a checkpoint cannot be written (full disk): `continue`: the run goes on with a warning and tries again at the
    next one; `stop`: the run ends. The last complete checkpoint is kept. A run whose last checkpoint fails ends with an
    error."""
    export: bool = False
    """Also export the policy of each checkpoint as a Hugging Face folder, `runs/NAME/hf/step_N`, in a process of its
    own. It is deleted with its checkpoint."""


class Observe(Section):
    eval_every: Count = 0
    """Steps between evaluations. 0: only before and after training."""
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """Terminal output; `live`: a live panel; `plain`: one line per step; `auto`: `live` on a terminal, else `plain`."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases (needs `wandb`)."""
    mlflow: bool = False
    """Log to MLflow (needs `mlflow`)."""
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


class Config(Section):
    run: Run = Run()
    """Name, folder, seed and length of the run."""
    model: PolicyModel
    """The policy."""
    data: Data
    """Prompts."""
    controllers: PositiveInt | Auto = "auto"
    """Equal controller processes that share the samples; `auto`: one per data-parallel trainer rank. Results do not
    depend on it."""
    runtime: Literal["ray", "local"] = "ray"
    """`ray`: one process per replica or rank, on one machine or several (RAY_ADDRESS joins a cluster); `local`:
    everything in one process, for debuggers."""
    workflow: str = "gcore.controller.workflow:generate_and_reward"
    """The function that produces a group of samples, `package.module:function`, see docs/extending.md."""
    algorithm: Algorithm = Algorithm()
    """Advantages and loss."""
    generation: Generation = Generation()
    """The policy's engine and how it samples."""
    rewards: Rewards
    """How responses are scored."""
    sampling: Sampling = Sampling()
    """Numbers of prompts and samples per step, filters and staleness."""
    training: Training = Training()
    """The trainer and its optimizer."""
    placement: Placement = Placement()
    """Processes and devices per role."""
    checkpoint: Checkpoint = Checkpoint()
    """Saving of checkpoints."""
    observe: Observe = Observe()
    """Evaluation, progress and logs."""
    faults: Faults = Faults()
    """Faults to inject, for tests of the recovery (needs `runtime: ray`)."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        return with_preset(tree, Generation.model_fields["max_response_length"].default)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.faults.plan and self.runtime == "local":
            raise ValueError("faults.plan needs a process per role; expected runtime=ray, got runtime=local")
        if self.algorithm.mini_batches > self.sampling.prompts_per_step:
            raise ValueError(
                f"algorithm.mini_batches={self.algorithm.mini_batches} exceeds "
                f"sampling.prompts_per_step={self.sampling.prompts_per_step}: every mini-batch needs a prompt"
            )
        if self.algorithm.adv_estimator != "reinforce_pp" and self.sampling.samples_per_prompt < 2:
            raise ValueError(
                f"algorithm.adv_estimator={self.algorithm.adv_estimator} compares siblings; "
                f"sampling.samples_per_prompt must be at least 2, got {self.sampling.samples_per_prompt}"
            )
        if self.algorithm.overlong_buffer > self.generation.max_response_length:
            raise ValueError(
                f"algorithm.overlong_buffer={self.algorithm.overlong_buffer} exceeds "
                f"generation.max_response_length={self.generation.max_response_length}: expected at most that number"
            )
        trainer = self.placement.trainer
        if self.runtime == "local" and (trainer.ranks not in (1, "auto") or trainer.tensor_parallel > 1):
            raise ValueError(
                "runtime=local has one process and so one trainer rank; got "
                f"placement.trainer.ranks={trainer.ranks}, tensor_parallel={trainer.tensor_parallel} (use runtime=ray)"
            )
        if self.placement.mode in ("static", "dynamic", "colocated"):
            self._can_place()
        training = self.training
        check_emulated(training.backend, training.emulated, self.generation, self.rewards.judges)
        check_lora(self.model.lora, training.backend, self.generation.sleep)
        longest = self.data.max_prompt_length + self.generation.max_response_length
        if longest > training.max_tokens_per_gpu * training.context_parallel:
            raise ValueError(
                f"data.max_prompt_length + generation.max_response_length = {longest} exceeds "
                f"training.max_tokens_per_gpu={training.max_tokens_per_gpu} x context_parallel="
                f"{training.context_parallel}: the longest sample would not fit"
            )
        if self.model.build and longest > self.model.build.max_length:
            raise ValueError(
                f"data.max_prompt_length + generation.max_response_length = {longest} exceeds "
                f"model.build.max_length={self.model.build.max_length}"
            )
        return self

    def _can_place(self) -> None:
        mode, roles = self.placement.mode, ["policy", *(judge.name for judge in self.rewards.engine_judges)]
        if len(roles) < 2:
            raise ValueError(
                f"placement.mode={mode} divides slots between the policy and judges, but rewards.judges has no judge "
                "with a model; expected at least one"
            )
        if self.sampling.max_staleness:
            raise ValueError(
                f"placement.mode={mode} needs sampling.max_staleness=0, got {self.sampling.max_staleness}: between "
                "steps the trainer uses the devices"
            )
        if unknown := sorted(set(self.placement.split) - set(roles)):
            raise ValueError(f"placement.split: got {unknown}; expected names among {roles}")
        if self.placement.split and set(self.placement.split) != set(roles):
            raise ValueError(f"placement.split: got {self.placement.split}; expected all of {roles}")
