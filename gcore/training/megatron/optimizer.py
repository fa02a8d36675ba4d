"""Megatron's distributed optimizer: AdamW over flat ranges of the parameters, one range per data-parallel rank.

    gradients in buffers ──reduce-scatter──> this rank's ranges ──norm, clip, AdamW──> all-gather ──> parameters

The ranges become boxes of Hugging Face tensors (layout.py), so moments and float32 weights are saved by the names and
in the form that FSDP2 uses, and any layout reads them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from torch import Tensor

from gcore.checkpoint.tensors import Shard
from gcore.config.training import Training
from gcore.training.megatron.weights import Parameter
from gcore.training.optimizer import MOMENTS, is_finite


class Range(NamedTuple):
    """Elements `start` to `end` of a parameter, which this rank updates. `main`: their float32 values."""

    parameter: Parameter
    start: int
    end: int
    main: Tensor
    inner: Any  # the AdamW that has the moments
    group: dict[str, Any]  # of it


class DistributedAdamW:
    def __init__(self, chunks: Sequence[Any], parameters: Sequence[Parameter], training: Training, half: bool) -> None:
        """`chunks`: wrapped by Megatron's DDP. `half`: their weights are in bfloat16."""
        self._max_norm, self._decay = training.max_grad_norm, training.weight_decay
        options = OptimizerConfig(
            lr=training.lr,
            weight_decay=training.weight_decay,
            adam_beta1=training.betas[0],
            adam_beta2=training.betas[1],
            adam_eps=training.eps,
            bf16=half,
            params_dtype=torch.bfloat16 if half else torch.float32,
            use_distributed_optimizer=True,
            clip_grad=0.0,  # see `step`: a norm that is not finite must change nothing
        )
        overrides = {} if training.weight_decay_norms else get_standard_config_overrides(options)
        made = get_megatron_optimizer(options, list(chunks), overrides, use_gloo_process_groups=False)
        self._all: list[Any] = list(getattr(made, "chained_optimizers", [made]))
        self._chunks, self._ranges = chunks, list(self._find(parameters))
        self.num_moments = 0  # of a parameter; the same on all ranks, also on those without a range

    def _find(self, parameters: Sequence[Parameter]) -> Iterator[Range]:
        by_value = {id(parameter.value): parameter for parameter in parameters}
        for optimizer in self._all:
            pairs = [
                *zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
                *zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True),
            ]
            group_of = {id(p): group for group in optimizer.optimizer.param_groups for p in group["params"]}
            for values, mains in pairs:
                for value, main in zip(values, mains, strict=True):
                    place = optimizer._get_model_param_range_map(value)["param"]
                    inner, group = optimizer.optimizer, group_of[id(main)]
                    yield Range(by_value[id(value)], place.start, place.end, main, inner, group)

    def drop_gradients(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        for optimizer in self._all:
            optimizer.zero_grad()

    def step(self, lr: float) -> float:
        """Clip the gradients and update. Returns their norm; if it is not finite, nothing changes."""
        total = torch.zeros((), dtype=torch.float64, device=self._ranges[0].main.device if self._ranges else None)
        for optimizer in self._all:
            optimizer.prepare_grads()
            gradients = optimizer.get_main_grads_for_grad_norm()
            own = torch.zeros_like(total)
            if gradients:
                own = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
            dist.all_reduce(own, group=optimizer.get_grad_stats_parallel_group())
            total += own
        norm = total.sqrt().float()
        if bool(torch.isfinite(norm)):
            factor = (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
            for optimizer in self._all:
                if gradients := [p.grad for p in optimizer.get_parameters() if p.grad is not None]:
                    torch._foreach_mul_(gradients, factor)
                for group in optimizer.optimizer.param_groups:
                    group["lr"], group["weight_decay"] = lr, self._decay * group.get("wd_mult", 1.0)
                optimizer.step_with_ready_grads()
            self.num_moments = len(MOMENTS)
        self.drop_gradients()
        return float(norm)

    def is_finite(self) -> bool:
        return is_finite(each.main.detach() for each in self._ranges)

    def clear(self) -> None:
        self.num_moments = 0
        for optimizer in self._all:
            optimizer.optimizer.state.clear()

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def weights(self) -> list[Shard]:
        """This rank's ranges of all weights, in float32."""
        return [s for r in self._ranges if r.parameter.own for s in r.parameter.shards(r.main.detach(), r.start, r.end)]

    def moments(self) -> list[Shard]:
        """This rank's ranges of both moments, and the step counts."""
        found, steps = list[Shard](), dict[str, Shard]()
        for r in self._ranges:
            entry = r.inner.state.get(r.main)
            if not entry or not r.parameter.own:
                continue
            for moment in MOMENTS:
                found += r.parameter.shards(entry[moment], r.start, r.end, f"/{moment}")
            count = torch.as_tensor(entry.get("step", r.group.get("step", 0)), dtype=torch.float32)
            steps |= {block.name: Shard(f"{block.name}/step", (), (), count) for block in r.parameter.blocks}
        return [*found, *steps.values()]

    def restore(self, files: Any) -> None:
        """Read the moments of this rank's ranges. `files`: ShardFiles, or None: there are none."""
        self.clear()
        self.num_moments = len(MOMENTS) if files is not None else 0
        for r in self._ranges if files is not None else ():
            names = [block.name for block in r.parameter.blocks if f"{block.name}/step" in files.shapes]
            if not names:
                continue
            count = torch.zeros(())
            files.read(Shard(f"{names[0]}/step", (), (), count))
            entry = {moment: torch.zeros_like(r.main) for moment in MOMENTS}
            for moment, values in entry.items():
                for shard in r.parameter.shards(values, r.start, r.end, f"/{moment}"):
                    files.read(shard)
            r.inner.state[r.main] = {"step": count, **entry}
            if "step" in r.group:  # of fused kernels
                r.group["step"] = int(count)
