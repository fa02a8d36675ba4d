"""The FSDP2 trainer: one object per rank.

    push (samples by key, from every controller) ──> prepare (old and reference logprobs) ──> update ──> weight_bucket
                                                        └──KL of each sample, for the reward──> controllers

All arithmetic runs in one separate thread, so that the rank can answer calls while it computes. Loss denominators
come with the batch and are global. FSDP averages gradients over ranks, so the loss is multiplied by the number of
ranks: the gradient is that of one process that holds the whole batch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from gcore.config.tree import Config
from gcore.observe.trace import Tracer
from gcore.protocols import Receivers, TrainerInfo, UpdateStats, WeightPlan, Weights
from gcore.training import bad_batches, loading, lora, losses, objective, state, varlen
from gcore.training.logprob_model import LogprobModel
from gcore.training.micro import Packed, to_tensors
from gcore.training.schedule import decay_groups, learning_rate
from gcore.types import Key, KlSums, MicroBatch, MiniBatch, Sample, TrainBatch
from gcore.weights.publisher import WeightPublisher

T = TypeVar("T")
LAYERS_PER_GROUP = 4  # that are cast together where no weights are sharded: fewer hooks on the host


class FsdpTrainer:
    """Implements protocols.Trainer. The caller has set up the process group (see controller/build.py)."""

    def __init__(
        self,
        config: Config,
        make_network: Callable[[], Any],
        device: torch.device,
        dtype: torch.dtype,
        threads: int,
        shard: int,
        tracer: Tracer,
        publisher: WeightPublisher | None = None,
        fill: Callable[[Any], None] | None = None,
    ) -> None:
        """`fill`: gives the sharded network its weights if `make_network` makes it without (training/loading.py)."""
        self._config, self._device, self._tracer = config, device, tracer
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._make_network, self._fill, self._dtype = make_network, fill, dtype
        compiles = config.training.compile
        self._compiles = device.type == "cuda" if compiles == "auto" else compiles
        self._publisher = publisher or WeightPublisher(self._rank)
        self._copies, self._sharded = self._world // shard, shard
        self._samples: dict[Key, Sample] = {}
        self._old: dict[Key, Tensor] = {}
        self._ref: dict[Key, Tensor] = {}
        self._kl_to_go: dict[Key, np.ndarray] = {}  # per step, if the KL is part of the reward
        self._reference: LogprobModel | None = None
        self._reference_adapters: dict[str, Tensor] | None = None  # the reference policy, with model.lora
        self.updates = 0  # optimizer steps since `begin`, without skipped ones; determines the warm-up
        self._bad_in_a_row = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._pool.submit(self._set_up, threads).result()

    def _set_up(self, threads: int) -> None:
        torch.set_num_threads(threads)
        shape = (self._copies, self._sharded)
        self._mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=("copies", "shards"))
        network, chosen = self._make_network(), self._config.model.lora
        self._adapters = lora.adapt(network, chosen, self._config.run.seed, self._dtype) if chosen else None
        self._policy = self._shard(network)
        if self._fill is not None:
            self._fill(network)
        self._optimizer = self._new_optimizer()

    def _shard(self, network: Any) -> LogprobModel:
        policy = LogprobModel(network, self._compiles).train()
        self._varlen = varlen.usable(network, self._device, self._dtype)
        if self._varlen:
            varlen.install(network)
        if self._config.training.activation_checkpointing:
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        mixed = MixedPrecisionPolicy()
        if self._dtype != torch.float32:
            mixed = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)
        mesh = self._mesh if self._copies > 1 else self._mesh["shards"]
        layers = network.get_decoder().layers
        if self._compiles:
            if self._config.training.compile == "auto":  # a layer that does not compile runs eagerly, with a warning
                torch._dynamo.config.suppress_errors = True
            for layer in layers:
                layer.compile()
        if self._sharded > 1 or self._device.type == "cuda":  # else nothing is gathered, and one reduction is enough
            size = 1 if self._sharded > 1 else LAYERS_PER_GROUP
            for first in range(0, len(layers), size):
                group = list(layers[first : first + size])
                fully_shard(group, mesh=mesh, mp_policy=mixed, reshard_after_forward=self._sharded > 1)
        outer = dataclasses.replace(mixed, cast_forward_inputs=False)  # temperatures stay exact
        fully_shard(policy, mesh=mesh, mp_policy=outer)
        return policy

    def _new_optimizer(self) -> torch.optim.AdamW:
        training = self._config.training
        parameters = lora.trainable_parameters(self._policy.network).values()
        groups = decay_groups(parameters, training.weight_decay, training.weight_decay_norms)
        fused = self._device.type == "cuda"
        return torch.optim.AdamW(groups, lr=training.lr, betas=training.betas, eps=training.eps, fused=fused)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    # ---- protocol -------------------------------------------------------------------------------------------------

    async def info(self) -> TrainerInfo:
        network = self._policy.network
        num_parameters = sum(p.numel() for p in lora.trainable_parameters(network).values())
        return TrainerInfo(num_parameters, network.config.hidden_size)

    async def push(self, source: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            assert sample.key not in self._samples, f"sample {sample.key} pushed twice (now by controller {source})"
            self._samples[sample.key] = sample

    async def begin(self) -> None:
        """Reinforcement learning starts: the current policy is the KL reference, and the optimizer is reset."""
        await self._in_thread(self._begin)

    async def prepare(self, batch: TrainBatch) -> Mapping[Key, KlSums]:
        return await self._in_thread(self._prepare, batch)

    async def update(self, batch: TrainBatch) -> UpdateStats:
        return await self._in_thread(self._update, batch)

    async def weight_plan(self) -> WeightPlan:
        return await self._in_thread(lambda: self._publisher.plan(lora.trainable_parameters(self._policy.network)))

    async def weight_bucket(self, index: int, receivers: Receivers) -> Weights:
        return await self._in_thread(
            lambda: self._publisher.bucket(lora.trainable_parameters(self._policy.network), index, receivers)
        )

    async def save(self, folder: str) -> None:
        await self._in_thread(self._save, Path(folder))

    async def load(self, folder: str, begun: bool = True) -> None:
        await self._in_thread(self._load, Path(folder), begun)

    # ---- the compute thread ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._optimizer = self._new_optimizer()
        self.updates = self._bad_in_a_row = 0
        if self._config.algorithm.kl_coef > 0 and self._adapters is not None:
            self._reference_adapters = lora.copy_adapters(self._policy)
        elif self._config.algorithm.kl_coef > 0:
            self._make_reference()

    def _make_reference(self) -> LogprobModel:
        """A copy of the policy that is sharded like it; each rank copies its shards."""
        self._reference = self._shard(self._make_network())
        loading.fill_from(self._reference, self._policy, self._device)
        self._reference.requires_grad_(False).eval()
        return self._reference

    def _forward(self, policy: LogprobModel, packed: Packed) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = policy(*packed.inputs)
        return result

    @torch.no_grad()
    def _prepare(self, batch: TrainBatch) -> dict[Key, KlSums]:
        """Old logprobs are needed if a step has several mini-batches, because the policy changes between them, and for
        the KL in the reward."""
        algorithm = self._config.algorithm
        wanted: list[tuple[AbstractContextManager[Any], dict[Key, Tensor]]] = []
        if batch.objective == "policy" and (len(batch.mini_batches) > 1 or algorithm.kl_in_reward):
            wanted.append((nullcontext(self._policy), self._old))
        if self._reference_adapters is not None and batch.objective == "policy":
            wanted.append((lora.with_adapters(self._policy, self._reference_adapters), self._ref))
        elif self._reference is not None and batch.objective == "policy":
            wanted.append((nullcontext(self._reference), self._ref))
        micros = [micro for mini in batch.mini_batches for micro in mini.micro_batches]
        if wanted:
            with self._tracer.span("logprobs", step=batch.step):
                for context, store in wanted:
                    with context as policy:
                        self._logprobs(policy, micros, store)
        return self._kl_of(batch) if algorithm.kl_in_reward else {}

    def _logprobs(self, policy: LogprobModel, micros: Sequence[MicroBatch], store: dict[Key, Tensor]) -> None:
        for micro in micros:
            packed = to_tensors(micro, self._samples, self._device, self._varlen)
            logprobs_S, _ = self._forward(policy, packed)
            for i, key in enumerate(packed.keys):
                store[key] = logprobs_S[packed.sample_S == i]
        for module in policy.modules():  # FSDP reshards by itself only in a backward pass
            if isinstance(module, FSDPModule):
                module.reshard()

    def _kl_of(self, batch: TrainBatch) -> dict[Key, KlSums]:
        found: dict[Key, KlSums] = {}
        for key in batch.keys:
            kl_S = losses.kl_penalty(self._old[key], self._ref[key], self._config.algorithm.kl_estimator)
            self._kl_to_go[key], found[key] = objective.kl_to_go(kl_S.cpu().numpy(), self._samples[key].mask_S)
        return found

    def _update(self, batch: TrainBatch) -> UpdateStats:
        self._publisher.release()
        for key, advantage in (batch.advantages or {}).items():
            advantages_S = advantage - batch.kl_scale * self._kl_to_go[key]
            self._samples[key] = dataclasses.replace(self._samples[key], advantages_S=advantages_S.astype(np.float32))
        totals = UpdateStats()
        with self._tracer.span("update", step=batch.step):
            for number in range(len(batch.mini_batches)):
                totals += self._mini_batch(batch, number)
        self._tracer.flush()
        for store in (self._samples, self._old, self._ref, self._kl_to_go):
            store.clear()
        return totals

    def _mini_batch(self, batch: TrainBatch, number: int) -> UpdateStats:
        mini, sums = batch.mini_batches[number], dict[str, Any]()
        for count, micro in enumerate(mini.micro_batches, start=1):
            packed = to_tensors(micro, self._samples, self._device, self._varlen)
            cast(FSDPModule, self._policy).set_requires_gradient_sync(count == len(mini.micro_batches))
            logprobs_S, entropy_S = self._forward(self._policy, packed)
            loss, parts = self._loss(batch, mini, packed, logprobs_S, entropy_S)
            (loss * self._world).backward()
            for name, value in parts.items():
                sums[name] = sums.get(name, 0.0) + value.detach().double()
        return self._optimizer_step(batch, number, sums)

    def _loss(
        self, batch: TrainBatch, mini: MiniBatch, packed: Packed, logprobs_S: Tensor, entropy_S: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if batch.objective == "imitation":
            return objective.imitation(packed, mini, logprobs_S)
        return objective.policy(
            self._config.algorithm,
            packed,
            mini,
            logprobs_S,
            entropy_S,
            self._logprobs_from(self._old, packed),
            self._logprobs_from(self._ref, packed),
            self._config.generation.max_response_length,
        )

    def _logprobs_from(self, store: dict[Key, Tensor], packed: Packed) -> Tensor | None:
        if not store:
            return None
        if packed.is_padding:
            return torch.zeros(1, device=self._device)
        return torch.cat([store[key] for key in packed.keys])

    def _optimizer_step(self, batch: TrainBatch, number: int, sums: Mapping[str, Tensor]) -> UpdateStats:
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self._config.training.max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        lr = self._learning_rate(batch, number)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if self._device.type == "cuda":  # launched before the host knows the norm: the kernel skips infinite gradients
            cast(Any, self._optimizer).found_inf = (~torch.isfinite(norm)).float()
            self._optimizer.step()
        grad_norm = float(norm)
        finite = math.isfinite(grad_norm)
        if finite and self._device.type != "cuda":
            self._optimizer.step()
        self.updates += finite
        self._optimizer.zero_grad(set_to_none=True)
        if not finite:
            self._dump(batch, number)
        self._bad_in_a_row = 0 if finite else self._bad_in_a_row + 1
        if self._bad_in_a_row >= self._config.training.max_bad_updates:
            raise FloatingPointError(
                f"{self._bad_in_a_row} updates in a row had NaN or infinite gradients (step {batch.step}; the samples "
                f"are in {self._config.run.folder / bad_batches.FOLDER}); lower training.lr, or raise "
                "training.max_bad_updates to skip more"
            )
        logged = {name: float(value) for name, value in sums.items()}
        return UpdateStats(1, int(not finite), grad_norm if finite else 0.0, lr, logged)

    @torch.no_grad()
    def _dump(self, batch: TrainBatch, number: int) -> None:
        """Write the samples of this rank to a file. All ranks call this, because the forward pass is collective."""
        mini, now = batch.mini_batches[number], dict[Key, Tensor]()
        self._logprobs(self._policy, mini.micro_batches, now)
        if not bad_batches.may_dump(self._config.run.folder, self._rank):
            return
        samples = [self._samples[key] for micro in mini.micro_batches for row in micro.rows for key in row]
        columns = {"logprobs": now, "old_logprobs": self._old, "reference_logprobs": self._ref}
        bad_batches.dump(self._config.run.folder, (batch.step, number + 1, self._rank), samples, columns)

    def _learning_rate(self, batch: TrainBatch, number: int) -> float:
        """For mini-batch `number` of a step. Progress counts steps: a step may have fewer mini-batches, or none."""
        training, planned = self._config.training, self._config.algorithm.mini_batches
        if batch.objective == "imitation":
            assert training.warm_start is not None
            steps = training.warm_start.steps
            return learning_rate(
                self.updates,
                peak=training.warm_start.lr,
                total=steps,
                warmup=max(1, steps // 10),
                schedule="linear",
                position=batch.step - 1,
            )
        return learning_rate(
            self.updates,
            peak=training.lr,
            total=self._config.run.steps * planned,
            warmup=training.warmup_steps,
            schedule=training.schedule,
            min_ratio=training.min_lr_ratio,
            position=(batch.step - 1) * planned + number * planned / len(batch.mini_batches),
        )

    def _save(self, folder: Path) -> None:
        with self._tracer.span("save"):
            reference = self._reference_adapters
            if self._reference is not None:
                reference = lora.trainable_parameters(self._reference.network)
            network, optimizer = self._policy.network, self._optimizer
            state.save(folder, network, optimizer, self.updates, self._adapters, reference)

    def _load(self, folder: Path, begun: bool) -> None:
        self._bad_in_a_row = 0
        self.updates = state.load(folder, self._policy.network, self._optimizer, self._adapters)
        if self._config.algorithm.kl_coef > 0 and begun:  # a warm start has no reference until `begin`
            if self._adapters is not None:
                reference = self._reference_adapters = lora.copy_adapters(self._policy)
            else:
                reference = lora.trainable_parameters(self._make_reference().network)
            state.load_reference(folder, reference)
