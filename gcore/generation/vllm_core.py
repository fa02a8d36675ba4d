"""What the vLLM engine needs of vLLM itself: opening, closing, and reaching into its workers.

vLLM 0.24 (CUDA) and 0.32 (CPU) were read; where they differ, this file asks what is there. Traps that it knows of:
- The CPU build packs weights at load. A tied output head keeps its old pack after a reload, experts their old kernel.
- The CPU build cannot seed a prompt that is prefilled in pieces, and takes `torch.set_num_threads` away.
- The environment is read once in a process: what differs between engines must be an argument.
- vLLM's own shutdown takes the process groups of everybody in the process down.
- There are two samplers. Both put top-k and top-p into the logprobs, or leave the temperature out.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gcore.types import Request, UserError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What the configuration says about one replica."""

    max_concurrent: int
    max_length: int
    dtype: str = "auto"
    memory_fraction: float = 0.4  # of the GPU
    cpu_cache_gib: float = 1.0
    threads: int = 1  # on CPU
    tensor_parallel: int = 1
    eager: bool = False  # no compilation, no CUDA graphs: starts faster, decodes slower
    sleep: bool = False  # memory can be given back between rollouts
    seeds: bool = True  # noise that belongs to the sample; on GPUs it costs speed
    seed: int = 0
    dummy: bool = False  # random weights: the folder has none


def open_core(folder: Path, options: VllmOptions) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the core in this process
    for name, value in {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several replicas on one machine must not sit on the same cores
    }.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
    for name in ("vllm", "torch._library.triton"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise UserError(f"generation.engine: vllm cannot be imported ({error}); install it, or use embedded") from error

    platform: dict[str, Any] = {"gpu_memory_utilization": options.memory_fraction, "enforce_eager": options.eager}
    if is_cpu():
        cache = int(options.cpu_cache_gib * GIB)
        platform = {"kv_cache_memory_bytes": cache, "enforce_eager": True, "enable_chunked_prefill": False}
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        generation_config="vllm",  # the folder's defaults for sampling do not count
        dtype=options.dtype,
        load_format="dummy" if options.dummy else "auto",
        max_model_len=options.max_length,
        max_num_seqs=options.max_concurrent,
        scheduling_policy="priority",  # who gives way when the KV cache is full
        enable_prefix_caching=True,
        enable_sleep_mode=options.sleep and not is_cpu(),
        tensor_parallel_size=options.tensor_parallel,
        seed=options.seed,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        max_logprobs=1,
        logprobs_mode="processed_logprobs",
        **platform,
    )
    with _threads_and_memory(options.threads) if is_cpu() else nullcontext():
        try:
            return LLMEngine.from_engine_args(arguments)
        except (ValueError, OSError) as error:  # a folder, a length or a memory fraction that will not do
            raise UserError(f"vLLM cannot serve {folder}: {' '.join(str(error).split())}") from error


@contextmanager
def _threads_and_memory(threads: int) -> Iterator[None]:
    """CPU: keep vLLM from binding this process's memory to a NUMA node, and from what it does to torch for good."""
    operators: Any = torch.ops._C
    set_threads = torch.set_num_threads
    set_threads(threads)
    operators.init_cpu_memory_env = lambda nodes: None
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        del operators.init_cpu_memory_env


