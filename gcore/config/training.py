"""Sections `training` (the trainer and its optimizer) and `critic` (the value network of PPO)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gcore.config.base import Auto, Count, Fraction, NonNegative, PositiveInt, Section, StoredModel


class EmulatedTraining(Section):
    seconds_per_token: NonNegative = 1e-5
    """Seconds of one rank per token that it trains on, prompts included."""


class WarmStart(Section):
    steps: Count = 100
    """Supervised steps before reinforcement learning."""
    batch_size: PositiveInt = 64
    """Demonstrations per step, over all controllers."""
    lr: NonNegative = 1e-3
    """Peak learning rate: linear warm-up over the first tenth of the steps, then linear decay to 0."""


class Training(Section):
    backend: Literal["fsdp", "megatron", "emulated"] = "fsdp"
    """`fsdp`: PyTorch FSDP2; `megatron`: Megatron-Core, see docs/megatron.md; `emulated`: does not train, only sleeps
    for the time of an update."""
    emulated: EmulatedTraining | None = None
    """`emulated`: speed of the trainer."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the trainer, of the engines, judges and scalar reward models. `auto`: a GPU if there is one."""
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
    share_prefixes: bool | Literal["auto"] = "auto"
    """Compute the prompt of siblings, and turns that they have in common, once per micro-batch; losses and gradients
    stay the same. Siblings are laid out together. `true`: wherever they have something in common. `auto`: in updates
    where it saves a tenth of the time or more by the cost model, if the model and the backend can; `--dry-run` prints
    it. See docs/balance.md."""
    activation_checkpointing: bool | Auto = "auto"
    """Keep only the input of each decoder layer and recompute the rest in the backward pass: less memory, about a third
    more compute. `auto`: only if the activations of `max_tokens_per_gpu` tokens do not fit on the GPU beside the rest;
    never on a CPU. `--dry-run` prints the choice, see docs/planner.md. Diffusion models: `auto` recomputes the layers
    that do not fit, and keeps the activations of all others."""
    offload: Literal["auto", "none", "optimizer", "all"] = "auto"
    """What of the trainer is in host memory while engines use its GPU. `none`: nothing; `optimizer`: the two moments of
    AdamW, of which a part at a time is on the GPU during optimizer steps; `all`: the moments, the weights (on the GPU
    from the first pass of a step to the weight update) and the KL reference (on the GPU only during its own passes).
    `auto`: the least with which generation and training fit; `none` on a CPU."""
    offload_keep_gb: NonNegative = 0.0
    """With `offload`: GB of the policy's moments that stay on each GPU all the same; on ranks of a critic, of the
    critic's. An optimizer step then moves less to the GPU and back, and every phase has less memory."""
    max_bad_updates: PositiveInt = 3
    """Updates with NaN or infinite gradients are skipped and counted, and their samples are written to
    `runs/NAME/bad_batches/` (the first 8 of each rank); this number of them in a row ends the run. A run
    whose last update was skipped ends with an error too."""
    router_replay: bool | Literal["auto"] = "auto"
    """Mixtures of experts: the engine records which experts every token used, and the trainer's passes of the policy
    use the same ones, with weights of its own routers. Needs `generation.engine: embedded` and `backend: fsdp`. `auto`:
    if both and the model allow it. See docs/engines.md."""
    warm_start: WarmStart | None = None
    """Supervised training on the dataset's answers before reinforcement learning."""

    @model_validator(mode="after")
    def _halves(self) -> Training:
        if self.vision_lr and not self.lr:
            raise ValueError(f"vision_lr={self.vision_lr} with lr=0; expected lr above 0, or vision_lr=0")
        if self.context_parallel & (self.context_parallel - 1):
            raise ValueError(f"context_parallel={self.context_parallel}; expected a power of two")
        return self


class Critic(Section):
    model: StoredModel | None = None
    """Where the value network of `adv_estimator: gae` starts: a reward model (`objective: reward_model`) or a language
    model, with the tokenizer of the policy. A language model gets a value head of zeros. If the policy takes images, of
    the same family. Default: the policy at the start of reinforcement learning; with `model.lora`, the weights in its
    folder."""
    lr: NonNegative = 1e-5
    """Peak learning rate; the schedule is that of `training`."""
    warmup_steps: Count = 0
    """Training steps at the start in which only the critic trains."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Clip the change of a value in a training step: the loss is the larger one of the plain and the clipped value.
    `null`: off."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this global norm."""
