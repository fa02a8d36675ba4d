"""Base types of the configuration, and sections that several other sections contain, such as a model."""

from __future__ import annotations

import math
import numbers
from functools import reduce
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gcore.config.engines import DEFAULT_ENGINE, ENGINES, EngineName, EngineTraits, engines_with
from gcore.config.leaves import leaves_of

Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]  # clocks overflow above 9e9
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # torch takes no larger one

LARGEST = 1e30  # float32 ends at 3e38, and numbers are multiplied


def _folder_name(name: str) -> str:
    """The name of a folder in `run.dir`. It must not be a path outside of `run.dir`, or `run.dir` itself."""
    if not name.strip() or name in (".", "..") or not name.isprintable() or set(name) & set("/\\"):
        raise ValueError(f"got {name!r}; expected a folder name without / or \\ (its parent folder is run.dir)")
    return name


FolderName = Annotated[str, AfterValidator(_folder_name)]


def non_finite(tree: Any) -> str:
    """The place of a NaN or an infinity in nested lists and mappings: {"a": [1.0, math.nan]} -> "a.1 is nan". Empty:
    all numbers are finite."""
    for path, value in leaves_of(tree):
        if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral) and not math.isfinite(value):
            return f"{path} is {value}"
    return ""


def _finite(args: dict[str, Any]) -> dict[str, Any]:
    if place := non_finite(args):
        raise ValueError(f"{place}; expected a finite number")
    return args


Arguments = Annotated[dict[str, Any], AfterValidator(_finite)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,  # such a number ruins a run without an error
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @model_validator(mode="after")
    def _fits_float32(self) -> Self:
        for name, value in self:
            if isinstance(value, float) and abs(value) > LARGEST:
                raise ValueError(f"{name}={value:g}; expected a number of at most {LARGEST:g}")
        return self


class BuildTower(Section):
    hidden_size: PositiveInt = 64
    """Width of the tower, which encodes media."""
    intermediate_size: PositiveInt = 128
    """Width of its feed-forward layers."""
    layers: PositiveInt = 2
    """Number of its layers."""
    heads: PositiveInt = 4
    """Attention heads; must divide `hidden_size`."""

    @model_validator(mode="after")
    def _heads(self) -> Self:
        if self.hidden_size % (4 * self.heads):
            raise ValueError(f"4 * heads={4 * self.heads} must divide hidden_size={self.hidden_size}")
        return self


class BuildVision(BuildTower):
    patch_size: PositiveInt = 4
    """Edge of a patch in pixels. A feature covers 2 x 2 patches."""
    image_size: PositiveInt = 16
    """Edge in pixels of the square whose area every image is resized to, a multiple of 2 * `patch_size`. Its aspect
    ratio stays about the same."""

    @model_validator(mode="after")
    def _divisible(self) -> BuildVision:
        if self.image_size % (2 * self.patch_size):
            raise ValueError(f"2 * patch_size={2 * self.patch_size} must divide image_size={self.image_size}")
        return self


class BuildAudio(BuildTower):
    mel_bins: PositiveInt = 40
    """Frequencies of the spectrogram."""
    seconds: PositiveInt = 2
    """Length of the longest clip."""


# sections of a built model, and the architectures that each can be added to
TOWERS = {"vision": ("qwen3", "qwen3_5_text"), "audio": ("qwen2",)}


class BuildModel(Section):
    architecture: str = "qwen3"
    """Model family, by its `model_type` in transformers: qwen3, llama, qwen3_moe, qwen3_5_text, nemotron_h, ..."""
    config: dict[str, bool | int | float | str | list[int] | list[str] | None] = {}
    """Further keys of the family's config.json, such as the sizes of its recurrent layers."""
    hidden_size: PositiveInt = 128
    """Width of the hidden states."""
    intermediate_size: PositiveInt = 512
    """Width of the feed-forward layers; with `qwen3_moe` of each expert."""
    experts: PositiveInt = 8
    """`qwen3_moe`: experts per layer."""
    active_experts: PositiveInt = 2
    """`qwen3_moe`: experts that a token uses in each layer."""
    layers: PositiveInt = 4
    """Number of decoder layers."""
    heads: PositiveInt = 4
    """Attention heads; must divide `hidden_size`."""
    kv_heads: PositiveInt = 4
    """Key/value heads; must divide `heads`."""
    max_length: PositiveInt = 256
    """Maximum length of a sequence (prompt and response) in tokens."""
    alphabet: str = "0123456789+-*/=()?,.: abcdefghijklmnopqrstuvwxyz"
    """Characters of the built-in one-token-per-character tokenizer."""
    vision: BuildVision | None = None
    """A vision tower: the model takes images. With `architecture: qwen3` it is a small Qwen3-VL, with `qwen3_5_text` a
    small Qwen3.5. See docs/vision.md."""
    audio: BuildAudio | None = None
    """An audio encoder: the model is a small Qwen2-Audio, which takes audio clips. Only with `architecture: qwen2`. See
    docs/audio.md."""

    @model_validator(mode="after")
    def _divisible(self) -> BuildModel:
        for name, needed in TOWERS.items():
            if getattr(self, name) is not None and self.architecture not in needed:
                some = " or ".join(needed)
                raise ValueError(f"{name} needs architecture={some}, got {self.architecture}; expected no {name}")
        if self.architecture != "qwen3_moe" and (self.experts, self.active_experts) != (8, 2):  # not the defaults
            raise ValueError(f"experts and active_experts need architecture=qwen3_moe, got {self.architecture}")
        if self.active_experts > self.experts:
            raise ValueError(f"active_experts={self.active_experts}; expected at most experts={self.experts}")
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} must divide hidden_size={self.hidden_size}, and kv_heads={self.kv_heads} must "
                "divide heads"
            )
        return self


