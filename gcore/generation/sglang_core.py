"""Access to SGLang's internals: opening and closing it, and patches that run in its scheduler's process.

    role: SglangBackend ── SGLang's front (a queue, no tokenizer) ──ipc──> child: SGLang's scheduler, the model

Written against SGLang 0.5.15.post1 and 0.5.23; both were run on a CPU. Traps that this file handles:
- When SGLang opens, it changes its process: logging, event loop policy, process start method, environment, SIGQUIT.
  When it closes, it kills every child of the process, also those it did not start, and leaves sockets open that keep
  the process from exiting. A child that fails kills the process.
- Its CPU kernels are not on PyPI. Without them parts of it assume a GPU: rotary embeddings look for vLLM's kernels.
- It stops at the model's end-of-sequence token, or ignores all stop tokens.
- It seeds requests only in its deterministic mode, which needs its GPU kernels. Its top-p is a share of the whole
  distribution, not of what top-k leaves. Requests with a seed, top-k or top-p use the embedded engine's sampling.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import inspect
import json
import logging
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gcore.config.engines import DEFAULT_ENGINE
from gcore.generation.decoding import RowTable, sample
from gcore.generation.sleep import GIB
from gcore.generation.spec import LibraryOptions
from gcore.types import UserError

SPARE = 8  # tokens of the context length that SGLang reserves


class SglangServer:
    """A running SGLang: its front in this process, and the processes that it started."""

    def __init__(self, front: Any, processes: list[Any], failure: Path, vocabulary: int) -> None:
        self.front, self.manager, self.vocabulary = front, front.tokenizer_manager, vocabulary
        self.has_sessions = hasattr(self.manager, "begin_weight_update")  # of weight updates; newer versions need them
        self._processes, self._failure = processes, failure

    def died(self) -> str:
        """Why a process of SGLang died; empty if all are alive."""
        gone = [process for process in self._processes if not process.is_alive()]
        if not gone:
            return ""
        why = _last_line(self._failure) or f"exit code {gone[0].exitcode}"
        return f"SGLang's process {gone[0].pid} is gone ({why})"

    def close(self) -> None:
        atexit.unregister(self.front.shutdown)
        self.front.shutdown()
        for socket in (self.manager.send_to_scheduler, self.front.send_to_rpc):
            socket.context.destroy(linger=0)  # otherwise it later blocks forever on unread messages
        self._failure.unlink(missing_ok=True)


def open_server(folder: Path, options: LibraryOptions) -> SglangServer:
    """Call it in the thread, and with the event loop, that will use the server."""
    handle, name = tempfile.mkstemp(prefix="sglang-", suffix=".failure")
    os.close(handle)
    failure, processes = Path(name), list[Any]()
    config = json.loads((folder / "config.json").read_text())
    longest = config.get("max_position_embeddings", options.max_length)
    if options.max_length > longest:
        raise UserError(f"SGLang cannot serve {folder}: {options.max_length} tokens, the model has {longest} positions")
    with _restored_process_state():
        front_class = _front_class(partial(_schedule, name, options.device == "cpu", options.seeds), processes)
        try:
            front = front_class(**_arguments(folder, options, config))
            front.tokenizer_manager._subprocess_watchdog.stop()  # it would kill this process if a child dies
        except Exception as error:
            _end(processes)
            why = _last_line(failure) or " ".join(str(error).split())
            raise UserError(f"SGLang cannot serve {folder}: {why}") from error
    return SglangServer(front, processes, failure, config["vocab_size"])


def _front_class(schedule: Callable[..., None], processes: list[Any]) -> Any:
    """SGLang's Engine with our scheduler process and no detokenizer. Its shutdown ends only its own processes."""
    try:
        from sglang.srt.entrypoints.engine import Engine
    except (ImportError, RuntimeError, OSError) as error:
        message = f"sglang cannot be imported ({error}); see docs/engines.md, or use {DEFAULT_ENGINE}"
        raise UserError(f"generation.engine: {message}") from error

    class Front(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(schedule)

        @classmethod
        def _launch_scheduler_processes(cls, *args: Any, **options: Any) -> Any:
            launched = super()._launch_scheduler_processes(*args, **options)
            processes.extend(launched[1])
            return launched

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **options: Any) -> Any:
            return [], []

        def shutdown(self) -> None:
            _end(processes)

    return Front


