"""What the SGLang engine needs of SGLang itself: opening, closing, and what is changed in its scheduler's process.

    role's process: SglangEngine ── SGLang's front (a queue, no tokenizer) ──ipc──> child: SGLang's scheduler, the model

SGLang 0.5.15.post1 and 0.5.23 were read and run, on a CPU. Traps that this file knows of:
- Opened, it changes the process around it: logging, event loops, how processes start, the environment, SIGQUIT.
  Closed, it kills every child of the process, whoever's they are, and leaves sockets that keep the process from
  ending; a child that fails kills the process.
- Its CPU kernels are not on PyPI. Without them it half believes in a GPU: rotary embeddings look for vLLM's.
- It stops at the model's end of sequence, or ignores stop tokens altogether.
- It seeds requests only in its deterministic mode, which needs its GPU kernels, and top-p counts of the whole
  distribution, not of what top-k leaves: where a request asks for either, sampling is the embedded engine's.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gcore.generation.sampling import Rows, sample
from gcore.generation.sleep import GIB
from gcore.models import Adapters
from gcore.types import UserError

SPARE = 8  # SGLang keeps a few tokens of the context to itself


@dataclass(frozen=True, slots=True)
class SglangOptions:
    """What the configuration says about one replica: SglangOptions(256, 2048, device="cuda", sleep=True)."""

    max_concurrent: int
    max_length: int
    dtype: str = "auto"
    device: str = "cpu"
    memory_fraction: float = 0.4  # of the GPU
    cpu_cache_gib: float = 1.0
    threads: int = 1  # on CPU
    tensor_parallel: int = 1
    eager: bool = False  # no CUDA graphs
    sleep: bool = False  # memory can be given back between rollouts; on GPUs
    seeds: bool = True  # noise that belongs to the sample; on GPUs it costs speed
    seed: int = 0
    dies_with_scheduler: bool = False  # so does this process, that whoever watches it brings both back
    adapters: Adapters | None = None  # their factors are all the weights that come


class Server:
    """SGLang as it runs: its front in this process, and the processes that it started."""

    def __init__(self, front: Any, processes: list[Any], failure: Path) -> None:
        self.front, self.manager, self.vocabulary = front, front.tokenizer_manager, 0
        self.has_sessions = hasattr(self.manager, "begin_weight_update")  # for weights: newer versions want them
        self._processes, self._failure = processes, failure

    def died(self) -> str:
        """Why it is no longer alive, or nothing."""
        gone = [process for process in self._processes if not process.is_alive()]
        if not gone:
            return ""
        why = _last_line(self._failure) or f"exit code {gone[0].exitcode}"
        return f"SGLang's process {gone[0].pid} is gone ({why})"

    def close(self) -> None:
        atexit.unregister(self.front.shutdown)
        self.front.shutdown()
        for socket in (self.manager.send_to_scheduler, self.front.send_to_rpc):
            socket.context.destroy(linger=0)  # else it waits for good, at some later time, for somebody to read them
        self._failure.unlink(missing_ok=True)


def open_server(folder: Path, options: SglangOptions) -> Server:
    """In the thread, and with the event loop, that it is used in."""
    handle, name = tempfile.mkstemp(prefix="sglang-", suffix=".failure")
    os.close(handle)
    failure, processes = Path(name), list[Any]()
    config = json.loads((folder / "config.json").read_text())
    longest = config.get("max_position_embeddings", options.max_length)
    if options.max_length > longest:
        raise UserError(f"SGLang cannot serve {folder}: {options.max_length} tokens, the model has {longest} positions")
    with _process_as_it_was():
        front_class = _front(Child(name, options.device == "cpu", options.threads, options.seeds), processes)
        try:
            front = front_class(**_arguments(folder, options, config))
            front.tokenizer_manager._subprocess_watchdog.stop()  # it would kill this process
        except Exception as error:
            _end(processes)
            why = _last_line(failure) or " ".join(str(error).split())
            raise UserError(f"SGLang cannot serve {folder}: {why}") from error
    server = Server(front, processes, failure)
    server.vocabulary = config["vocab_size"]
    return server


def _front(child: Child, processes: list[Any]) -> Any:
    """SGLang's Engine, with our scheduler process and no detokenizer; it ends what it started and nobody else."""
    try:
        from sglang.srt.entrypoints.engine import Engine
    except (ImportError, RuntimeError, OSError) as error:
        said = f"generation.engine: sglang cannot be imported ({error}); see docs/engines.md, or use embedded"
        raise UserError(said) from error

    class Front(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(child)

        @classmethod
        def _launch_scheduler_processes(cls, *args: Any, **options: Any) -> Any:
            found = super()._launch_scheduler_processes(*args, **options)
            processes.extend(found[1])
            return found

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


def _arguments(folder: Path, options: SglangOptions, config: dict[str, Any]) -> dict[str, Any]:
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
        platform["attention_backend"] = "triton"  # else, on Hopper, it takes FlashAttention without a look
    return {
        "model_path": str(folder),
        "device": options.device,
        "dtype": options.dtype,
        "skip_tokenizer_init": True,
        "context_length": options.max_length + SPARE,
        "max_running_requests": options.max_concurrent,
        "sampling_backend": "pytorch",  # the others know no seeds
        "sampling_defaults": "openai",  # the folder's own do not count
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


def _cache_tokens(options: SglangOptions, config: dict[str, Any]) -> int:
    """As many as all requests can fill, or the memory holds."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    width = config.get("num_key_value_heads", config["num_attention_heads"]) * head
    size = 2 * config["num_hidden_layers"] * width * (4 if options.dtype == "float32" else 2)
    one = options.max_length + SPARE
    return max(2 * one, min(options.max_concurrent * one, int(options.cpu_cache_gib * GIB) // size))


@contextmanager
def _process_as_it_was() -> Iterator[None]:
    """What SGLang changes around it while it opens is put back. Its children get their own environment."""
    root = logging.getLogger()
    policy, start = asyncio.get_event_loop_policy(), multiprocessing.get_start_method(allow_none=True)
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
        asyncio.set_event_loop_policy(policy)
        multiprocessing.set_start_method(start, force=True)


def _last_line(file: Path) -> str:
    with suppress(OSError):
        return next((line.strip() for line in reversed(file.read_text().splitlines()) if line.strip()), "")
    return ""


# ---- in the scheduler's process


@dataclass(frozen=True)
class Child:
    """What runs in the scheduler's process, and what it has to know."""

    failure: str  # a file that is told why it died
    cpu: bool
    threads: int
    seeds: bool

    def __call__(self, *args: Any, **options: Any) -> None:
        import psutil
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.managers import scheduler

        to_parent: Any = psutil.Process
        to_parent.send_signal = lambda process, signal: os._exit(1)  # it would kill the role's process
        traceback = scheduler.get_exception_traceback

        def remembered() -> str:
            text = str(traceback())
            Path(self.failure).write_text(text)
            return text

        scheduler.get_exception_traceback = remembered
        ModelConfig._get_hf_eos_token_id = lambda config: None  # requests say where they stop
        if self.cpu:
            from sglang.srt.layers.rotary_embedding import base

            base._is_cpu = True
            torch._dynamo.config.disable = True
            torch.set_num_threads(self.threads)
        _flush_while_paused()
        _sample_as_embedded()
        if self.seeds:
            _seed_requests()
        scheduler.run_scheduler_process(*args, **options)


def _flush_while_paused() -> None:
    """Older versions die of new weights while requests wait, also of those that they took back themselves."""
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
    """Tokens by the noise of their sample, and top-p of what top-k leaves: the embedded engine's own sampling."""
    from sglang.srt.layers import sampler

    draw = sampler.Sampler._sample_from_probs
    masks = hasattr(sampler, "_SamplingMaskCapture")  # newer versions tell what was left to choose from, if asked

    def drawn(self: Any, probs: torch.Tensor, info: Any, positions: torch.Tensor, plain: bool) -> Any:
        if plain and info.sampling_seed is None:
            return draw(self, probs, info, positions, plain)
        n, rows = len(probs), Rows(len(probs))
        top_k = info.top_ks.cpu().numpy()
        rows.top_k[:], rows.top_p[:] = np.where(top_k < probs.shape[-1], top_k, 0), info.top_ps.cpu().numpy()
        if info.sampling_seed is None:
            rows.noise_key[:] = np.random.default_rng().integers(2**63, size=n)
        else:
            keys, before = info.sampling_seed.cpu().numpy().T
            rows.noise_key[:], rows.position[:] = keys.view(np.uint64), positions.cpu().numpy() + before
        tokens = torch.from_numpy(sample(torch.log(probs), rows)[0].astype(np.int32)).to(probs.device)
        return (tokens, None) if masks else tokens

    sampler.Sampler._sample_from_probs = drawn


def _seed_requests() -> None:
    """Each request's noise key, and what is added to a place in its sequence to get the place in its sample."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    make = SamplingBatchInfo.from_schedule_batch.__func__

    def seeded(cls: Any, batch: Any, *args: Any, **options: Any) -> Any:
        found = make(cls, batch, *args, **options)
        seeds = [request.sampling_params.custom_params["noise"] for request in batch.reqs]
        before = [place + 1 - len(r.origin_input_ids) for (_, place), r in zip(seeds, batch.reqs, strict=True)]
        table = [[key, place] for (key, _), place in zip(seeds, before, strict=True)]
        found.sampling_seed = torch.tensor(table, dtype=torch.int64, device=found.temperatures.device)
        return found

    SamplingBatchInfo.from_schedule_batch = classmethod(seeded)