def shut_core(core: Any) -> None:
    """Frees what the engine held. Process groups stay: others in this process may use them."""
    client = core.engine_core
    if hasattr(client, "_finalizer"):  # it would take them down
        client._finalizer.detach()
    client.engine_core.model_executor.shutdown()
    client.engine_core.scheduler.shutdown()
    del core, client
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def free_gpu() -> float:
    return float(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0.0


def check(request: Request, max_length: int, vocabulary: int, can_truncate: bool) -> None:
    """Complain of what cannot be served before vLLM sees it."""
    params, total = request.params, len(request.tokens_P) + request.params.max_tokens
    if len(request.tokens_P) == 0:
        raise UserError("an engine request has an empty prompt; expected at least one token (chat templates add some)")
    if request.tokens_P.min() < 0 or request.tokens_P.max() >= vocabulary:  # it would take the engine down
        raise UserError(
            f"an engine request has a token outside the vocabulary of {vocabulary}: tokens "
            f"{request.tokens_P.min()} to {request.tokens_P.max()} (is this the model's own tokenizer?)"
        )
    if params.max_tokens < 1:
        raise UserError(f"an engine request asks for {params.max_tokens} tokens; expected at least 1")
    if total > max_length:
        raise UserError(
            f"prompt of {len(request.tokens_P)} tokens + max_tokens {params.max_tokens} = {total} exceeds the engine's "
            f"{max_length} (keys: data.max_prompt_length, generation.max_response_length)"
        )
    if (params.top_k or params.top_p < 1) and not can_truncate:
        raise UserError(
            "this version of vLLM has a sampler that gives no logprobs of the untruncated policy; "
            "set generation.top_p to 1 and generation.top_k to 0"
        )


def shapes_of(folder: Path, config: Any) -> dict[str, tuple[int, ...]]:
    """The parameters of the checkpoint, each once; empty where it has no safetensors."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(files):
        if (folder / file).exists():
            with safe_open(folder / file, "np") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    if getattr(config, "tie_word_embeddings", False):
        shapes.pop("lm_head.weight", None)
    return {name: shape for name, shape in shapes.items() if not name.endswith(".inv_freq")}


def fitting(
    version: int,
    tensors: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    before: Set[str] | None,
) -> dict[str, torch.Tensor]:
    """The tensors that `shapes` names, or a complaint before any of them is loaded. With `before`, which names came
    in earlier parts, these are the last. Where there are no shapes, the first weights that come say what fits."""
    if not shapes:
        return dict(tensors)
    known = {name: tensor for name, tensor in tensors.items() if name in shapes}
    missing = sorted(shapes.keys() - known.keys() - before) if before is not None else []
    if missing:
        raise ValueError(f"weights of version {version} lack {missing[:3]} ({len(missing)} names)")
    for name, tensor in known.items():
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"weights of version {version}: {name} has shape {tuple(tensor.shape)}, expected {shapes[name]}"
            )
    return known


# ---- in the worker, which is another process where a model is split over GPUs


def load_in_place(worker: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    worker.get_model().load_weights(iter(tensors))
    torch.cuda.synchronize()  # the sender may change its memory from here on


def reload_packed(worker: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """CPU: weights are packed for the kernels at load."""
    model = worker.get_model()
    for module in model.modules():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None  # else the experts stay as they were
    worker.reload_weights(weights_iterator=iter(tensors))
    head: Any = getattr(model, "lm_head", None)
    if getattr(head, "weight", None) is getattr(getattr(model.model, "embed_tokens", None), "weight", ()):
        head.quant_method.process_weights_after_loading(head)  # the pack of a tied head is nobody's business


def keep_logprobs_untruncated(worker: Any) -> bool:
    """Logprobs of the tempered policy before top-k and top-p, from both of vLLM's samplers."""
    sampler = worker.model_runner.sampler
    if hasattr(sampler, "topk_topp_sampler"):
        truncating = sampler.topk_topp_sampler
        choose = truncating.forward

        def chosen(logits: Any, generators: Any, k: Any, p: Any) -> tuple[Any, Any]:
            if k is None and p is None:
                return choose(logits, generators, k, p)
            logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
            return choose(logits, generators, k, p)[0], logprobs

        truncating.forward = chosen
        return True
    states: Any = getattr(sampler, "sampling_states", None)
    if not (hasattr(sampler, "apply_sampling_params") and hasattr(states, "get_top_k_top_p")):
        return False
    temper, limits, sample = sampler.apply_sampling_params, states.get_top_k_top_p, sampler.sample
    seen: list[Any] = [None]

    def tempered(*args: Any, **options: Any) -> Any:
        seen[0] = temper(*args, **options)
        return seen[0]

    def limited(*args: Any) -> Any:
        found = limits(*args)
        if any(limit is not None for limit in found):  # what follows may write over the logits
            seen[0] = seen[0].clone()
        return found

    def sampled(*args: Any, **options: Any) -> Any:
        tokens = sample(*args, **options)[0]
        logits, seen[0] = seen[0], None
        return tokens, logits

    sampler.apply_sampling_params, states.get_top_k_top_p, sampler.sample = tempered, limited, sampled
    return True
