"""The configuration tree of `gcore train-rm`, which trains scalar reward models. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from gcore.config.base import Auto, Count, FolderName, Fraction, Model, NonNegative, PositiveInt, Section, Stored


class ModelRun(Section):
    name: FolderName = "reward_model"
    """Name of the model, without path separators. The model is written to `DIR/NAME`, a Hugging Face folder for
    `rewards.models`."""
    dir: str = "runs"
    """Parent folder of the model."""
    seed: int = 0
    """Seed of the order of the pairs, of the head, and of the weights of a model built from scratch."""

    resume: str = "never"
    """`never`: start again (an older model of that name is renamed); `auto`: continue from the last complete checkpoint
    if there is one, see `training.checkpoint_every`."""

    @property
    def folder(self) -> Path:
        return Path(self.dir) / self.name


class Pairs(Stored):
    path: str
    """A file (.jsonl, .json, .csv, .tsv or .parquet), the folder of a Hugging Face dataset, or a hub id (needs the
    extra `datasets`)."""
    prompt_column: str = "auto"
    """Column with the prompt: a string or messages. `auto`: `prompt`, `question` or `input` if one of them exists;
    otherwise the other two columns hold whole conversations."""
    chosen_column: str = "chosen"
    """Column with the better answer: a string, messages, or the whole conversation as messages."""
    rejected_column: str = "rejected"
    """Column with the worse answer, in the same form."""
    size: PositiveInt | None = None
    """Use at most this many rows."""


class PairData(Section):
    train: Pairs
    """Pairs to train on."""
    eval: Pairs | None = None
    """Held-out pairs: logged as `eval/accuracy` and `eval/margin`."""
    max_length: PositiveInt = 1024
    """Maximum length of a conversation in tokens, after the chat template. Pairs with a longer one are dropped and
    reported."""


class PairTraining(Section):
    steps: PositiveInt = 1000
    """Optimizer steps."""
    batch_size: PositiveInt = 64
    """Pairs per step."""
    lr: NonNegative = 1e-5
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Learning rate schedule after the warm-up."""
    warmup_steps: Count = 0
    """Steps of linear warm-up."""
    weight_decay: NonNegative = 0.0
    """AdamW; applies only to matrices, see `weight_decay_norms`."""
    weight_decay_norms: bool = False
    """Apply weight decay also to norms and biases (parameters of fewer than two dimensions)."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Betas of AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this global norm."""
    max_tokens_per_batch: PositiveInt = 16384
    """Maximum number of tokens per forward pass; a step has as many passes as it needs."""
    max_bad_updates: PositiveInt = 3
    """Steps with a NaN or infinite loss are skipped and counted; this number of them in a row ends the training."""
    eval_every: Count | Auto = "auto"
    """Steps between evaluations on the held-out pairs; there is also one at the end. 0: only at the end. `auto`: ten
    evaluations in total."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of forward and backward; weights and optimizer stay in float32. `auto`: float32 on CPU, bfloat16 on
    GPU."""
    threads: PositiveInt | Auto = "auto"
    """CPU threads per rank; `auto`: the cores divided by the ranks."""
    ranks: PositiveInt = 1
    """Trainer processes, one per GPU; they share the pairs of a step. Above 1 they run under Ray. Results do not depend
    on it."""
    checkpoint_every: Count = 0
    """Steps between checkpoints, `DIR/NAME/step_N`. 0: none."""
    keep_last: PositiveInt = 1
    """Number of newest checkpoints to keep."""


class RewardModelConfig(Section):
    run: ModelRun = ModelRun()
    """Name, folder and seed."""
    model: Model
    """The initial model: a causal language model (a head is added), a scalar reward model, or `build`."""
    data: PairData
    """Pairs of answers: one preferred, one rejected."""
    training: PairTraining = PairTraining()
    """The optimizer."""
