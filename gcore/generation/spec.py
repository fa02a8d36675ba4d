"""What an engine replica is made of: launch/build.py makes an EngineSpec for `make_engine` of the engine's file."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore.config.base import Lora, Model, Serving
from gcore.hub import model_folder
from gcore.observe.trace import Tracer
from gcore.protocols import Engine

if TYPE_CHECKING:
    import torch

    from gcore.models.networks import Adapters


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """EngineSpec("engine-0", model, serving, max_length=2048, seed=0, device="auto", index=0, ...)"""

    name: str  # of the role
    model: Model
    serving: Serving
    max_length: int  # tokens of a sequence
    seed: int
    device: str
    index: int  # of the replica, among those of its role
    load_tokenizer: Callable[[Model], Any]
    trace: Path | None = None  # folder of the timeline
    memory_fraction: float = 0.4  # of the GPU
    sleeps: bool = False  # between rollouts
    restarts: bool = False  # the driver starts it again if its process ends
    media: bool = True  # requests may have some, if the model takes them

    @property
    def lora(self) -> Lora | None:
        """The adapters that weight updates consist of; None: whole weights, or a judge, which gets no updates."""
        return getattr(self.model, "lora", None)

    def open_tracer(self) -> Tracer:
        return Tracer(self.trace, self.name)

    def placed(self) -> tuple[torch.device, torch.dtype]:
        from gcore.models.networks import pick_device, pick_dtype

        device = pick_device(self.device, self.index)
        return device, pick_dtype(self.serving.dtype, device)


def make_engine(spec: EngineSpec) -> Engine:
    """An engine for a language model, by its own file."""
    engine: Engine = importlib.import_module(spec.serving.traits.module).make_engine(spec)
    return engine


@dataclass(frozen=True, slots=True)
class LibraryOptions:
    """The configuration of a replica that reads the model from a folder: of vLLM and SGLang.

    LibraryOptions(256, 2048, dtype="bfloat16", sleep=True)"""

    max_concurrent: int
    max_length: int
    dtype: str = "auto"
    device: str = "cpu"  # SGLang; vLLM knows its own
    memory_fraction: float = 0.4  # of the GPU
    cpu_cache_gib: float = 1.0
    tensor_parallel: int = 1
    fp8: bool = False  # weights are rounded when they arrive, and computed with in FP8; on GPUs
    eager: bool = False  # no compilation, no CUDA graphs: starts faster, decodes slower
    decode_steps: int = 8  # vLLM on GPUs: at most this many steps are launched at once (vllm_run.py)
    sleep: bool = False  # memory can be freed between rollouts; on GPUs
    seeds: bool = True  # noise depends on the sample; slower on GPUs
    seed: int = 0
    adapters: Adapters | None = None  # if given, weight updates contain only their factors
    dummy: bool = False  # vLLM: random weights, for a folder without weights
    media: bool = True  # vLLM: requests may have some, if the model takes them
    dies_with_library: bool = False  # exit if a process of the library dies: the driver restarts both

    @classmethod
    def of(cls, spec: EngineSpec) -> tuple[Path, LibraryOptions]:
        """The folder of the model, and the options."""
        from gcore.models.networks import adapters_in, save_built

        device, dtype = spec.placed()
        if spec.model.path is not None:
            folder = model_folder(spec.model, weights=True)
            os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the files are complete: no process needs the network
        else:
            folder = save_built(spec.model, spec.load_tokenizer(spec.model), spec.seed)
        serving = spec.serving
        return folder, cls(
            serving.max_concurrent,
            spec.max_length,
            dtype=str(dtype).removeprefix("torch."),
            device=device.type,
            memory_fraction=spec.memory_fraction,
            tensor_parallel=serving.tensor_parallel,
            fp8=serving.precision == "fp8",
            eager=serving.eager,
            decode_steps=serving.decode_steps,
            sleep=spec.sleeps,
            seeds=serving.seeds if serving.seeds != "auto" else device.type == "cpu",
            seed=spec.seed % 2**31,
            adapters=adapters_in(folder, spec.model),
            media=spec.media,
            dies_with_library=spec.restarts,
        )
