"""`placement.mode: auto`: replaces `auto` by a placement mode before any process starts.

config, GPUs of the cluster ──> gcore/planner/plan.py ──> config with a mode, and the reason

The planner is used only where there is a choice: a GPU that it has data for, and a judge on an engine. Otherwise simple
rules decide. The rest of the run sees a configuration with an explicit mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gcore.config.judges import ServedJudge
from gcore.config.tree import Config
from gcore.cost.costs import GPUS, Gpu
from gcore.cost.shapes import model_shape
from gcore.launch.machines import Cluster, Machine, as_cluster
from gcore.launch.plan import num_slots
from gcore.planner.inputs import WIDTHS, Constraints, Workload
from gcore.planner.plan import PlanResult, plan
from gcore.planner.steps import Mode
from gcore.types import UserError

NVIDIA = Path("/proc/driver/nvidia/gpus")
SLOT_MODES: tuple[Mode, ...] = ("dynamic", "static", "colocated")


def choose_mode(
    config: Config, machines: Cluster | Machine, gpu_names: Sequence[str] | None = None
) -> tuple[Config, str]:
    """The configuration with a placement mode, and a line for the user about the choice. Unchanged, with an empty line,
    if the mode is not `auto`."""
    if config.placement.mode != "auto":
        return config, ""
    cluster = as_cluster(machines)
    gpus = cluster.gpus if config.training.device != "cpu" and config.runtime == "ray" else 0
    judges = config.rewards.engine_judges
    if gpus and config.critic_ranks:
        return _with_mode(config, "disaggregated"), "placement.mode=auto: disaggregated (the critic has its own ranks)"
    if not gpus or not judges or not config.generation.traits.computes:
        reason = "engines are emulated" if judges else "no judge runs on an engine"
        why = reason if gpus else "there is no GPU to divide"
        return _with_mode(config, "shared"), f"placement.mode=auto: shared ({why})"
    if config.sampling.staleness:
        mode = "disaggregated" if gpus > len(judges) + len(config.rewards.models) + 1 else "shared"
        return _with_mode(config, mode), f"placement.mode=auto: {mode} (asynchronous rollout on {gpus} GPU(s))"
    slots = num_slots(config, cluster)
    names = detect_gpu_names(cluster) if gpu_names is None else gpu_names
    gpu = planner_gpu(names)
    if gpu is None:
        mode = "dynamic" if slots > len(judges) else "colocated"
        why = f"the planner has no data for {names[0]!r}" if names else "the name of the GPUs is unknown"
        return _with_mode(config, mode), f"placement.mode=auto: {mode} ({why})"
    return _planned(config, slots, gpu)


def _planned(config: Config, slots: int, gpu: Gpu) -> tuple[Config, str]:
    answer = _run_planner(config, slots, gpu)
    best = answer.best
    if best is None:
        raise UserError(
            f"placement.mode=auto: no placement fits on {slots} x {gpu.title}: {'; '.join(answer.problems)}"
            + (f"; possible changes: {', '.join(answer.changes)}" if answer.changes else "")
            + " (set placement.mode to try it anyway)"
        )
    steps = ", ".join(f"{each.mode} {each.step_s:.1f} s" for each in answer.estimates)
    report = f"placement.mode=auto: {best.mode} (planned steps on {slots} x {gpu.title}: {steps})"
    split: dict[str, int] = {}
    if best.mode == "static" and len(config.rewards.engine_judges) == 1:
        judge = config.rewards.engine_judges[0].name
        split = {"policy": best.split["policy"], judge: slots - best.split["policy"]}
    return _with_mode(config, best.mode, split=split), report


def _run_planner(config: Config, slots: int, gpu: Gpu) -> PlanResult:
    """Assumes that responses and verdicts have half of their maximum length: nothing was generated yet."""
    sampling, generation, judges = config.sampling, config.generation, config.rewards.engine_judges
    widest = max(judges, key=lambda judge: judge.tensor_parallel)
    trainer_tp = config.placement.trainer.tensor_parallel
    workload = Workload(
        prompts=sampling.prompts_per_step,
        samples=sampling.samples_per_prompt,
        prompt_length=max(1, config.data.max_prompt_length // 2),
        response_length=max(1, generation.max_response_length // 2),
        max_response_length=generation.max_response_length,
        verdict_length=max(1, widest.max_response_length // 2) if isinstance(widest, ServedJudge) else 1,
        repeats=max((judge.repeats for judge in judges if isinstance(judge, ServedJudge)), default=1),
        logprob_passes=int(config.algorithm.needs_old_logprobs) + int(config.has_reference),
    )
    constraints = Constraints(
        policy_tp=generation.tensor_parallel,
        judge_tp=widest.tensor_parallel,
        modes=SLOT_MODES,
        trainer_tp=trainer_tp if trainer_tp in WIDTHS else 1,
        trainer_context=config.training.context_parallel,
        max_tokens_per_gpu=config.training.max_tokens_per_gpu,
        checkpointing=config.training.activation_checkpointing,
        offload=config.training.offload,
        kl=config.has_reference,
        critic=config.algorithm.estimator.critic,
    )
    shapes = [model_shape(judge.model, f"rewards.judges.{judge.name}.model") for judge in judges]
    return plan(model_shape(config.model, "model.path"), shapes, slots, gpu, workload, constraints)


def _with_mode(config: Config, mode: str, **more: Any) -> Config:
    """The configuration with this mode, validated as a recipe is: some keys exclude some modes."""
    tree = config.model_dump(exclude_unset=True)
    try:
        return Config.model_validate({**tree, "placement": {**tree["placement"], "mode": mode, **more}})
    except ValueError as error:
        raise UserError(f"placement.mode=auto chose {mode}: {error}") from error


def planner_gpu(names: Sequence[str]) -> Gpu | None:
    """The planner's data for these GPUs; None if it has none, or if the GPUs differ."""
    if len(set(names)) != 1:
        return None
    words = names[0].lower().replace("-", " ").split()
    return next((gpu for name, gpu in GPUS.items() if name in words), None)


def detect_gpu_names(cluster: Cluster) -> list[str]:
    """Names of the GPUs, from Ray or from this machine's NVIDIA driver. Does not import torch."""
    if cluster.is_joined:
        return [node.gpu_name for node in cluster.nodes if node.gpus and node.gpu_name]
    files = sorted(NVIDIA.glob("*/information")) if NVIDIA.is_dir() else []
    lines = [line for file in files for line in file.read_text().splitlines() if line.startswith("Model:")]
    if lines:
        return [line.partition(":")[2].strip() for line in lines]
    from gcore.runtime.nodes import ask_gpus

    return list(ask_gpus("name"))