def _end(processes: list[Any]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join(10)


def _arguments(folder: Path, options: LibraryOptions, config: dict[str, Any]) -> dict[str, Any]:
    platform: dict[str, Any] = {
        "mem_fraction_static": options.memory_fraction,
        "disable_cuda_graph": options.eager,
        "enable_memory_saver": options.sleep,
    }
    if options.device == "cpu":
        platform = {
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "max_total_tokens": _cache_tokens(options, config),
        }
    elif options.dtype == "float32" or not _has_flash_attention():
        platform["attention_backend"] = "triton"  # otherwise, on Hopper, SGLang uses FlashAttention without a check
    return {
        "model_path": str(folder),
        "device": options.device,
        "dtype": options.dtype,
        "skip_tokenizer_init": True,
        "context_length": options.max_length + SPARE,
        "max_running_requests": options.max_concurrent,
        "sampling_backend": "pytorch",  # the other backends do not support seeds
        "sampling_defaults": "openai",  # ignore the folder's sampling defaults
        "incremental_streaming_output": True,
        "sleep_on_idle": True,
        "weight_version": "0",
        "random_seed": options.seed,
        "tp_size": options.tensor_parallel,
        "log_level": "error",
        **platform,
    }


def _has_flash_attention() -> bool:
    try:
        importlib.import_module("sgl_kernel.flash_attn")
    except ImportError:
        return False
    return True


def _cache_tokens(options: LibraryOptions, config: dict[str, Any]) -> int:
    """Size of the KV cache: what all requests can fill, or what fits in memory."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    width = config.get("num_key_value_heads", config["num_attention_heads"]) * head
    size = 2 * config["num_hidden_layers"] * width * (4 if options.dtype == "float32" else 2)
    per_request = options.max_length + SPARE
    return max(2 * per_request, min(options.max_concurrent * per_request, int(options.cpu_cache_gib * GIB) // size))


@contextmanager
def _restored_process_state() -> Iterator[None]:
    """Restore what SGLang changes in this process while it opens. Its children see the environment set here."""
    root = logging.getLogger()
    loop_policy, start_method = asyncio.get_event_loop_policy(), multiprocessing.get_start_method(allow_none=True)
    logged, environment = (root.level, root.handlers[:]), dict(os.environ)
    os.environ |= {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        root.setLevel(logged[0])
        root.handlers[:] = logged[1]
        asyncio.set_event_loop_policy(loop_policy)
        multiprocessing.set_start_method(start_method, force=True)


def _last_line(file: Path) -> str:
    with suppress(OSError):
        return next((line.strip() for line in reversed(file.read_text().splitlines()) if line.strip()), "")
    return ""


# ---- in the scheduler's process


def _schedule(failure: str, cpu: bool, seeds: bool, *args: Any, **options: Any) -> None:
    """Entry point of the scheduler's process. `failure`: file for the traceback if it dies."""
    import psutil
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers import scheduler

    process_class: Any = psutil.Process
    process_class.send_signal = lambda process, signal: os._exit(1)  # SGLang would kill the role's process
    traceback = scheduler.get_exception_traceback

    def recorded_traceback() -> str:
        text = str(traceback())
        Path(failure).write_text(text)
        return text

    scheduler.get_exception_traceback = recorded_traceback
    ModelConfig._get_hf_eos_token_id = lambda config: None  # only the stop tokens of a request end it
    if cpu:
        from sglang.srt.layers.rotary_embedding import base

        base._is_cpu = True
        torch._dynamo.config.disable = True
        torch.set_num_threads(1)
    _flush_while_paused()
    _sample_as_embedded()
    if seeds:
        _seed_requests()
    scheduler.run_scheduler_process(*args, **options)


def _flush_while_paused() -> None:
    """Older versions crash if weights arrive while requests wait, including requests that they retracted themselves."""
    from sglang.srt.managers.scheduler import Scheduler

    flush: Any = Scheduler.flush_cache
    if "ignore_waiting" in inspect.signature(Scheduler.is_fully_idle).parameters:
        return

    def flushed(self: Any, *args: Any, **options: Any) -> Any:
        waiting = self.waiting_queue
        if self._engine_paused:
            self.waiting_queue = []
        try:
            return flush(self, *args, **options)
        finally:
            self.waiting_queue = waiting

    Scheduler.flush_cache = flushed


def _sample_as_embedded() -> None:
    """Use the embedded engine's sampling: noise depends on the sample, and top-p is a share of what top-k leaves."""
    from sglang.srt.layers import sampler

    draw = sampler.Sampler._sample_from_probs
    returns_mask = hasattr(sampler, "_SamplingMaskCapture")  # newer versions can also return the sampling mask

    def sample_rows(self: Any, probs: torch.Tensor, info: Any, positions: torch.Tensor, plain: bool) -> Any:
        if plain and info.sampling_seed is None:
            return draw(self, probs, info, positions, plain)
        n, rows = len(probs), RowTable(len(probs))
        top_k = info.top_ks.cpu().numpy()
        rows.top_k[:], rows.top_p[:] = np.where(top_k < probs.shape[-1], top_k, 0), info.top_ps.cpu().numpy()
        if info.sampling_seed is None:
            rows.noise_key[:] = np.random.default_rng().integers(2**63, size=n)
        else:
            keys, offsets = info.sampling_seed.cpu().numpy().T
            rows.noise_key[:], rows.position[:] = keys.view(np.uint64), positions.cpu().numpy() + offsets
        tokens = torch.from_numpy(sample(torch.log(probs), rows)[0].astype(np.int32)).to(probs.device)
        return (tokens, None) if returns_mask else tokens

    sampler.Sampler._sample_from_probs = sample_rows


def _seed_requests() -> None:
    """Per request: its noise key, and the offset from a position in the sequence to one in the noise stream."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    make = SamplingBatchInfo.from_schedule_batch.__func__

    def seeded(cls: Any, batch: Any, *args: Any, **options: Any) -> Any:
        info = make(cls, batch, *args, **options)
        seeds = [request.sampling_params.custom_params["noise"] for request in batch.reqs]
        offsets = [place + 1 - len(r.origin_input_ids) for (_, place), r in zip(seeds, batch.reqs, strict=True)]
        table = [[key, offset] for (key, _), offset in zip(seeds, offsets, strict=True)]
        info.sampling_seed = torch.tensor(table, dtype=torch.int64, device=info.temperatures.device)
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(seeded)
