"""Access to vLLM's internals: opening and closing the core, and functions that run in its workers.

Written against the sources of vLLM 0.24 (CUDA) and 0.32 (CPU); where they differ, this file tests for the attribute.
Traps that it handles:
- vLLM caches processed images in two places. After a weight update or a rejected request, only one is correct.
- The CPU build packs weights at load. After a reload, a tied output head keeps its old pack and experts their old
  kernel.
- The CPU build cannot seed a prompt that is prefilled in chunks, and it replaces `torch.set_num_threads`.
- vLLM reads the environment once per process: settings that differ between engines must be arguments.
- vLLM's own shutdown destroys all process groups of the process, also those of other code.
- States of layers (Mamba, linear attention) are cached with prefixes only at the ends of large blocks, which needs
  prompts that are prefilled in chunks and the first model runner: prefix caching is off for models that have states.
- vLLM sizes its cache by the memory of the whole GPU. What other processes allocate during its start counts as its own.
- There are two samplers. The logprobs of both include top-k and top-p, or leave out the temperature.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gcore.config.engines import DEFAULT_ENGINE
from gcore.content.media import resolve
from gcore.content.processor import FILES
from gcore.content.tokens import tokens_of
from gcore.generation.sleep import GIB
from gcore.generation.spec import LibraryOptions
from gcore.generation.vllm_run import PLANNED_STEPS
from gcore.types import Request, UserError

log = logging.getLogger(__name__)
OUTSIDE_TORCH = GIB  # at most this much GPU memory of an engine is not PyTorch's: CUDA libraries, NCCL


def open_core(folder: Path, options: LibraryOptions) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # run the core in this process
    for name, value in {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0",  # it would multiply what other processes allocate
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # replicas on one machine must not be pinned to the same cores
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
        raise UserError(
            f"generation.engine: vllm cannot be imported ({error}); install it, or use {DEFAULT_ENGINE}"
        ) from error

    platform: dict[str, Any] = {"gpu_memory_utilization": options.memory_fraction, "enforce_eager": options.eager}
    if is_cpu():
        cache = int(options.cpu_cache_gib * GIB)
        platform = {"kv_cache_memory_bytes": cache, "enforce_eager": True, "enable_chunked_prefill": False}
    if options.fp8 and is_cpu():
        raise UserError("generation.precision=fp8: vLLM computes in FP8 on GPUs only; use engine=embedded")
    if options.fp8:
        platform["quantization"] = "fp8_per_channel"
    if options.tensor_parallel > 1:
        # inside a placement group of Ray, vLLM would make Ray actors, which need GPUs that are reserved already
        platform["distributed_executor_backend"] = "mp"
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        generation_config="vllm",  # ignore the folder's sampling defaults
        dtype=options.dtype,
        load_format="dummy" if options.dummy else "auto",
        max_model_len=options.max_length,
        max_num_seqs=options.max_concurrent,
        scheduling_policy="priority",  # which request is preempted when the KV cache is full
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
    with _threads_and_memory() if is_cpu() else own_memory():
        try:
            model = arguments.create_model_config()
            if model.is_hybrid or model.has_inner_state:
                arguments.enable_prefix_caching = False
                # the trainer's kernels; FlashInfer, which is the default on Hopper, compiles its own at each new host
                arguments.gdn_prefill_backend = "triton"
                log.warning("%s: no prefix caching, a prompt is computed for each of its samples", model.architecture)
            if options.media and takes_images(model, folder):  # needed to expand image placeholders
                arguments.skip_tokenizer_init = False
            elif options.decode_steps > 1 and options.tensor_parallel == 1 and not is_cpu():
                _prepare_runs(arguments, model, options)
            arguments.language_model_only = model.is_multimodal_model and arguments.skip_tokenizer_init
            # defaults for offline use: a step prefills up to 16,384 prompt tokens, not 2,048
            return LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
        except (ValueError, OSError) as error:  # an unusable folder, length or memory fraction
            raise UserError(f"vLLM cannot serve {folder}: {' '.join(str(error).split())}") from error


def takes_images(model: Any, folder: Path) -> bool:
    """`model`: vLLM's configuration of it. Without the files of a processor, a model with towers serves text alone."""
    return bool(model.is_multimodal_model) and any((folder / name).is_file() for name in FILES[:2])


