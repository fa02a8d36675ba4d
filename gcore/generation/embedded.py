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

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from gcore.content.families import FAMILIES
from gcore.content.tokens import compact_experts, tokens_of
from gcore.generation.cache import KEY_BLOCK, cache_argument, make_cache
from gcore.generation.decoding import FusedDecoder, RowTable, sample
from gcore.generation.engine_shell import DecodeBackend, Ended, Job, Step, SteppedEngine
from gcore.generation.media_prefill import MediaPrefill
from gcore.generation.request_check import check_request
from gcore.generation.sleep import GIB, SleepState
from gcore.generation.spec import EngineSpec
from gcore.generation.speculation import MAX_DRAFT, Blocks, Speculation, speculation_of
from gcore.models.decoders import decoder_of, expert_routers_of, feature_tokens, traits_of
from gcore.models.networks import Adapters, adapters_of, load_model
from gcore.models.towers import takes_media
from gcore.threads import use_threads
from gcore.types import Floats, Ints, Request
from gcore.weights.fp8 import round_parameters
from gcore.weights.receiver import WeightReceiver, receiver_in_process

ROW_BLOCK = 8
SCORED_TOKENS = 16384  # per batch of `score`
PREFILL_TOKENS = 16384  # per batch of prompts. A longer prompt is alone, and is prefilled in chunks
PREFILL_CHUNK = 1024  # tokens: the mask of a chunk has this number of rows


class Sampled(NamedTuple):
    """After each token of the blocks of a step."""

    tokens: list[int]
    logprobs: list[float]
    candidates: dict[int, Ints]  # by place, where they are kept
    experts: np.ndarray | None  # [tokens, routers, k]


