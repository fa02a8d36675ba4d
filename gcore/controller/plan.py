"""Computes the sizes of a run from the configuration and the machine: processes, threads, GPUs, bytes.

config, machine ──make_plan──> Plan ──> runtime and roles (controller/build.py); `--dry-run` prints `Plan.lines`
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from gcore.config.tree import Config
from gcore.controller.gpu_assignment import GpuAssignment, separate_gpus, shared_gpus
from gcore.placement.grid import POLICY, DeviceGrid, Split, shares, split_by
from gcore.types import UserError

MAX_AUTO = 4  # processes of a role on CPU; more would only cost memory: threads are as fast


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine(cores=2, gpus=0, memory_mb=24105, free_mb=20311); 0 MB: unknown"""

    cores: int
    gpus: int
    memory_mb: int = 0
    free_mb: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan(controllers=2, engines=2, engine_threads=1, trainers=2, trainer_threads=1, shard=1, ...)"""

    controllers: int
    engines: int
    engine_threads: int
    trainers: int
    trainer_threads: int
    shard: int
    object_store_mb: int
    gpus: int
    reward_workers: int  # per controller
    judges: dict[str, int] = field(default_factory=dict)  # name -> engine replicas; judges behind a URL are not listed
    scorers: dict[str, int] = field(default_factory=dict)  # name -> replicas of the scalar model
    grid: DeviceGrid | None = None  # slots that roles share; None: every role keeps its devices
    gpu_assignment: GpuAssignment = field(default_factory=GpuAssignment)  # GPUs of each replica

    def lines(self, config: Config) -> list[str]:
        """The derived sizes and the processes, as `--dry-run` prints them."""
        sampling, algorithm = config.sampling, config.algorithm
        samples = sampling.prompts_per_step * sampling.samples_per_prompt
        longest = config.data.max_prompt_length + config.generation.max_response_length
        return [
            f"step         {sampling.prompts_per_step} prompts x {sampling.samples_per_prompt} = {samples} samples,"
            f" at most {samples * longest:,} tokens",
            f"update       {algorithm.mini_batches} mini-batch(es) of {samples // algorithm.mini_batches} samples,"
            f" micro-batches of at most {config.training.max_tokens_per_gpu:,} tokens per rank",
            f"run          {config.run.steps} steps = {config.run.steps * sampling.prompts_per_step:,} prompts,"
            f" {config.run.steps * samples:,} samples",
            f"processes    1 driver, {self.controllers} controller(s), {self.engines} engine(s) x {self.engine_threads}"
            f" thread(s), {self.trainers} trainer rank(s) x {self.trainer_threads} thread(s)"
            + "".join(f", {count} x judge {name}" for name, count in self.judges.items())
            + "".join(f", {count} x scorer {name}" for name, count in self.scorers.items())
            + (f", {self.reward_workers} reward worker(s) per controller" if self.reward_workers else "")
            + (" - all in one process (runtime=local)" if config.runtime == "local" else ""),
            *(f"judge        {j.name} at {j.url.partition('?')[0]}" for j in config.rewards.judges if j.url),
            f"devices      {self._devices() if self.gpus else 'CPU'}",
            *(
                [f"placement    {config.placement.mode}: {self.grid.slots} slots in {self.grid.num_blocks} blocks"]
                if self.grid
                else []
            ),
            f"files        {config.run.folder}",
        ]

    def _devices(self) -> str:
        if not self.gpu_assignment.first:
            return f"{self.gpus} GPU(s), engine and trainer rank i share GPU i"
        ends = [*list(self.gpu_assignment.first.values())[1:], len(self.gpu_assignment.bundles)]
        spans = zip(self.gpu_assignment.first.items(), ends, strict=True)
        return f"{self.gpus} GPU(s): " + ", ".join(
            f"{kind} {sum(self.gpu_assignment.bundles[first:end])}" for (kind, first), end in spans
        )


def detect_machine() -> Machine:
    """The cores that this process may use, the GPUs and the memory. Does not import torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = len([v for v in visible.split(",") if v.strip() and v.strip() != "-1"])
    else:
        try:
            gpus = sum(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir("/dev"))
        except OSError:
            gpus = 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(cores, gpus, *_see_memory())


def _see_memory() -> tuple[int, int]:
    """Total and free MB of this machine, or of the container of this process; 0: unknown."""
    found: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            found[name] = int(value.split()[0]) // 1024
    except (OSError, ValueError, IndexError):  # not Linux
        return 0, 0
    total, free = found.get("MemTotal", 0), found.get("MemAvailable", 0)
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(Path(file).read_text()) // 2**20
        except (OSError, ValueError):  # the file does not exist, or contains "max"
            continue
        total, free = min(total, limit), min(free, limit)
    return total, free


