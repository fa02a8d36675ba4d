"""What the vLLM engine needs of vLLM itself: opening, closing, and reaching into its workers.

vLLM 0.24 (CUDA) and 0.32 (CPU) were read; where they differ, this file asks what is there. Traps that it knows of:
- What is made of images is kept twice: weights that come, and requests that are refused, leave only one half of it.
- The CPU build packs weights at load. A tied output head keeps its old pack after a reload, experts their old kernel.
- The CPU build cannot seed a prompt that is prefilled in pieces, and takes `torch.set_num_threads` away.
- The environment is read once in a process: what differs between engines must be an argument.
- vLLM's own shutdown takes the process groups of everybody in the process down.
- There are two samplers. Both put top-k and top-p into the logprobs, or leave the temperature out.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gcore.content.media import resolve
from gcore.content.tokens import tokens_of
from gcore.generation.sleep import GIB
from gcore.models import Adapters
from gcore.types import Request, UserError


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
    adapters: Adapters | None = None  # their factors are all the weights that come


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
        from vllm.usage.usage_lib import UsageContext
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
            if arguments.create_model_config().is_multimodal_model:  # it expands the places of images
                arguments.skip_tokenizer_init = False
            # its defaults for work that nobody watches: a step reads up to 16,384 tokens of prompts, not 2,048
            return LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
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


def with_images(
    process: Callable[..., Any],
    request: Request,
    max_length: int,
    name: str,
    prompt: dict[str, Any],
    *args: Any,
    **rest: Any,
) -> Any:
    """`process` of a prompt with the request's images. vLLM puts as many tokens in the place of each as the model
    wants, and knows images, and the prefixes they are in, by their content."""
    from PIL import Image

    content = tokens_of(request.content)

    images = {"image": [Image.fromarray(image) for image in map(resolve, content.images)]}
    try:
        found = process(name, {**prompt, "multi_modal_data": images}, *args, **rest)
    except Exception as error:  # each model's processor has its own; an image must not take the engine down
        raise ValueError(f"{len(content.images)} images in {content.size} tokens: {error}") from error
    length, answer = len(found.prompt_token_ids), request.params.max_tokens
    if length + answer > max_length:
        raise ValueError(
            f"prompt of {length} tokens with its images + max_tokens {answer} = {length + answer} exceeds the engine's "
            f"{max_length} (keys: data.max_prompt_length, generation.max_response_length)"
        )
    return found


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
    owners = [(n, m) for n, m in model.named_modules(remove_duplicate=False) if getattr(m, "weight", None) is not None]
    for name, head in owners:  # models that see have it, and what it is tied to, deeper down than others
        if name.endswith("lm_head") and any(m.weight is head.weight for other, m in owners if other != name):
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
