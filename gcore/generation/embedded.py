"""The embedded engine: continuous batching over any transformers decoder, on CPU or GPU.

    jobs ──admit: prefill, shared by siblings──> rows of the KV cache ──step: one token per row──> ended jobs

This file owns the rows of the KV cache and the sampling. The network comes from transformers; the thread and the queue
are in engine_shell.py.

The active rows are always at the front of the cache, so a decoding step runs on a plain slice. The last row replaces a
finished row. Prefill covers every prompt token except the last; the last token is the input of the row's first decoding
step, so all logits come from one place.

On CPU a row's result is bitwise the same in any batch. Matrix products treat all rows alike if there are at least 8,
masked attention if the number of keys is a multiple of the block, and element-wise functions if no remainder of a
tensor falls out of the vector loop. So rows and keys are rounded up, and a replica uses one thread.
`tests/contract/test_engine.py` checks this. For mixtures of experts, eager attention (docs/engines.md) and all models
on GPUs, the last bits depend on the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from gcore.decoders import as_argument, traits_of
from gcore.generation.cache import RowCache
from gcore.generation.decoder import FusedDecoder
from gcore.generation.engine_shell import Ended, Step, SteppedEngine
from gcore.generation.jobs import Job
from gcore.generation.request_check import check_request
from gcore.generation.sampling import Rows, sample
from gcore.generation.sleep import GIB, SleepState
from gcore.models import Adapters
from gcore.observe.trace import Tracer
from gcore.types import Request
from gcore.weights.receiver import Base, WeightReceiver

ROW_BLOCK = 8
KEY_BLOCK = 32


def _round_up(value: int, block: int) -> int:
    return -(-value // block) * block


class EmbeddedEngine(SteppedEngine):
    """Implements protocols.Engine."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_concurrent: int,
        max_length: int,
        threads: int = 1,
        min_step_s: float = 0.0,
        adapters: Adapters | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        super().__init__(EmbeddedBackend(model, max_concurrent, max_length, threads, adapters), tracer, min_step_s)


