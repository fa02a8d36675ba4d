"""What the sections of the configuration are made of, and the one that several of them hold: a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


def _plain_name(name: str) -> str:
    """The name of a folder in `run.dir`: it must not lead out of it, nor mean `run.dir` itself."""
    if not name.strip() or name in (".", "..") or not name.isprintable() or set(name) & set("/\\"):
        raise ValueError(f"got {name!r}; expected the plain name of a folder, without / or \\ (its place is run.dir)")
    return name


FolderName = Annotated[str, AfterValidator(_plain_name)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class BuildModel(Section):
    architecture: Literal["qwen3", "qwen2", "llama"] = "qwen3"
    """Model family, as in transformers."""
    hidden_size: PositiveInt = 128
    """Width."""
    intermediate_size: PositiveInt = 512
    """Width of the feed-forward layers."""
    layers: PositiveInt = 4
    """Number of decoder layers."""
    heads: PositiveInt = 4
    """Attention heads; must divide `hidden_size`."""
    kv_heads: PositiveInt = 4
    """Key/value heads; must divide `heads`."""
    max_length: PositiveInt = 256
    """Longest sequence (prompt and response)."""
    alphabet: str = "0123456789+-*/=()?,.: abcdefghijklmnopqrstuvwxyz"
    """Characters of the built-in one-token-per-character tokenizer."""

    @model_validator(mode="after")
    def _divisible(self) -> BuildModel:
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} must divide hidden_size={self.hidden_size}, and kv_heads={self.kv_heads} must "
                "divide heads"
            )
        return self


class Stored(Section):
    """A dataset that is stored somewhere: in a file, in a folder, or on the hub."""

    path: str | None = None
    """A file (.jsonl, .json, .csv, .tsv or .parquet), the folder of a Hugging Face dataset, or the id of one on the
    hub, such as `openai/gsm8k` (needs the extra `datasets`)."""
    subset: str | None = None
    """Datasets of the hub and their folders: name of the subset (also called configuration), such as `main`."""
    split: str | None = None
    """Datasets of the hub and their folders: name of the split, such as `test`. Default: `train` for the training set;
    a held-out set must name its split."""
    revision: str | None = None
    """Hub ids: branch, tag or commit. Default: `main`. The run's `config.yaml` has the commit."""


class Model(Section):
    path: str | None = None
    """Folder of a Hugging Face model (config.json, safetensors, tokenizer), or the id of one on the hub, such as
    `Qwen/Qwen3-0.6B`: taken from the local cache, or downloaded. A folder of that name comes first."""
    revision: str | None = None
    """Hub ids: branch, tag or commit. Default: `main`. The run's `config.yaml` has the commit."""
    build: BuildModel | None = None
    """Build a small model from scratch instead, with its own tokenizer: no download."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer, when it is not in `model.path`."""
    tokenizer_revision: str | None = None
    """Hub ids: branch, tag or commit of `tokenizer`."""
    chat_template: str | None = None
    """Jinja chat template: the text itself or the path of a file. Default: the tokenizer's own. A policy without any
    takes prompts that are strings, and reads them as they are."""
    trust_remote_code: bool = False
    """Allow Python code shipped inside the model folder to run."""

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.path is None) == (self.build is None):
            raise ValueError(
                "set exactly one of model.path (a Hugging Face folder or hub id) and model.build (a small model made "
                "here)"
            )
        if self.revision is not None and self.path is None:
            raise ValueError("model.revision: of model.path, which is not set")
        if self.tokenizer_revision is not None and self.tokenizer is None:
            raise ValueError("model.tokenizer_revision: of model.tokenizer, which is not set")
        return self


class Lora(Section):
    rank: PositiveInt = 16
    """Width of the two factors that are trained beside each target matrix."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Their product counts `alpha / rank` times."""
    targets: list[str] = []
    """Linear layers of the decoder by the end of their names, such as `[q_proj, v_proj]`. Default: all of attention
    and MLP."""


class PolicyModel(Model):
    lora: Lora | None = None
    """Train low-rank adapters and leave the weights as they are; only the adapters travel to the engines and into
    checkpoints, see docs/engines.md. `{}` takes the defaults. Default: train all weights."""


