"""Section `placement`: processes and devices of each role."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from gcore.config.base import Auto, Count, PositiveInt, Section


class PolicyPlacement(Section):
    replicas: PositiveInt | Auto = "auto"
    """Engine processes; `auto`: one per `generation.tensor_parallel` GPUs, or one per CPU core (at most 4 per node)."""


class TrainerPlacement(Section):
    ranks: PositiveInt | Auto = "auto"
    """Trainer processes; `auto`: one per GPU, or one per CPU core (at most 4 per node)."""
    tensor_parallel: PositiveInt = 1
    """Ranks that split each matrix of the model (tensor parallelism); such a group trains on the same samples. Must
    divide `ranks`; a group of this size stays within a node."""
    pipeline_parallel: PositiveInt = 1
    """`training.backend: megatron`: stages that divide the layers of the model (pipeline parallelism); the ranks of a
    pipeline train on the same samples. `tensor_parallel` x this number must divide `ranks`. See docs/megatron.md."""
    virtual_pipeline: PositiveInt = 1
    """`training.backend: megatron`: parts of the layers that each stage holds (interleaved schedule): less waiting in
    the pipeline, more messages. Needs `pipeline_parallel` of at least 3."""
    expert_parallel: PositiveInt = 1
    """`training.backend: megatron`: data-parallel ranks that divide the experts of each layer. Must divide the number
    of data-parallel ranks and of experts."""
    shard: PositiveInt | Auto = "auto"
    """Data-parallel ranks that share one copy of weights and optimizer state; each group of this size has its own copy
    (HSDP). Must divide `ranks` / `tensor_parallel`. `auto`: all of them on GPUs, 1 on CPU."""
    threads: PositiveInt | Auto = "auto"
    """CPU threads per trainer and critic rank; `auto`: cores of a node divided by these ranks."""


class CriticPlacement(Section):
    ranks: Count = 0
    """Processes of the critic of `adv_estimator: gae`, beside the trainer's: policy and critic then train at the same
    time. They use FSDP2. 0: the critic is on the trainer ranks. On GPUs only with `mode: disaggregated`."""
    shard: PositiveInt | Auto = "auto"
    """Ranks that share one copy of weights and optimizer state. `auto`: all of them on GPUs, 1 on CPU."""

    @model_validator(mode="after")
    def _whole_copies(self) -> CriticPlacement:
        if self.shard != "auto" and self.ranks % self.shard:
            raise ValueError(f"shard={self.shard} must divide ranks={self.ranks}")
        return self


class Placement(Section):
    mode: Literal["shared", "static", "dynamic", "colocated", "disaggregated", "auto"] = "shared"
    """Which role uses which devices during rollouts. `shared`: every role has its own replicas, always awake, and GPU i
    has the i-th replica of each role. `disaggregated`: the same, but every replica and trainer rank has its own GPUs.
    The other modes divide `slots` among the policy and the judges; a slot has one role at a time. `static`: by
    `split`; `dynamic`: slots move between roles during the run, see docs/placement.md; `colocated`: all slots generate,
    then all judge. `auto`: the fastest mode on these GPUs by the planner's estimate; `shared` on CPU and without
    judges."""
    slots: PositiveInt | Auto = "auto"
    """Devices to divide; `auto`: the GPUs, or the CPU cores. A replica uses `tensor_parallel` slots. Every role has a
    replica for every position, which sleeps while another role has the slot; `replicas` does not apply."""
    split: dict[str, PositiveInt] = {}
    """Slots per role, by the names `policy` and the judges': `{policy: 3, judge: 1}`. `static` keeps this split,
    `dynamic` starts with it. Default: an even split."""
    weights: Literal["auto", "host", "broadcast"] = "auto"
    """How the trainer's weights reach engines in other processes. `host`: through shared memory of the machine;
    `broadcast`: from GPU to GPU by NCCL (by gloo on a CPU). `auto`: CUDA IPC handles on a shared GPU, `broadcast`
    with `disaggregated`, `host` on CPU."""
    policy: PolicyPlacement = PolicyPlacement()
    """The policy's engines."""
    trainer: TrainerPlacement = TrainerPlacement()
    """The trainer."""
    critic: CriticPlacement = CriticPlacement()
    """The critic, if it has ranks of its own."""
    object_store_mb: PositiveInt | Auto = "auto"
    """Shared memory for data sent between processes, in MB; `auto`: 256 plus twice the model."""