class BuildDenoiser(Section):
    classes: list[str] = [*"0123456789"]
    """The prompts that the model knows: one learned vector each."""
    channels: PositiveInt = 1
    """Channels of the pictures: 1 (grey) or 3."""
    image_size: PositiveInt = 8
    """Height and width of the pictures in pixels."""
    patch_size: PositiveInt = 2
    """Height and width of the patches that are the tokens of the network; must divide `image_size`."""
    hidden_size: PositiveInt = 96
    """Width of the hidden states."""
    layers: PositiveInt = 4
    """Number of transformer layers."""
    heads: PositiveInt = 4
    """Attention heads; must divide `hidden_size`."""

    @property
    def tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @model_validator(mode="after")
    def _divisible(self) -> BuildDenoiser:
        if self.image_size % self.patch_size or self.hidden_size % self.heads or self.hidden_size % 2:
            raise ValueError(
                f"patch_size={self.patch_size} must divide image_size={self.image_size}, and heads={self.heads} and 2 "
                f"must divide hidden_size={self.hidden_size}"
            )
        if self.channels not in (1, 3):
            raise ValueError(f"channels={self.channels}; expected 1 or 3")
        if not self.classes or len(set(self.classes)) != len(self.classes):
            raise ValueError(f"classes={self.classes}; expected at least one, each once")
        return self