def _prepare_runs(arguments: Any, model: Any, options: LibraryOptions) -> None:
    """What vllm_run.py needs: the second model runner, no step computed ahead, and positions for steps after the end of
    a request, if the model has any."""
    if model.is_attention_free:  # the second model runner of vLLM 0.24 computes them without their states
        log.warning("%s has no attention: vLLM's scheduler is called for every step", model.architecture)
        return
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    arguments.async_scheduling = False
    positions = getattr(model.hf_text_config, "max_position_embeddings", options.max_length)
    arguments.max_model_len = max(options.max_length, min(options.max_length + PLANNED_STEPS, positions))


@contextmanager
def _threads_and_memory() -> Iterator[None]:
    """CPU: one thread. vLLM must not bind this process's memory to a NUMA node, nor change torch permanently."""
    operators: Any = torch.ops._C
    set_threads = torch.set_num_threads
    set_threads(1)
    operators.init_cpu_memory_env = lambda nodes: None
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        del operators.init_cpu_memory_env


def skip_block_accounting(scheduler: Any) -> bool:
    """Let the scheduler ask for KV cache only at the first and the last position of a block. False: it asks always.

    In between, a running request that gets one token has its block already, and no block becomes full. vLLM would
    compute that nothing is to be done, which takes half of its scheduling time. Only for models with full attention in
    all layers: with other ones, blocks are also freed."""
    try:
        blocks = scheduler.kv_cache_manager
        kinds = list(blocks.coordinator.single_type_managers)
        allocate, nothing, size = blocks.allocate_slots, blocks.empty_kv_cache_blocks, int(kinds[0].block_size)
        names = list(inspect.signature(allocate).parameters)
    except (AttributeError, ValueError, IndexError):
        names, kinds = [], []
    if names[:2] != ["request", "num_new_tokens"] or "num_lookahead_tokens" not in names:
        logging.getLogger(__name__).warning("unknown version of vLLM's scheduler: its block accounting is not skipped")
        return False
    if [type(kind).__name__ for kind in kinds] != ["FullAttentionManager"]:
        return False

    def allocate_at_ends(
        request: Any, num_new_tokens: int, *args: Any, num_lookahead_tokens: int = 0, **options: Any
    ) -> Any:
        """Requests that are not running yet have more arguments."""
        decodes = num_new_tokens == 1 and not (num_lookahead_tokens or args or options)
        if decodes and 0 < request.num_computed_tokens % size < size - 1:
            return nothing
        return allocate(request, num_new_tokens, *args, num_lookahead_tokens=num_lookahead_tokens, **options)

    blocks.allocate_slots = allocate_at_ends
    return True


@contextmanager
def own_memory() -> Iterator[None]:
    """GPU: while vLLM starts, the trainer and other engines on the GPU allocate memory too. vLLM subtracts the growth
    of all memory that is not PyTorch's from its cache, which could leave none, and it stops if memory becomes free.
    With this, others count for at most OUTSIDE_TORCH."""
    from vllm.utils.mem_utils import MemorySnapshot

    measure, first = MemorySnapshot.measure, list[tuple[int, int]]()

    def measure_own(snapshot: Any) -> None:
        measure(snapshot)
        first.append((snapshot.free_memory, snapshot.non_torch_memory))  # only the first is used
        free, outside = first[0]
        snapshot.free_memory = min(snapshot.free_memory, free)
        snapshot.non_torch_memory = min(max(snapshot.non_torch_memory, outside), outside + OUTSIDE_TORCH)

    MemorySnapshot.measure = measure_own
    try:
        yield
    finally:
        MemorySnapshot.measure = measure