class EmbeddedBackend:
    """Implements DecodeBackend. `fused=False`: decode with the forward pass of transformers, as for models outside
    the families of decoder.py."""

    compute_lock: AbstractContextManager[Any] = nullcontext()

    def __init__(
        self,
        model: PreTrainedModel,
        max_concurrent: int,
        max_length: int,
        threads: int = 1,
        adapters: Adapters | None = None,
        fused: bool = True,
    ) -> None:
        self._model, self._threads, self._device = model, threads, model.device
        self._traits = traits_of(model.config)
        self._max_rows, self._max_length = max_concurrent, max_length
        self._cache = RowCache(model.config.num_hidden_layers)
        self.jobs: list[Job] = []  # jobs[i] has row i of the cache
        self._lengths = np.zeros(_round_up(max_concurrent, ROW_BLOCK), np.int64)  # tokens already in the cache, by row
        self._last = np.zeros_like(self._lengths)  # the token to feed next, by row
        self._rows = Rows(len(self._lengths))
        self._fused = FusedDecoder(model, max_length) if fused and FusedDecoder.supports(model) else None
        self._parameters = dict(model.named_parameters())
        embedding: Any = model.get_input_embeddings()
        self._vocabulary = len(embedding.weight)
        self._receiver = self._make_receiver(adapters)

    def open(self) -> tuple[WeightReceiver, SleepState]:
        torch.set_num_threads(self._threads)
        return self._receiver, SleepState(("kv_cache",))  # the weights are not freed

    def close(self) -> None:
        self.jobs.clear()

    def _make_receiver(self, adapters: Adapters | None) -> WeightReceiver:
        """With adapters, only their factors arrive: keep a copy of the base matrices."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        if adapters is None:
            return WeightReceiver(shapes)
        names = [f"{layer}.weight" for layer in adapters.layers]
        matrices = {name: self._parameters[name].detach().to("cpu", copy=True) for name in names}
        return WeightReceiver(shapes, Base(adapters, matrices, self._device, self._model.dtype))

    # ---- weights and memory ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._parameters[name].copy_(tensor)

    def finish_load(self) -> Collection[Job]:
        return ()

    def free(self, level: int) -> float:
        freed = self._cache.nbytes
        self._cache = RowCache(self._model.config.num_hidden_layers)
        return freed / GIB

    def allocate(self, tags: Sequence[str]) -> float:
        return 0.0  # the cache grows again with the first request

    # ---- requests -------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        check_request(request, self._max_length, self._vocabulary)

    def room(self, waiting: int) -> int:
        return min(self._max_rows - len(self.jobs), waiting)

    @torch.inference_mode()
    def admit(self, jobs: Sequence[Job]) -> Sequence[Ended]:
        """Siblings with the same prompt share one prefill."""
        first = len(self.jobs)
        need = max(job.content.size + job.request.params.max_tokens for job in jobs)
        rows = min(_round_up(first + len(jobs), 64), len(self._lengths))
        self._cache.reserve(rows, _round_up(need, KEY_BLOCK))
        prompts: dict[bytes, list[int]] = {}
        for i, job in enumerate(jobs, start=first):
            tokens_T = job.content.tokens_T
            self._lengths[i], self._last[i] = len(tokens_T) - 1, tokens_T[-1]
            self._rows.put(i, job.request)
            if len(tokens_T) > 1:
                prompts.setdefault(tokens_T[:-1].tobytes(), []).append(i)
        self.jobs.extend(jobs)
        if prompts:
            self._prefill(list(prompts.values()))
        return ()

    def _prefill(self, groups: list[list[int]]) -> None:
        """Fill the cache for the prompts of these groups of rows, in batches of bounded size."""
        groups = sorted(groups, key=lambda rows: self._lengths[rows[0]])
        start = 0
        while start < len(groups):
            stop = start + 1
            while stop < len(groups) and (stop + 1 - start) * self._lengths[groups[stop][0]] <= 16384:
                stop += 1
            part, start = groups[start:stop], stop
            width = _round_up(int(max(self._lengths[rows[0]] for rows in part)), KEY_BLOCK)
            tokens = np.zeros((len(part), width), np.int64)
            for i, rows in enumerate(part):
                length = self._lengths[rows[0]]
                tokens[i, :length] = self.jobs[rows[0]].content.tokens_T[:-1]
            position = torch.arange(width, device=self._device)
            masks = self._traits.masks(position <= position[:, None], position[:, None], self._model.dtype)
            masks = {kind: mask.expand(len(part), 1, width, width) for kind, mask in masks.items()}
            cache = self._cache
            cache.begin_prefill(torch.tensor([rows[0] for rows in part], device=self._device), width)
            self._forward(torch.from_numpy(tokens), position[None].expand(len(part), -1), masks)
            for rows in part:
                if len(rows) > 1:
                    cache.copy_row(rows[0], rows[1:], int(self._lengths[rows[0]]))

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, masks: dict[str, torch.Tensor]) -> torch.Tensor:
        output = self._model(
            input_ids=tokens.to(self._device),
            position_ids=positions,
            attention_mask=as_argument(masks),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    @torch.inference_mode()
    def step(self) -> Step:
        n = len(self.jobs)
        padded = _round_up(n, ROW_BLOCK)
        self._lengths[n:padded] = 0
        read_length = _round_up(int(self._lengths[:n].max()) + 1, KEY_BLOCK)
        positions_B = torch.from_numpy(self._lengths[:padded].copy()).to(self._device)
        tokens_B = torch.from_numpy(self._last[:padded].copy()).to(self._device)
        at_B111 = positions_B[:, None, None, None]
        seen = torch.arange(read_length, device=self._device) <= at_B111
        masks = self._traits.masks(seen, at_B111, self._model.dtype)
        self._cache.begin_step(positions_B, read_length)
        if self._fused is not None:
            logits = self._fused.step(tokens_B, positions_B, [masks[kind] for kind in self._traits.kinds], self._cache)
        else:
            logits = self._forward(tokens_B[:, None], positions_B[:, None], masks)
        tokens, logprobs, candidates = sample(logits[:n], self._rows)
        self._lengths[:n] += 1
        self._last[:n] = tokens
        ended: list[Ended] = []
        for i, (job, token, logprob) in enumerate(zip(self.jobs, tokens.tolist(), logprobs.tolist(), strict=True)):
            job.tokens.append(token)
            job.logprobs.append(logprob)
            if i in candidates:
                job.candidates.append(candidates[i])
            if token in job.request.params.stop_tokens or len(job.tokens) == job.request.params.max_tokens:
                ended.append((job, job.finish))
        self.remove([job for job, _ in ended])
        return Step(n, ended)

    def flush_steps(self) -> Iterable[Step]:
        return ()

    @torch.inference_mode()
    def remove(self, jobs: Collection[Job]) -> None:
        """The last row replaces a removed row."""
        if not jobs:
            return
        removed = set(jobs)
        for i in reversed([i for i, job in enumerate(self.jobs) if job in removed]):
            last = len(self.jobs) - 1
            if i != last:
                self._cache.copy_row(last, [i], int(self._lengths[last]))
                self.jobs[i], self._lengths[i], self._last[i] = self.jobs[last], self._lengths[last], self._last[last]
                self._rows.move(last, i)
            self.jobs.pop()