class Model(Section):
    path: str | None = None
    """Folder of a Hugging Face model (config.json, safetensors, tokenizer), or a hub id such as `Qwen/Qwen3-0.6B`, read
    from the local cache or downloaded. A local folder of that name takes precedence. `runs/NAME`: the newest model that
    this run exported (`checkpoint.export`)."""
    revision: str | None = None
    """Hub ids: branch, tag or commit. Default: `main`. The run's `config.yaml` records the commit."""
    build: BuildModel | None = None
    """Build a small model from scratch instead of `path`, with its own tokenizer; no download."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer, if it is not in `model.path`."""
    tokenizer_revision: str | None = None
    """Hub ids: branch, tag or commit of `tokenizer`."""
    chat_template: str | None = None
    """Jinja chat template: the text itself or the path of a file. Default: the tokenizer's own. A policy without a
    template accepts only prompts that are strings, and reads them unchanged."""
    trust_remote_code: bool = False
    """Allow Python code in the model folder to run."""

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if [self.path, self.build, getattr(self, "denoiser", None)].count(None) != 2:
            raise ValueError(
                "set exactly one of model.path (a Hugging Face folder or hub id) and model.build (a small model built "
                "from scratch), or for a policy model.denoiser (a small diffusion model)"
            )
        if self.revision is not None and self.path is None:
            raise ValueError("model.revision: got a revision without model.path; expected both or neither")
        if self.tokenizer_revision is not None and self.tokenizer is None:
            raise ValueError(
                "model.tokenizer_revision: got a revision without model.tokenizer; expected both or neither"
            )
        return self


def _trained(value: Any) -> None:
    if value is not None:
        raise ValueError("random weights cannot score; expected path instead (objective=reward_model trains a model)")


class StoredModel(Model):
    build: Annotated[None, BeforeValidator(_trained)] = None
    """Not for models that score: their weights are in a folder."""


class Lora(Section):
    rank: PositiveInt = 16
    """Rank of the two factors that are trained for each target matrix."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The product of the two factors is scaled by `alpha / rank`."""
    targets: list[str] = []
    """Linear layers, by the last part of their names, such as `[q_proj, v_proj]`. Default: all of attention and MLP."""
    parts: Annotated[list[Literal["text", "vision"]], Field(min_length=1)] = ["text"]
    """Which parts of a model that takes images have adapters. `text`: the decoder; `vision`: the vision tower and its
    projector. Parts without adapters are frozen."""


ToolFormatName = Literal[
    "auto",
    "hermes",
    "qwen3_coder",
    "llama3",
    "llama4",
    "mistral",
    "deepseek",
    "deepseek_v32",
    "glm",
    "kimi",
    "harmony",
    "minimax",
]


class PolicyModel(Model):
    tool_format: ToolFormatName = "auto"
    """How the policy writes thoughts and tool calls, for `use_tools`, `ctx.read` and the endpoint, see
    docs/extending.md. `auto`: by marks in the chat template; `hermes` if there are none."""
    denoiser: BuildDenoiser | None = None
    """Build a small diffusion model from scratch instead of `path`; needs `generation.denoising`."""
    lora: Lora | None = None
    """Train low-rank adapters and freeze the weights; only the adapters are sent to the engines and saved in
    checkpoints, see docs/engines.md. `{}` uses the defaults. Default: train all weights."""


class RewardSource(Section):
    """What computes one of the rewards of a response."""

    name: str
    """Name in the logs: `reward/NAME`."""
    weight: float = 1.0
    """Weight in the sum that is the reward."""


class EmulatedDevice(Section):
    base_s: Annotated[float, Field(gt=0)] = 0.02
    """Fixed seconds per decoding step."""
    per_sequence_s: NonNegative = 0.0
    """Additional seconds per decoding step and running sequence."""
    prefill_s_per_token: NonNegative = 0.0
    """Seconds per prompt token. Prompts are processed one after another; decoding stops during that time."""
    sleep_s: NonNegative = 0.0
    """Seconds to free the device memory."""
    wake_s: NonNegative = 0.0
    """Seconds to allocate the device memory again."""
    weights_s: NonNegative = 0.0
    """Seconds to load new weights from the trainer."""
    mean_tokens: Annotated[float, Field(ge=1)] = 256.0
    """Mean length of a response before the length limit; lengths are log-normal."""
    sigma: NonNegative = 0.8
    """Spread of the lengths: standard deviation of the logarithm."""
    shared: Fraction = 0.0
    """Fraction of the variance of lengths that all responses of a prompt share."""