class EmulatedDevice(Section):
    base_s: Annotated[float, Field(gt=0)] = 0.02
    """Seconds of a decoding step before its first sequence."""
    per_sequence_s: NonNegative = 0.0
    """What each running sequence adds to a step."""
    prefill_s_per_token: NonNegative = 0.0
    """Seconds of a prompt token; prompts are read one after another, and nothing is decoded meanwhile."""
    sleep_s: NonNegative = 0.0
    """Giving the memory back."""
    wake_s: NonNegative = 0.0
    """Taking it again."""
    weights_s: NonNegative = 0.0
    """New weights from the trainer."""
    mean_tokens: Annotated[float, Field(ge=1)] = 256.0
    """Mean length of a response, before it is cut; log-normal."""
    sigma: NonNegative = 0.8
    """Spread of the lengths: standard deviation of the logarithm."""
    shared: Fraction = 0.0
    """How much of that variance is the prompt's: its responses have it in common."""
    speed: Annotated[float, Field(gt=0)] = 1.0
    """Emulated seconds that pass in a second; everything emulated in a run has the same."""


class EmulatedTraining(Section):
    seconds_per_token: NonNegative = 1e-5
    """Seconds of one rank for a token that it trains on, prompts included."""
    speed: Annotated[float, Field(gt=0)] = 1.0
    """Emulated seconds that pass in a second; everything emulated in a run has the same."""


class Serving(Section):
    """How a language model is served, as policy or as judge."""

    engine: Literal["embedded", "vllm", "sglang", "emulated"] = "embedded"
    """`embedded`: transformers models in G-Core's own batched engine; `vllm`, `sglang`: vLLM or SGLang, which must be
    installed, see docs/engines.md; `emulated`: random tokens from a device whose time is slept, see
    docs/placement.md."""
    emulated: EmulatedDevice | None = None
    """`emulated`: how fast that device is, and how much it says."""
    max_concurrent: PositiveInt = 256
    """Sequences a replica decodes at once; more wait in its queue."""
    min_step_s: NonNegative = 0.0
    """Embedded: shortest decoding step in seconds; emulates a slower device."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs; `auto`: as `training.device`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of its weights; `auto`: float32 on CPU, bfloat16 on GPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.4
    """vLLM, SGLang: share of the GPU's memory for weights and KV cache."""
    tensor_parallel: PositiveInt = 1
    """vLLM, SGLang: GPUs of one replica."""
    eager: bool = False
    """vLLM, SGLang: neither compile nor capture CUDA graphs: starts sooner, decodes slower."""
    seeds: bool | Auto = "auto"
    """vLLM, SGLang: give every request a seed of its own, so that samples repeat; costs speed on GPUs. `auto`: on
    CPU."""

    @model_validator(mode="after")
    def _device(self) -> Self:
        if (self.engine == "emulated") != (self.emulated is not None):
            raise ValueError(
                f"engine={self.engine}, section `emulated` is {'there' if self.emulated else 'missing'}: "
                "engine=emulated needs it, and no other engine has it"
            )
        return self


def check_lora(lora: Lora | None, backend: str, sleep: int | Auto) -> None:
    """Adapters fit the rest, or ValueError."""
    if lora is not None and backend == "emulated":
        raise ValueError("model.lora: training.backend=emulated trains nothing; take one of the two away")
    if lora is not None and sleep == 2:
        raise ValueError(
            "generation.sleep=2 drops the engines' weights, and with model.lora the trainer sends adapters alone; "
            "expected 0, 1 or auto"
        )


def check_emulated(backend: str, training: EmulatedTraining | None, policy: Serving, judges: Sequence[Serving]) -> None:
    """What is emulated fits together, or ValueError."""
    if (backend == "emulated") != (training is not None):
        raise ValueError(
            f"training.backend={backend}, section `training.emulated` is {'there' if training else 'missing'}: "
            "backend=emulated needs it, and no other backend has it"
        )
    if training is not None and policy.engine != "emulated":
        raise ValueError(
            f"training.backend=emulated has no weights to give, got generation.engine={policy.engine}; expected "
            "generation.engine=emulated"
        )
    sections = (training, policy.emulated, *(judge.emulated for judge in judges))
    speeds = sorted({section.speed for section in sections if section is not None})
    if len(speeds) > 1:
        raise ValueError(f"everything emulated in a run shares one clock, got emulated.speed {speeds}; expected one")