def make_plan(config: Config, machine: Machine, model_mb: int = 0) -> Plan:
    gpus = machine.gpus if config.training.device != "cpu" else 0
    if config.runtime == "local":
        gpus = min(gpus, 1)
    policy, trainer = config.placement.policy, config.placement.trainer
    scorers = {model.name: model.replicas for model in config.rewards.models}
    judges = {judge.name: judge.replicas for judge in config.rewards.engine_judges}
    is_separate = config.placement.mode == "disaggregated" and gpus > 0
    if is_separate:
        auto_ranks, auto_engines = _shares_of_gpus(config, gpus)
    else:
        auto_ranks = auto_engines = 1 if config.runtime == "local" else gpus or min(machine.cores, MAX_AUTO)
    ranks = trainer.ranks if trainer.ranks != "auto" else auto_ranks
    engines = policy.replicas if policy.replicas != "auto" else auto_engines
    shard = trainer.shard if trainer.shard != "auto" else (ranks if gpus else 1)
    if ranks % shard:
        raise UserError(f"placement.trainer.shard={shard} must divide the number of ranks, {ranks}")
    controllers = config.controllers if config.controllers != "auto" else ranks
    grid = _grid(config, gpus or machine.cores)
    if grid is not None:  # every role has replicas on every block
        engines, *judge_counts = (grid.num_blocks * grid.per_block(role) for role in grid.roles)
        judges = dict(zip(judges, judge_counts, strict=True))
    counts = {"engine": engines, **{f"judge-{name}": count for name, count in judges.items()}}
    counts |= {**{f"scorer-{name}": count for name, count in scorers.items()}, "trainer": ranks}
    used = gpus if is_separate else min(gpus, max(ranks, engines))
    return Plan(
        controllers=controllers,
        engines=engines,
        engine_threads=policy.threads if policy.threads != "auto" else 1,
        trainers=ranks,
        trainer_threads=trainer.threads if trainer.threads != "auto" else max(1, machine.cores // ranks),
        shard=shard,
        object_store_mb=config.placement.object_store_mb
        if config.placement.object_store_mb != "auto"
        else 256 + 2 * model_mb,
        gpus=used,
        reward_workers=_reward_workers(config, machine, controllers),
        judges=judges,
        scorers=scorers,
        grid=grid,
        gpu_assignment=separate_gpus(gpus, counts, _widths(config)) if is_separate else shared_gpus(used, counts),
    )


def _shares_of_gpus(config: Config, gpus: int) -> tuple[int, int]:
    """Disaggregated: default numbers of trainer ranks and policy engines. The trainer gets half of the GPUs that judges
    and scorers leave."""
    widths, rewards, given = _widths(config), config.rewards, config.placement
    left = gpus - sum(model.replicas for model in rewards.models)
    left -= sum(judge.replicas * judge.tensor_parallel for judge in rewards.engine_judges)
    ranks = given.trainer.ranks if given.trainer.ranks != "auto" else max(1, left // 2)
    return ranks, max(1, (left - ranks) // widths["engine"])


def _widths(config: Config) -> dict[str, int]:
    """GPUs per replica of each kind."""
    judges = {f"judge-{judge.name}": judge.tensor_parallel for judge in config.rewards.engine_judges}
    return {"engine": config.generation.tensor_parallel, **judges}


def _grid(config: Config, devices: int) -> DeviceGrid | None:
    placement = config.placement
    if placement.mode in ("shared", "disaggregated"):
        return None
    widths = {POLICY: config.generation.tensor_parallel}
    widths |= {judge.name: judge.tensor_parallel for judge in config.rewards.engine_judges}
    grid = DeviceGrid(devices if placement.slots == "auto" else placement.slots, widths)
    first_split(config, grid)
    return grid


def first_split(config: Config, grid: DeviceGrid) -> Split:
    """The split at the start: placement.split (in slots), by default even. `colocated`: all slots for the policy."""
    given = config.placement.split
    if config.placement.mode == "colocated" or grid.num_blocks < len(grid.roles):
        if config.placement.mode != "colocated":
            raise UserError(
                f"placement.slots={grid.slots} make {grid.num_blocks} block(s) for {len(grid.roles)} roles; use "
                "placement.mode=colocated, or more slots"
            )
        return Split((POLICY,) * grid.num_blocks)
    if not given:
        return shares(grid, dict.fromkeys(grid.roles, 1.0))
    if any(slots % grid.slots_per_block for slots in given.values()) or sum(given.values()) != grid.slots:
        raise UserError(
            f"placement.split={given}: expected multiples of {grid.slots_per_block}, the widest tensor_parallel, that "
            f"add up to placement.slots={grid.slots}"
        )
    return split_by(grid, {role: given[role] // grid.slots_per_block for role in grid.roles})


def _reward_workers(config: Config, machine: Machine, controllers: int) -> int:
    if not config.rewards.functions:
        return 0
    if config.rewards.workers != "auto":
        return config.rewards.workers
    return 0 if config.runtime == "local" else min(MAX_AUTO, max(1, machine.cores // controllers))