class Serving(Section):
    """How a language model is served, as policy or as judge."""

    engine: EngineName = DEFAULT_ENGINE
    """`embedded`: transformers models in G-Core's own batched engine; `vllm`, `sglang`: vLLM or SGLang, which must be
    installed, see docs/engines.md; `emulated`: random tokens from an emulated device that only sleeps, see
    docs/placement.md."""
    emulated: EmulatedDevice | None = None
    """`emulated`: speed of the device and lengths of the responses."""
    max_concurrent: PositiveInt = 256
    """Maximum number of sequences that a replica decodes at once; further requests queue."""
    min_step_s: NonNegative = 0.0
    """Embedded: minimum seconds per decoding step; emulates a slower device."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the weights; `auto`: float32 on CPU, bfloat16 on GPU."""
    precision: Literal["auto", "fp8"] = "auto"
    """`fp8`: the matrices of layers are rounded to FP8. Embedded: in blocks of 128 x 128 with a scale each; it computes
    with these numbers in `dtype`, which shows what FP8 does to learning and is not faster. vLLM: on GPUs, with a scale
    per row; it computes in FP8, see docs/engines.md."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.4
    """vLLM, SGLang: share of the GPU's memory for weights and KV cache. If several engines of the policy are on a GPU,
    they divide it; a judge's replica has it alone."""
    tensor_parallel: PositiveInt = 1
    """vLLM, SGLang: GPUs per replica."""
    eager: bool = False
    """vLLM, SGLang: do not compile or capture CUDA graphs; starts faster, decodes slower. Diffusion models on a GPU: do
    not compile the layers."""
    decode_steps: PositiveInt = 8
    """vLLM with `tensor_parallel: 1` on a GPU: at most this many decoding steps are launched at once, without vLLM's
    scheduler between them, see docs/engines.md. 1: the scheduler is called for every step."""
    speculation: Literal["off", "auto", "ngram", "suffix", "mtp", "draft"] = "off"
    """Embedded: propose tokens and compute several of them in one step; the samples are the same, see docs/engines.md.
    `ngram`: what followed the same tokens in the prompt or the sample itself; `suffix`: also in the prompt's other
    samples, and those of earlier epochs. Both stop by themselves where they do not pay. `auto`: `suffix` if engine and
    model can. `mtp` and `draft`, proposals of a model, are not built yet."""
    seeds: bool | Auto = "auto"
    """vLLM, SGLang: a separate seed per request, so that samples are reproducible; slower on GPUs. `auto`: only on
    CPU."""

    @property
    def traits(self) -> EngineTraits:
        return ENGINES[self.engine]

    @model_validator(mode="after")
    def _device(self) -> Self:
        if self.traits.computes == (self.emulated is not None):
            raise ValueError(
                f"engine={self.engine}, section `emulated` is {'set' if self.emulated else 'not set'}; "
                "expected it with engine=emulated, and only there"
            )
        if self.precision == "fp8" and not self.traits.fp8:
            raise ValueError(
                f"precision=fp8 needs engine={engines_with('fp8')}, got {self.engine}; expected precision=auto"
            )
        if self.speculation in ("mtp", "draft"):
            raise ValueError(f"speculation={self.speculation} is not built yet; expected off, auto, ngram or suffix")
        if self.speculation not in ("off", "auto") and not self.traits.speculates:
            raise ValueError(
                f"speculation={self.speculation} needs engine={engines_with('speculates')}, got {self.engine}; "
                "expected speculation=off or auto"
            )
        return self


def refuse_value(config: Section, cause: str, key: str, is_excluded: bool, expected: str) -> None:
    """ValueError if a key has a value that the cause excludes: `objective=reward_model: got training.compile=true`"""
    if is_excluded:
        value = reduce(getattr, key.split("."), config)
        shown = str(value).lower() if isinstance(value, bool) else value
        got = f"{key}={shown}" if isinstance(value, str | int | float) else key
        raise ValueError(f"{cause}: got {got}; expected {expected}")
