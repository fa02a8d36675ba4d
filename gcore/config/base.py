"""What the sections of the configuration are made of, and the one that several of them hold: a model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


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


class Model(Section):
    path: str | None = None
    """Folder of a Hugging Face model (config.json, safetensors, tokenizer)."""
    build: BuildModel | None = None
    """Build a small model from scratch instead, with its own tokenizer: no download."""
    tokenizer: str | None = None
    """Folder of the tokenizer, when it is not in `model.path`."""
    chat_template: str | None = None
    """Jinja chat template: the text itself or the path of a file. Default: the tokenizer's own."""
    trust_remote_code: bool = False
    """Allow Python code shipped inside the model folder to run."""

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.path is None) == (self.build is None):
            raise ValueError(
                "set exactly one of model.path (a Hugging Face folder) and model.build (a small model made here)"
            )
        return self


class Serving(Section):
    """How a language model is served, as policy or as judge."""

    engine: Literal["embedded", "vllm"] = "embedded"
    """`embedded`: transformers models in G-Core's own batched engine; `vllm`: vLLM, which must be installed."""
    max_concurrent: PositiveInt = 256
    """Sequences a replica decodes at once; more wait in its queue."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs; `auto`: as `training.device`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of its weights; `auto`: float32 on CPU, bfloat16 on GPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.4
    """vLLM: share of the GPU's memory for weights and KV cache."""
    tensor_parallel: PositiveInt = 1
    """vLLM: GPUs of one replica."""
    eager: bool = False
    """vLLM: neither compile nor capture CUDA graphs: starts sooner, decodes slower."""
    seeds: bool | Auto = "auto"
    """vLLM: give every request a seed of its own, so that samples repeat; costs speed on GPUs. `auto`: on CPU."""