def shut_core(core: Any) -> None:
    """Free the engine's memory. Process groups stay: other code in this process may use them."""
    client = core.engine_core
    if hasattr(client, "_finalizer"):  # it would destroy them
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
    """Call `process` with the prompt and the request's images. vLLM expands each placeholder to as many tokens as the
    model needs. It identifies images, and prefixes that contain them, by content."""
    from PIL import Image

    content = tokens_of(request.content)
    images = {"image": [Image.fromarray(resolve(medium.array)) for medium in content.media]}
    try:
        expanded = process(name, {**prompt, "multi_modal_data": images}, *args, **rest)
    except Exception as error:  # each model's processor has its own errors; an image must not stop the engine
        raise ValueError(f"{len(content.media)} images in {content.size} tokens: {error}") from error
    if content.short_P is not None and list(expanded.prompt_token_ids) != content.tokens_T.tolist():
        raise ValueError(
            f"vLLM expands {len(content.media)} images to {len(expanded.prompt_token_ids)} tokens, the processor to "
            f"{content.size}, or to others; expected the same ones: the trainer would see another prompt "
            f"(use generation.engine={DEFAULT_ENGINE})"
        )
    length, max_tokens = len(expanded.prompt_token_ids), request.params.max_tokens
    if length + max_tokens > max_length:
        raise ValueError(
            f"prompt of {length} tokens with its images + max_tokens {max_tokens} = {length + max_tokens} exceeds the "
            f"engine's {max_length} (keys: data.max_prompt_length, generation.max_response_length)"
        )
    return expanded


# ---- run in the worker, which is another process if the model is split over GPUs


def load_in_place(worker: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    worker.get_model().load_weights(iter(tensors))
    torch.cuda.synchronize()  # the sender may overwrite its memory when this function returns


def reload_packed(worker: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """All weights at once: on CPU they are packed for the kernels at load, in FP8 they are rounded layer by layer. Pack
    again what vLLM does not."""
    model = worker.get_model()
    for module in model.modules():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None  # otherwise the experts keep the old weights
    worker.reload_weights(weights_iterator=iter(tensors))
    owners = [(n, m) for n, m in model.named_modules(remove_duplicate=False) if getattr(m, "weight", None) is not None]
    for name, head in owners:  # multimodal models nest the head, and the embedding it is tied to, more deeply
        if name.endswith("lm_head") and any(m.weight is head.weight for other, m in owners if other != name):
            head.quant_method.process_weights_after_loading(head)  # vLLM does not pack a tied head again


def keep_logprobs_untruncated(worker: Any) -> bool:
    """Make both of vLLM's samplers return logprobs with temperature, before top-k and top-p. False: unknown sampler."""
    sampler = worker.model_runner.sampler
    if hasattr(sampler, "topk_topp_sampler"):
        truncating = sampler.topk_topp_sampler
        choose = truncating.forward

        def choose_with_logprobs(logits: Any, generators: Any, k: Any, p: Any) -> tuple[Any, Any]:
            if k is None and p is None:
                return choose(logits, generators, k, p)
            logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
            return choose(logits, generators, k, p)[0], logprobs

        truncating.forward = choose_with_logprobs
        return True
    states: Any = getattr(sampler, "sampling_states", None)
    if not (hasattr(sampler, "apply_sampling_params") and hasattr(states, "get_top_k_top_p")):
        return False
    apply_params, limits, sample = sampler.apply_sampling_params, states.get_top_k_top_p, sampler.sample
    recorded: list[Any] = [None]

    def apply_and_record(*args: Any, **options: Any) -> Any:
        recorded[0] = apply_params(*args, **options)
        return recorded[0]

    def limits_and_copy(*args: Any) -> Any:
        bounds = limits(*args)
        if any(limit is not None for limit in bounds):  # the next operations may overwrite the logits
            recorded[0] = recorded[0].clone()
        return bounds

    def sample_with_logits(*args: Any, **options: Any) -> Any:
        tokens = sample(*args, **options)[0]
        logits, recorded[0] = recorded[0], None
        return tokens, logits

    sampler.apply_sampling_params, states.get_top_k_top_p = apply_and_record, limits_and_copy
    sampler.sample = sample_with_logits
    return True
