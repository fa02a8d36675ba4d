"""The configuration tree of `gcore train`. Every key is a field with a docstring.

Imports neither torch nor ray, so that `gcore train --dry-run`, editors and tests load it fast. Unknown keys are errors.
Each fact is configured once: derived values are properties, or are resolved by `launch/plan.py`.
The reference in docs/configuration.md is generated from this file (`python -m gcore.config.reference`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from gcore.config.algorithm import Algorithm as Algorithm
from gcore.config.base import (
    Arguments,
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
from gcore.config.checkpoint import Checkpoint as Checkpoint
from gcore.config.critic import Critic as Critic
from gcore.config.critic import CriticPlacement, CriticView, check_critic
from gcore.config.denoising import Denoising, check_denoising, with_length
from gcore.config.engines import engines_with
from gcore.config.evaluation import Evaluation as Evaluation
from gcore.config.evaluation import SetName
from gcore.config.experts import ExpertTraining
from gcore.config.media import MediaData as MediaData
from gcore.config.megatron import MegatronDegrees, check_backend
from gcore.config.objects import FunctionPath, PythonObject, is_rows
from gcore.config.observe import Observe as Observe
from gcore.config.preference import Objective, ObjectiveView, with_pair_filter
from gcore.config.preference import Preference as Preference
from gcore.config.presets import with_preset
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
    """A generated task instead of `path`: `arithmetic`, `needle`, `digits` (images; needs the extra `vision`),
    `draw_digits` (needs the extra `diffusion`), `reasoning_gym/NAME` (needs the extra `reasoning-gym`), or a function
    `package.module:NAME` or `file.py:NAME` that returns rows."""
    args: Arguments = {}
    """Arguments of the task."""
    size: PositiveInt | None = None
    """Use at most this many rows."""
    prompt_column: str = "auto"
    """Column with the prompt: a string or a list of messages. `auto`: `prompt`, `question`, `input` or `messages`."""
    answer_column: str = "auto"
    """Column with the reference answer. `auto`: `answer`, `ground_truth`, `label`, `solution` or verl's
    `reward_model.ground_truth`."""
    chosen_column: str = "chosen"
    """Pairs: column with the better answer: a string, messages, or the whole conversation as messages."""
    rejected_column: str = "rejected"
    """Pairs: column with the worse answer, in the same form."""

    @model_validator(mode="before")
    @classmethod
    def _of_rows(cls, value: Any) -> Any:
        """From Python, the rows themselves: a list of dicts, or a datasets.Dataset."""
        return {"path": PythonObject("rows", value)} if is_rows(value) else value

    @model_validator(mode="after")
    def _one_source(self) -> Dataset:
        if (self.path is None) == (self.task is None):
            raise ValueError("set exactly one of path (a file, folder or hub id) and task (a generated task)")
        if self.task is not None and (unused := [k for k in Stored.model_fields if getattr(self, k) is not None]):
            raise ValueError(f"{', '.join(unused)}: only for datasets with a path; this one has a task")
        return self


def _one_or_named(value: Any) -> str:
    """Sets are named if all keys are other than those of a dataset and all values are datasets."""
    if isinstance(value, Mapping) and value and not set(value) & set(Dataset.model_fields):
        named = all(isinstance(v, Mapping | Dataset) or is_rows(v) for v in value.values())
        return "named[]" if named else "one[]"
    return "one[]"


EvalSets = Annotated[
    Annotated[Dataset, Tag("one[]")] | Annotated[dict[SetName, Dataset], Tag("named[]")], Discriminator(_one_or_named)
]


class Data(Section):
    train: Dataset
    """Prompts to train on."""
    eval: EvalSets | None = None
    """Held-out prompts, answered and scored by `rewards` as `evaluation` says: `eval/accuracy`. One dataset, or several
    with names, `{gsm8k: {path: ...}, sums: {task: ...}}`: `eval/NAME/accuracy` of each, and `eval/accuracy`, their
    mean."""
    system_prompt: str | None = None
    """System message before every prompt that is a string; needs a chat template."""
    max_prompt_length: PositiveInt = 512
    """Maximum length of a prompt in tokens, after the chat template. Longer ones are dropped and reported at load."""
    shuffle: bool = True
    """Use a seeded random order of the rows in each epoch."""
    media: MediaData = MediaData()
    """Images and videos of the rows, for models that take them, see docs/vision.md."""

    @property
    def eval_sets(self) -> dict[str, Dataset]:
        """Evaluation sets by name; the name of a single set is empty."""
        if self.eval is None:
            return {}
        return {"": self.eval} if isinstance(self.eval, Dataset) else self.eval


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
    denoising: Denoising | None = None
    """The policy is a diffusion or flow model with this sampler, see docs/diffusion.md. Default: a language model."""

    @model_validator(mode="after")
    def _mask(self) -> Generation:
        if self.keep_sampling_mask and not self.traits.sampling_mask:
            raise ValueError(
                f"keep_sampling_mask=true needs engine={engines_with('sampling_mask')}: engine={self.engine} does not "
                "return the set of "
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


class Training(ExpertTraining):
    backend: Literal["fsdp", "megatron", "emulated"] = "fsdp"
    """`fsdp`: PyTorch FSDP2; `megatron`: Megatron-Core, see docs/megatron.md; `emulated`: does not train, only sleeps
    for the time of an update."""
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
    vision_lr: NonNegative | None = None
    """Peak learning rate of the vision tower and its projector. 0: they are frozen. Default: as `lr`."""
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
        if self.vision_lr and not self.lr:
            raise ValueError(f"vision_lr={self.vision_lr} with lr=0; expected lr above 0, or vision_lr=0")
        if self.context_parallel & (self.context_parallel - 1):
            raise ValueError(f"context_parallel={self.context_parallel}; expected a power of two")
        return self


class PolicyPlacement(Section):
    replicas: PositiveInt | Auto = "auto"
    """Engine processes; `auto`: one per `generation.tensor_parallel` GPUs, or one per CPU core (at most 4 per node)."""
    threads: PositiveInt | Auto = "auto"
    """CPU threads per process; `auto`: 1, with which results do not depend on the other sequences of a batch."""


class TrainerPlacement(MegatronDegrees):
    ranks: PositiveInt | Auto = "auto"
    """Trainer processes; `auto`: one per GPU, or one per CPU core (at most 4 per node)."""
    tensor_parallel: PositiveInt = 1
    """Ranks that split each matrix of the model (tensor parallelism); such a group trains on the same samples. Must
    divide `ranks`; a group of this size stays within a node."""
    shard: PositiveInt | Auto = "auto"
    """Data-parallel ranks that share one copy of weights and optimizer state; each group of this size has its own copy
    (HSDP). Must divide `ranks` / `tensor_parallel`. `auto`: all of them on GPUs, 1 on CPU."""
    threads: PositiveInt | Auto = "auto"
    """CPU threads per process; `auto`: cores of a node divided by its trainer and critic ranks."""

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
    critic: CriticPlacement = CriticPlacement()
    """The critic, if it has ranks of its own."""
    object_store_mb: PositiveInt | Auto = "auto"
    """Shared memory for data sent between processes, in MB; `auto`: 256 plus twice the model."""


class Config(ObjectiveView, CriticView, Section):
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
    everything in one process, all controllers too, for debuggers."""
    workflow: FunctionPath = "gcore.workflows.context:generate_and_reward"
    """The function that makes a group of samples, `file.py:NAME` or `package.module:NAME`, see docs/extending.md."""
    objective: Objective = "policy"
    """What is trained. `policy`: reinforcement learning with `algorithm`; `sft`: the answers of the dataset; all
    others: pairs of answers, by the loss of this name, see docs/preference.md. `reward_model`: a scalar
    reward model, on pairs of answers."""
    preference: Preference = Preference()
    """Training on pairs."""
    algorithm: Algorithm = Algorithm()
    """Advantages and loss."""
    generation: Generation = Generation()
    """The policy's engine and how it samples."""
    rewards: Rewards = Rewards()
    """How responses are scored."""
    sampling: Sampling = Sampling()
    """Numbers of prompts and samples per step, filters and staleness."""
    training: Training = Training()
    """The trainer and its optimizer."""
    critic: Critic = Critic()
    """The value network of `algorithm.adv_estimator: gae`."""
    placement: Placement = Placement()
    """Processes and devices per role."""
    checkpoint: Checkpoint = Checkpoint()
    """Saving of checkpoints."""
    evaluation: Evaluation = Evaluation()
    """How held-out prompts (`data.eval`) are answered and counted."""
    observe: Observe = Observe()
    """Progress and logs, and how often to evaluate."""
    faults: Faults = Faults()
    """Faults to inject, for tests of the recovery (needs `runtime: ray`)."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        tree = with_length(with_pair_filter(tree))
        return with_preset(tree, Generation.model_fields["max_response_length"].default)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        self.check_objective()
        if self.faults.plan and self.runtime == "local":
            raise ValueError("faults.plan needs a process per role; expected runtime=ray, got runtime=local")
        for fault in self.faults.plan:
            if fault.at.startswith("reward:") and (name := fault.at.removeprefix("reward:")) not in self.rewards.names:
                raise ValueError(f"faults.plan: at={fault.at}: got {name!r}; expected one of {self.rewards.names}")
        known = self.evaluation.metrics(self.data.eval_sets)
        is_known = self.checkpoint.best_metric in known or self.trains_on_answers("eval")  # metrics of the objective
        if self.checkpoint.keep_best and not is_known:
            raise ValueError(f"checkpoint.best_metric: got {self.checkpoint.best_metric!r}; expected one of {known}")
        if self.algorithm.mini_batches > self.sampling.prompts_per_step:
            raise ValueError(
                f"algorithm.mini_batches={self.algorithm.mini_batches} exceeds "
                f"sampling.prompts_per_step={self.sampling.prompts_per_step}: every mini-batch needs a prompt"
            )
        compares = self.algorithm.estimator.siblings or self.objective != "policy"
        compares = compares and self.rewards.compares
        if compares and not self.is_offline and self.sampling.samples_per_prompt < 2:
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
        check_critic(self)
        if self.placement.mode in ("static", "dynamic", "colocated"):
            self._can_place()
        training = self.training
        check_emulated(training.backend, training.emulated, self.generation, self.rewards.judges)
        check_lora(self.model.lora, training.backend, self.generation.sleep)
        check_backend(self)
        check_denoising(self)
        longest = self.data.max_prompt_length + self.generation.max_response_length
        together = 2 if self.needs.pairs else 1
        if together * longest > training.max_tokens_per_gpu * training.context_parallel:
            raise ValueError(
                f"data.max_prompt_length + generation.max_response_length = {longest} exceeds "
                f"training.max_tokens_per_gpu={training.max_tokens_per_gpu} x context_parallel="
                f"{training.context_parallel}: the longest {'pair' if together == 2 else 'sample'} would not fit"
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