def _round_up(value: int, block: int) -> int:
    return -(-value // block) * block


def make_engine(spec: EngineSpec) -> SteppedEngine:
    device, dtype = spec.placed()
    tokenizer = spec.load_tokenizer(spec.model)
    network = load_model(spec.model, tokenizer, spec.seed, dtype, device, max_length=spec.max_length)
    if spec.serving.precision == "fp8":
        round_parameters(network)
    adapters = adapters_of(network, spec.lora) if spec.lora else None
    speculation = speculation_of(spec.serving.speculation, network)
    backend = EmbeddedBackend(network, spec.serving.max_concurrent, spec.max_length, adapters, speculation=speculation)
    return SteppedEngine(backend, spec.open_tracer(), spec.serving.min_step_s)


class EmbeddedBackend(DecodeBackend):
    """`fused=False`: decode with the forward pass of transformers, as for models outside the families of
    decoding.py."""

    def __init__(
        self,
        model: PreTrainedModel,
        max_concurrent: int,
        max_length: int,
        adapters: Adapters | None = None,
        fused: bool = True,
        speculation: Speculation | None = None,
    ) -> None:
        self._model, self._device = model, model.device
        self._traits = traits_of(model.config)
        self.max_concurrent, self._max_length = max_concurrent, max_length
        self._speculation = speculation
        self._ahead = 0 if speculation is None else MAX_DRAFT + ROW_BLOCK
        self._cache, self._decoder = make_cache(model, self._ahead), decoder_of(model)
        self._cache_argument = cache_argument(self._decoder)
        self.jobs: list[Job] = []  # jobs[i] has row i of the cache
        self._rows = RowTable(_round_up(max_concurrent, ROW_BLOCK))
        self._fused = FusedDecoder(model, max_length) if fused and FusedDecoder.supports(model) else None
        self._parameters = dict(model.named_parameters())
        self._routers = expert_routers_of(model)
        embedding: Any = model.get_input_embeddings()
        self._vocabulary = len(embedding.weight)
        self._media: MediaPrefill | None = None
        if takes_media(model):
            self._media = MediaPrefill(model, self._traits)
            self._vocabulary = max(self._vocabulary - 1, *feature_tokens(model.config)) + 1  # prompts may have it
        self._receiver = receiver_in_process(self._parameters, adapters)

    def open(self) -> tuple[WeightReceiver, SleepState]:
        use_threads(1)
        return self._receiver, SleepState(("kv_cache",))  # the weights are not freed

    def close(self) -> None:
        self.jobs.clear()

    # ---- weights and memory ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, torch.Tensor], version: int, last: bool) -> None:
        for name, tensor in tensors.items():
            self._parameters[name].copy_(tensor)

    def finish_load(self) -> Collection[Job]:
        if self._media is not None:
            self._media.forget()
        return ()

    def free(self, level: int) -> float:
        """The cache grows again with the first request."""
        freed = self._cache.nbytes
        self._cache = make_cache(self._model, self._ahead)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # for other processes
        return freed / GIB

    # ---- requests -------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        row = FAMILIES.get(self._model.config.model_type)
        check_request(request, self._max_length, self._vocabulary, row.kinds if row else ())

    @torch.inference_mode()
    def admit(self, jobs: Sequence[Job]) -> Sequence[Ended]:
        """Siblings with the same prompt share one prefill."""
        first = len(self.jobs)
        need = max(job.content.size + job.request.params.max_tokens for job in jobs) + self._ahead
        rows = min(_round_up(first + len(jobs), 64), len(self._rows.length))
        self._cache.reserve(rows, _round_up(need, KEY_BLOCK))
        prompts: dict[bytes, list[int]] = {}
        for i, job in enumerate(jobs, start=first):
            tokens_T = job.content.tokens_T
            self._rows.length[i], self._rows.last[i] = len(tokens_T) - 1, tokens_T[-1]
            self._rows.offset[i] = self._media.offset(job.content) if self._media and job.content.media else 0
            self._rows.put(i, job.request)
            if len(tokens_T) > 1:
                prompts.setdefault(job.content.prefix_key(), []).append(i)
            elif self._traits.recurrent:
                self._clear_states(i)
        self.jobs.extend(jobs)
        if self._speculation is not None:
            self._speculation.begin(jobs)
        if prompts:
            self._prefill(list(prompts.values()))
        return ()

    def _prefill(self, groups: list[list[int]]) -> None:
        """Fill the cache for the prompts of these groups of rows, in batches of bounded size.

        A long prompt is alone, and computed in chunks: in memory that grows with its length and not with the square of
        it. The length of a prompt alone decides that, so the result is the same in any batch."""
        groups = sorted(groups, key=lambda rows: self._rows.length[rows[0]])
        start = 0
        while start < len(groups):
            stop = start + 1
            while stop < len(groups) and (stop + 1 - start) * self._rows.length[groups[stop][0]] <= PREFILL_TOKENS:
                if self._traits.recurrent and not self._together(groups[start], groups[stop]):
                    break
                stop += 1
            part, start = groups[start:stop], stop
            width = int(max(self._rows.length[rows[0]] for rows in part))
            if not self._traits.recurrent:
                width = _round_up(width, KEY_BLOCK)
            contents = [self.jobs[rows[0]].content for rows in part]
            tokens_BW = self._padded([content.tokens_T[:-1] for content in contents], len(part), width)
            inputs, feature_positions, blocks = dict[str, Any](), None, None
            media = self._media if any(content.media for content in contents) else None
            if media is not None:
                inputs, feature_positions, blocks = media.inputs(tokens_BW, contents)
            chunk = PREFILL_CHUNK if width > PREFILL_TOKENS and media is None else width
            firsts = torch.tensor([rows[0] for rows in part], device=self._device)
            lengths = torch.from_numpy(self._rows.length[[rows[0] for rows in part]]).to(self._device)
            # not one token alone: layers with a state would take it for a decoding step
            bounds = [at for at in range(0, width, chunk) if width - at > 1 or not at]
            for first, last in itertools.pairwise([*bounds, width]):
                position = torch.arange(first, last, device=self._device)
                positions = position[None].expand(len(part), -1) if feature_positions is None else feature_positions
                seen = torch.arange(last, device=self._device) <= position[:, None]
                masks = self._traits.masks(seen, position[:, None], self._model.dtype, blocks)
                masks = {kind: mask.expand(len(part), 1, last - first, last) for kind, mask in masks.items()}
                self._cache.begin_prefill(firsts, last, first, lengths)
                masks = self._cache.visible(masks)
                if media is None:
                    inputs = {"input_ids": tokens_BW[:, first:last]}
                passed = partial(self._hidden, inputs, positions, masks)
                _, experts = self._watched(passed, [row for rows in part for row in rows])
                if experts is not None:
                    self._keep_prefill(part, experts.reshape(len(part), last - first, *experts.shape[1:]), first)
            for rows in part:
                if len(rows) > 1:
                    self._cache.copy_row(rows[0], rows[1:], int(self._rows.length[rows[0]]))

    def _clear_states(self, row: int) -> None:
        """Of a sequence that begins with a decoding step. A pass over any token makes the states if there are none, so
        that all decoding steps are computed in the same way."""
        if not self._cache.has_states:
            token = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
            self._cache.begin_prefill(torch.tensor([row], device=self._device), 1)
            self._hidden({"input_ids": token}, token, self._traits.masks(token[None] == 0, token, self._model.dtype))
        self._cache.clear_states(row)

    def _together(self, one: list[int], other: list[int]) -> bool:
        """Whether a model with recurrent layers prefills these two prompts in one batch. Padding would change the state
        after a prompt. On a CPU each prompt is alone, so that its bits do not depend on the others."""
        return self._device.type != "cpu" and self._rows.length[one[0]] == self._rows.length[other[0]]

    def _watched(
        self, compute: Callable[[], torch.Tensor], rows: Iterable[int]
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """The result, and the experts of each token if one of the rows keeps them."""
        if self._routers is None or not any(self.jobs[row].request.params.keep_experts for row in rows):
            return compute(), None
        result, experts = self._routers.watch(compute)
        return result, compact_experts(experts.cpu().numpy(), self._routers.num_experts)

    def _keep_prefill(self, groups: Sequence[Sequence[int]], experts: np.ndarray, start: int) -> None:
        """Those of tokens that the request has none of: in a later turn, earlier tokens keep what they were sampled
        with. `start`: the position of the first token."""
        for group, rows in enumerate(groups):
            for job in (self.jobs[row] for row in rows):
                if job.request.params.keep_experts:
                    known = 0 if job.content.experts is None else len(job.content.experts)
                    length = int(self._rows.length[rows[0]])
                    job.experts.append(experts[group, max(known - start, 0) : max(length - start, 0)])

    def _padded(self, rows: Sequence[np.ndarray], num_rows: int, width: int) -> torch.Tensor:
        tokens = np.zeros((num_rows, width), np.int64)
        for row, tokens_T in enumerate(rows):
            tokens[row, : len(tokens_T)] = tokens_T
        return torch.from_numpy(tokens).to(self._device)

    def _hidden(
        self, inputs: dict[str, Any], positions: torch.Tensor, masks: dict[str, torch.Tensor], cached: bool = True
    ) -> torch.Tensor:
        """The output of the decoder. Not of the whole model, whose joint modules would search for media."""
        state = {self._cache_argument: self._cache if cached else None, "use_cache": cached}
        output = self._decoder(
            **inputs, position_ids=positions, attention_mask=self._traits.as_argument(masks), **state
        )
        return output.last_hidden_state

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head: Any = self._model.get_output_embeddings()
        return self._traits.scaled(head(hidden).float())

    @torch.inference_mode()
    def step(self) -> Step:
        speculation, drafts = self._speculation, [list[int]() for _ in self.jobs]
        if speculation is not None:
            drafts = speculation.drafts(self.jobs, ROW_BLOCK, self._fused is None)
        started = speculation.now() if speculation is not None else 0.0
        proposes = any(drafts)
        aligned = proposes and self._fused is None  # transformers computes blocks of equal width
        blocks = (Blocks.aligned if aligned else Blocks.listed)(drafts, ROW_BLOCK)
        logits, experts = self._forward(blocks)
        rows_N, ahead_N = blocks.rows_RW.flat[blocks.places_N], blocks.ahead_RW.flat[blocks.places_N]
        tokens, logprobs, candidates = sample(logits, self._rows.ahead(rows_N, ahead_N) if proposes else self._rows)
        sampled = Sampled(tokens.tolist(), logprobs.tolist(), candidates, experts)
        taken, ended = self._take(drafts, sampled)
        if speculation is not None:
            speculation.record(self.jobs, drafts, taken, blocks.rows_RW.size, speculation.now() - started)
            self.speculated = speculation.proposed, speculation.accepted
        self.remove([job for job, _ in ended])
        return Step(sum(taken), ended)

    def _forward(self, blocks: Blocks) -> tuple[torch.Tensor, np.ndarray | None]:
        """Logits after each token of the blocks; the experts of these tokens, if they are kept."""
        n, width, table = len(self.jobs), blocks.rows_RW.shape[1], self._rows
        table.length[n : _round_up(n, ROW_BLOCK)] = table.offset[n : _round_up(n, ROW_BLOCK)] = 0
        tokens_RW, length_RW = table.last[blocks.rows_RW], table.length[blocks.rows_RW]
        at_RW = length_RW + blocks.ahead_RW
        tokens_RW.flat[blocks.places_N[n:]] = blocks.proposed
        read_length = _round_up(int(at_RW.max()) + 1, KEY_BLOCK)
        tokens, at = torch.from_numpy(tokens_RW).to(self._device), torch.from_numpy(at_RW).to(self._device)
        last, positions = at, at
        if blocks.proposed:
            last = torch.from_numpy(length_RW + blocks.sizes_RW).to(self._device)
            positions = at.minimum(last)  # what only fills the table may be behind the last position of the model
        if self._media is not None:
            positions = positions + torch.from_numpy(table.offset[blocks.rows_RW]).to(self._device)
        seen = torch.arange(read_length, device=self._device) <= at[:, None, :, None]
        masks = self._traits.masks(seen, at[:, None, :, None], self._model.dtype)
        if not blocks.proposed:
            self._cache.begin_step(at[:, 0], read_length, positions[:, 0])
        elif self._fused is None:
            self._cache.begin_blocks(at, last[:, 0], read_length)
        else:
            rows = torch.from_numpy(blocks.rows_RW[:, 0]).to(self._device)
            self._cache.begin_list(at[:, 0], rows, last[:, 0], n, read_length)
        masks = self._cache.visible(masks)
        places = torch.from_numpy(blocks.places_N).to(self._device)
        if self._fused is not None:
            masks_by_layer = [masks[kind] for kind in self._traits.kinds]
            logits = self._fused.step(tokens[:, 0], positions[:, 0], masks_by_layer, self._cache)
            return self._traits.allowed(logits)[: len(places)], None
        passed = partial(self._hidden, {"input_ids": tokens}, positions, masks)
        hidden, experts = self._watched(passed, range(n))
        hidden = hidden.flatten(0, 1)
        logits = self._logits(hidden if width == 1 else hidden[places])[: len(places)]
        return logits, None if experts is None else experts[blocks.places_N]

    def _take(self, drafts: Sequence[Sequence[int]], sampled: Sampled) -> tuple[list[int], list[Ended]]:
        """Add the sampled tokens of each row to its job, up to the first that differs from what was proposed. Returns
        how many they are, and the jobs that end with them."""
        taken, lasts, ended, first = list[int](), list[int](), list[Ended](), len(self.jobs)
        for row, (job, draft) in enumerate(zip(self.jobs, drafts, strict=True)):
            place, number = row, 0
            while True:
                token = sampled.tokens[place]
                job.tokens.append(token)
                job.logprobs.append(sampled.logprobs[place])
                if place in sampled.candidates:
                    job.candidates.append(sampled.candidates[place])
                if sampled.experts is not None and job.request.params.keep_experts:
                    job.experts.append(sampled.experts[place : place + 1])
                if (finish := job.finish) is not None:
                    ended.append((job, finish))
                    break
                if number == len(draft) or token != draft[number]:
                    break
                place, number = first + number, number + 1
            first += len(draft)
            taken.append(number + 1)
            lasts.append(token)
        self._rows.advance(taken, lasts)
        return taken, ended

    @torch.inference_mode()
    def score(self, requests: Sequence[Request]) -> list[Floats]:
        """Batches have one width, which depends only on the length of a request: see rewarding/scalar.py."""
        by_width: dict[int, list[int]] = {}
        for i, request in enumerate(requests):
            by_width.setdefault(_round_up(request.content.size, KEY_BLOCK), []).append(i)
        scores: dict[int, Floats] = {}
        for width, numbers in sorted(by_width.items()):
            rows = max(1, SCORED_TOKENS // width)
            for first in range(0, len(numbers), rows):
                part = numbers[first : first + rows]
                scores |= zip(part, self._score([requests[i] for i in part], width), strict=True)
        return [scores[i] for i in range(len(requests))]

    def _score(self, requests: Sequence[Request], width: int) -> list[Floats]:
        contents = [tokens_of(request.content) for request in requests]
        num_rows = _round_up(len(contents), ROW_BLOCK)
        tokens_BW = self._padded([content.tokens_T for content in contents], num_rows, width)
        position = torch.arange(width, device=self._device)
        masks = self._traits.masks(position <= position[:, None], position[:, None], self._model.dtype)
        masks = {kind: mask.expand(num_rows, 1, width, width) for kind, mask in masks.items()}
        positions = position[None].expand(num_rows, -1)
        hidden = self._hidden({"input_ids": tokens_BW}, positions, masks, cached=False)
        scores = []
        for row, (request, content) in enumerate(zip(requests, contents, strict=True)):
            steps = torch.from_numpy(content.tokens_S.astype(np.int64)).to(self._device)
            before = hidden[row, len(content.tokens_P) - 1 : content.size - 1]  # they predict the steps
            padded = torch.nn.functional.pad(before, (0, 0, 0, _round_up(len(steps), ROW_BLOCK) - len(steps)))
            logits = self._logits(padded)[: len(steps)] / (request.params.temperature or 1.0)
            scores.append(torch.log_softmax(logits, -1).gather(-1, steps[:, None])[:, 0].cpu().numpy())
        return scores

    @torch.inference_mode()
    def remove(self, jobs: Collection[Job]) -> None:
        """The last row replaces a removed row."""
        if not jobs:
            return
        removed = set(jobs)
        if self._speculation is not None:
            self._speculation.end(jobs)
        for i in reversed([i for i, job in enumerate(self.jobs) if job in removed]):
            last = len(self.jobs) - 1
            if i != last:
                self._cache.copy_row(last, [i], int(self._rows.length[last]))
                self.jobs[i] = self.jobs[last]
                self._rows.move(last, i)
            self.jobs.pop()
