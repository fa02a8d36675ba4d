"""Builds the ranks of the trainer and of the critic. The runtime calls these functions in the process of a rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gcore.config.tree import Config
from gcore.launch.build import arm_faults, quiet, trace_folder
from gcore.launch.gpu_memory import plan_critic_memory, plan_memory
from gcore.launch.plan import Plan
from gcore.launch.user_code import load_policy_loss
from gcore.modalities.table import kind_of
from gcore.observe.trace import Tracer
from gcore.protocols import Rendezvous, Trainer

if TYPE_CHECKING:
    import torch

    from gcore.weights.publisher import WeightPublisher


def build_trainer(config: Config, plan: Plan, rendezvous: Rendezvous) -> Trainer:
    name = f"trainer-{rendezvous.rank}"
    arm_faults(config, name, rendezvous)
    if config.training.emulated is not None:
        from gcore.emulate.trainer import trainer_of

        return trainer_of(config, config.training.emulated, rendezvous.rank)
    quiet()
    from gcore.models.networks import pick_dtype
    from gcore.training.rank import TrainerRank

    device, gpu_bytes = _join(config, rendezvous)
    if gpu_bytes and "auto" in (config.training.activation_checkpointing, config.training.offload):
        config = plan_memory(config, plan, gpu_bytes).config  # the driver saw no GPU
    dtype = pick_dtype(config.training.dtype, device)
    return TrainerRank(
        config,
        partial(kind_of(config).backend, plan.topology, plan.shard, device, dtype),
        rendezvous.rank,
        plan.trainer_threads,
        Tracer(trace_folder(config), name),
        _publisher(config, plan, device, rendezvous),
        load_policy_loss(config.algorithm.policy_loss),
    )


def build_critic(config: Config, plan: Plan, rendezvous: Rendezvous) -> Trainer:
    """A rank of a critic that has its own ranks."""
    name = f"critic-{rendezvous.rank}"
    arm_faults(config, name, rendezvous)
    quiet()
    from gcore.models.networks import pick_dtype
    from gcore.prompts.tokenizer import load_tokenizer
    from gcore.training.critic import new_critic
    from gcore.training.fsdp import FsdpBackend
    from gcore.training.rank import TrainerRank

    device, gpu_bytes = _join(config, rendezvous)
    config, dtype = plan_critic_memory(config, plan, gpu_bytes), pick_dtype(config.training.dtype, device)
    critic = new_critic(config, load_tokenizer(config.model), config.max_length)
    make = partial(FsdpBackend, config, {"critic": critic}, device, dtype, plan.critic_shard)
    return TrainerRank(config, make, rendezvous.rank, plan.trainer_threads, Tracer(trace_folder(config), name))


def _join(config: Config, rendezvous: Rendezvous) -> tuple[torch.device, float]:
    """Join the process group of the ranks. Returns the device of this one and the bytes of its memory; 0 on a CPU."""
    import torch

    from gcore.models.networks import pick_device
    from gcore.runtime.gloo import join

    device, gpu_bytes = pick_device(config.training.device, rendezvous.rank), 0.0
    if device.type == "cuda":
        torch.cuda.set_device(device)
        gpu_bytes = float(torch.cuda.get_device_properties(device).total_memory)
    join(rendezvous, "nccl" if device.type == "cuda" else "gloo", device=device)
    return device, gpu_bytes


def _publisher(config: Config, plan: Plan, device: torch.device, rendezvous: Rendezvous) -> WeightPublisher:
    """`device`: of the trainer rank that publishes its weights."""
    from gcore.models.networks import pick_device, pick_dtype
    from gcore.weights.broadcast import BroadcastSender
    from gcore.weights.publisher import WeightPublisher, choose_method

    engine_device = pick_device(config.training.device)
    on_gpu = device.type == engine_device.type == "cuda"
    same_gpu, one_process = plan.gpu_assignment.engines_share_gpus, rendezvous.address is None
    method = choose_method(config.placement, one_process=one_process, on_gpu=on_gpu, same_gpu=same_gpu)
    sender = None
    if method == "broadcast" and rendezvous.rank == 0:
        assert rendezvous.address is not None
        common = device if engine_device.type == device.type else pick_device("cpu")
        sender = BroadcastSender(common, rendezvous.address.rpartition(":")[0])
    return WeightPublisher(rendezvous.rank, method, pick_dtype(config.generation.dtype, engine_device), sender)
