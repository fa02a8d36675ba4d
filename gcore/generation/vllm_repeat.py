"""A decoding step of the same requests as the last one, launched without vLLM's preparation of a batch.

vLLM's second model runner prepares a step in 1 to 1.5 ms of Python: with few sequences longer than the GPU computes
it. If the requests are those of the last step, all that changes is on the GPU: positions, the last tokens, where keys
and values go. The kernels that update them are called here, then the CUDA graph of the model, then the sampler. Tokens
and logprobs of several steps are copied to the host together.

Written against the sources of vLLM 0.24 and 0.32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Copied(NamedTuple):
    """On their way to the host."""

    tokens_SR: torch.Tensor
    logprobs_SR: torch.Tensor
    ready: torch.cuda.Event


class RepeatedStep:
    def __init__(self, runner: Any, batch: Any, graph: Any) -> None:
        from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens, prepare_pos_seq_lens

        from gcore.generation.vllm_sampler import sample

        self._runner, self._batch, self._graph, self._sample = runner, batch, graph, sample
        self._set_positions, self._set_tokens = prepare_pos_seq_lens, combine_sampled_and_draft_tokens
        self._block_tables = runner.block_tables.get_dummy_block_tables(batch.num_reqs_after_padding)  # persistent
        self._one = torch.ones(batch.num_reqs, dtype=torch.int32, device=runner.device)
        self._none = torch.zeros_like(self._one)

    @classmethod
    def of(cls, runner: Any, batch: Any) -> RepeatedStep | None:
        """For the batch of the last step. None: there is no CUDA graph of the whole model for it, or it needs more than
        this file does."""
        graph = runner.cudagraph_manager.dispatch(batch.num_reqs, batch.num_tokens, 1, num_active_loras=0)
        more = runner.lora_config or runner.model_state.rope_state is not None or runner.use_dcp
        if graph.cg_mode.name != "FULL" or more or runner.sampler.truncates(batch):
            return None
        return cls(runner, batch, graph)

    @torch.inference_mode()
    def launch(self, steps: int) -> Copied | None:
        if not steps:
            return None
        tokens, logprobs = zip(*(self._step() for _ in range(steps)), strict=True)
        tokens_SR, logprobs_SR = (torch.stack(part).to("cpu", non_blocking=True) for part in (tokens, logprobs))
        ready = torch.cuda.Event()
        ready.record()
        return Copied(tokens_SR, logprobs_SR, ready)

    def _step(self) -> tuple[torch.Tensor, torch.Tensor]:
        runner, batch = self._runner, self._batch
        states, buffers, size = runner.req_states, runner.input_buffers, batch.num_reqs
        computed = states.num_computed_tokens.gpu
        self._set_positions(batch.idx_mapping, batch.query_start_loc, computed, buffers.positions, buffers.seq_lens)
        self._set_tokens(
            buffers.input_ids,
            batch.idx_mapping,
            states.last_sampled_tokens,
            batch.query_start_loc,
            batch.seq_lens,
            states.prefill_len.gpu,
            states.draft_tokens,
            batch.cu_num_logits,
            size,
        )
        slots = runner.block_tables.compute_slot_mappings(
            batch.idx_mapping, batch.query_start_loc, batch.positions, num_tokens_padded=batch.num_tokens_after_padding
        )
        batch.seq_lens_cpu_upper_bound.add_(1)
        runner.model_state.prepare_attn(
            batch, self._graph.cg_mode, self._block_tables, slots, runner.attn_groups, runner.kv_cache_config
        )
        hidden = runner.cudagraph_manager.run_fullgraph(self._graph)
        logits = runner.model.compute_logits(hidden[:size])
        sampling = runner.sampler.sampling_states
        tokens, logprobs = self._sample(
            logits, batch.idx_mapping, sampling.temperature.gpu, sampling.seeds.gpu, batch.positions[:size]
        )
        runner.postprocess_sampled(batch.idx_mapping, tokens.view(-1, 1), self._one, self._none, batch.query_start_loc)
        return tokens, logprobs
