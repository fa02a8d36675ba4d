"""Computes the sizes of a run from the configuration and the cluster: processes, threads, nodes, GPUs.

config, cluster ──make_plan──> Plan ──> runtime and roles (launch/build.py); `--dry-run` prints `Plan.lines`

The plan gives every process a node. On GPUs, a process is where its GPUs are (gpu_assignment.py). On CPUs, the replicas
of each role are spread over the nodes by their cores: engine i, judge i and data-parallel replica i of the trainer are
on the same node. A controller is on the node of the data-parallel replica that it calls; if it calls several, the
controllers are spread over their nodes.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gcore.config.judges import RemoteJudge
from gcore.config.megatron import topology_of
from gcore.config.tree import Config
from gcore.launch.gpu_assignment import CRITIC, TRAINER, GpuAssignment, separate_gpus, shared_gpus, within_nodes
from gcore.launch.machines import Cluster, Machine, as_cluster
from gcore.modalities.table import kind_of
from gcore.placement.grid import POLICY, DeviceGrid, Split, shares, split_by
from gcore.types import Topology, UserError

MAX_AUTO = 4  # processes of a role per node on CPU; more would only cost memory: threads are as fast


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan(controllers=2, engines=2, trainers=2, trainer_threads=1, shard=1,
    nodes=(Machine(cores=2, gpus=0),), role_nodes={"engine": (0, 0), "trainer": (0, 0), "controller": (0, 0)}, ...)"""

    controllers: int
    engines: int
    trainers: int
    trainer_threads: int  # of each trainer and critic rank; engines and scorers have one
    topology: Topology  # how trainer ranks divide the model
    shard: int  # data-parallel ranks that share one copy of the weights
    gpus: int
    reward_workers: int  # per controller
    environment_processes: int = 0  # per controller
    judges: dict[str, int] = field(default_factory=dict)  # name -> engine replicas; judges behind a URL are not listed
    scorers: dict[str, int] = field(default_factory=dict)  # name -> replicas of the scalar model
    critics: int = 0  # ranks of a critic that has its own
    critic_shard: int = 1  # of them, those that share one copy of the weights
    sleep_level: int = 0  # of the policy's engines while the trainer works; 0: they do not sleep
    grid: DeviceGrid | None = None  # slots that roles share; None: every role keeps its devices
    gpu_assignment: GpuAssignment = field(default_factory=GpuAssignment)  # GPUs of each replica
    nodes: tuple[Machine, ...] = ()
    role_nodes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # kind -> node of each process

    @property
    def engines_per_gpu(self) -> int:
        """Policy engines on the GPU that has most of them; 1 on CPU. They divide generation.gpu_memory_utilization."""
        taken = Counter(gpu for gpus in self.gpu_assignment.replicas.get("engine", ()) for gpu in gpus)
        return max(taken.values(), default=1)

    def counts(self, node: int | None = None) -> dict[str, int]:
        """Processes by kind, of the run or of one node."""
        return {kind: len(on) if node is None else on.count(node) for kind, on in self.role_nodes.items()}

    def nodes_of_pool(self, kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The nodes of the controllers, and those of the replicas that they call."""
        return self.role_nodes.get("controller", ()), self.role_nodes.get(kind, ())

    def lines(self, config: Config) -> list[str]:
        """The derived sizes and the processes, as `--dry-run` prints them."""
        prompts, mini_batches = config.sampling.prompts_per_step, config.algorithm.mini_batches
        steps = config.run.total_steps
        text, samples, trained = _step_size(config)
        return [
            f"step         {text}, at most {samples * config.max_length:,} tokens",
            f"update       {mini_batches} mini-batch(es) of {trained // mini_batches} samples,"
            f" micro-batches of at most {config.training.max_tokens_per_gpu:,} tokens per rank",
            f"run          {steps} steps = {steps * prompts:,} {'rows' if config.is_offline else 'prompts'},"
            f" {steps * samples:,} samples",
            f"processes    1 driver, {self.controllers} controller(s), {self.engines} engine(s) x 1"
            f" thread(s), {self.trainers} trainer rank(s) x {self.trainer_threads} thread(s)"
            + (f" in tensor-parallel groups of {self.topology.tensor}" if self.topology.tensor > 1 else "")
            + (f", pipeline of {self.topology.pipeline} stages" if self.topology.pipeline > 1 else "")
            + (f", experts divided by {self.topology.expert}" if self.topology.expert > 1 else "")
            + (f", {self.critics} critic rank(s) x {self.trainer_threads} thread(s)" if self.critics else "")
            + "".join(f", {count} x judge {name}" for name, count in self.judges.items())
            + "".join(f", {count} x scorer {name}" for name, count in self.scorers.items())
            + (f", {self.reward_workers} reward worker(s) per controller" if self.reward_workers else "")
            + (f", {self.environment_processes} of the environment per controller" if config.environment else "")
            + (" - all in one process (runtime=local)" if config.runtime == "local" else ""),
            *self._environment_lines(config),
            *(
                f"judge        {j.name} at {j.url.partition('?')[0]}"
                for j in config.rewards.judges
                if isinstance(j, RemoteJudge)
            ),
            f"devices      {self._devices() if self.gpus else 'CPU'}",
            *(
                [f"placement    {config.placement.mode}: {self.grid.slots} slots in {self.grid.num_blocks} blocks"]
                if self.grid
                else []
            ),
            *(self._node_lines(config) if len(self.nodes) > 1 else []),
            f"files        {config.run.folder}",
        ]

    def _environment_lines(self, config: Config) -> list[str]:
        if (spec := config.environment) is None:
            return []
        at_once = self.controllers * self.environment_processes * spec.concurrency
        return [
            f"environment  {spec.source}: {at_once} episodes at once, at most {spec.max_turns} turns, "
            f"{spec.step_s:g} s per turn, {spec.retries} retries"
        ]

    def _devices(self) -> str:
        assigned = self.gpu_assignment
        if assigned.share < 1:
            engines = "engine" if self.engines_per_gpu == 1 else f"{self.engines_per_gpu} engines"
            return f"{self.gpus} GPU(s), {engines} and trainer rank i share GPU i"
        return f"{self.gpus} GPU(s): " + ", ".join(
            f"{kind} {sum(assigned.bundles[i] for bundles in replicas for i in bundles)}"
            for kind, replicas in assigned.replicas.items()
        )

    def _node_lines(self, config: Config) -> list[str]:
        lines = [f"nodes        {len(self.nodes)} of the Ray cluster"]
        for i, node in enumerate(self.nodes):
            ranks = {kind: [r for r, at in enumerate(nodes) if at == i] for kind, nodes in self.role_nodes.items()}
            roles = ", ".join(f"{kind} {_spans(here)}" for kind, here in ranks.items() if here) or "no role"
            gpus = f", {node.gpus} GPU(s)" if node.gpus else ""
            lines.append(f"{'':13}{node.address or 'this machine'}: {node.cores} core(s){gpus}: {roles}")
        paths = {"run.dir": config.run.dir, "model.path": config.model.path}
        named = " and ".join(f"{key}={path}" for key, path in paths.items() if path)
        return [*lines, f"storage      all nodes must see the same files under {named}"]


def _step_size(config: Config) -> tuple[str, int, int]:
    """The samples of a training step in words, their number, and how many of them are trained on."""
    prompts, siblings = config.sampling.prompts_per_step, config.sampling.samples_per_prompt
    if config.is_offline:
        rows, answers = ("pairs", 2 * prompts) if config.needs.pairs else ("rows", prompts)
        rows = "rows, each with the answer to another row for the KL" if config.needs.labels else rows
        return f"{prompts} {rows} = {answers} samples", answers, answers
    samples = prompts * siblings
    text = f"{prompts} prompts x {siblings} = {samples} samples"
    if config.needs.pairs:
        return f"{text}, of which {2 * prompts} are trained on (one pair per prompt)", samples, 2 * prompts
    return text, samples, samples


def make_plan(config: Config, machines: Cluster | Machine) -> Plan:
    """Pure."""
    nodes = as_cluster(machines).nodes
    if config.runtime == "local":  # one process
        nodes = (replace(nodes[0], gpus=min(nodes[0].gpus, 1)),)
    is_on_cpu = config.training.device == "cpu"
    cluster = Cluster(tuple(replace(node, gpus=0) for node in nodes) if is_on_cpu else nodes)
    gpus, policy, trainer = cluster.gpus, config.placement.policy, config.placement.trainer
    _check_widths(config, cluster)
    scorers = {model.name: model.replicas for model in config.rewards.models}
    judges = {judge.name: judge.replicas for judge in config.rewards.engine_judges}
    is_separate = config.placement.mode == "disaggregated" and gpus > 0
    auto_ranks, auto_engines = _shares_of_gpus(config, cluster) if is_separate else _auto_counts(config, cluster)
    ranks = trainer.ranks if trainer.ranks != "auto" else auto_ranks
    engines = policy.replicas if policy.replicas != "auto" else auto_engines
    engines = engines if config.generates else 0
    topology = topology_of(trainer, ranks)
    data_parallel = topology.data_parallel
    shard = trainer.shard if trainer.shard != "auto" else (data_parallel if gpus else 1)
    if data_parallel % shard:
        what = "ranks" if trainer.tensor_parallel == 1 else "ranks / tensor_parallel"
        raise UserError(f"placement.trainer.shard={shard} must divide the number of {what}, {data_parallel}")
    if data_parallel % config.training.context_parallel:
        raise UserError(
            f"training.context_parallel={config.training.context_parallel} must divide the number of data-parallel "
            f"ranks, {data_parallel} (placement.trainer.ranks / tensor_parallel)"
        )
    controllers = config.controllers if config.controllers != "auto" else data_parallel
    grid = _grid(config, cluster)
    if grid is not None:  # every role has replicas on every block
        engines, *judge_counts = (grid.num_blocks * grid.per_block(role) for role in grid.roles)
        judges = dict(zip(judges, judge_counts, strict=True))
    counts = {"engine": engines, **{f"judge-{name}": count for name, count in judges.items()}}
    counts |= {**{f"scorer-{name}": count for name, count in scorers.items()}, TRAINER: ranks}
    critic_shard = config.placement.critic.shard
    if critics := config.critic_ranks:
        counts[CRITIC] = critics
        if gpus and not is_separate:
            raise UserError(
                f"placement.critic.ranks={critics}: on GPUs the critic has ranks of its own only with "
                f"placement.mode=disaggregated, got {config.placement.mode}; expected 0, or that mode"
            )
    assigned = _assign_gpus(config, cluster, counts, is_separate, grid) if gpus else GpuAssignment()
    role_nodes = _role_nodes(cluster, assigned, counts, controllers, trainer.tensor_parallel)
    train_threads = _cores_per(cluster, (*role_nodes[TRAINER], *role_nodes.get(CRITIC, ())))  # both work at once
    return Plan(
        controllers=controllers,
        engines=engines,
        trainers=ranks,
        trainer_threads=trainer.threads if trainer.threads != "auto" else train_threads,
        topology=topology,
        shard=shard,
        critics=critics,
        critic_shard=critic_shard if critic_shard != "auto" else (max(1, critics) if gpus else 1),
        gpus=gpus if is_separate else len(assigned.bundles),
        reward_workers=_reward_workers(config, cluster, role_nodes["controller"]),
        environment_processes=_environment_processes(config, cluster, role_nodes["controller"]),
        sleep_level=_sleep_level(config, any(node.gpus for node in nodes)),
        judges=judges,
        scorers=scorers,
        grid=grid,
        gpu_assignment=assigned,
        nodes=nodes,
        role_nodes=role_nodes,
    )


# ---- counts ---------------------------------------------------------------------------------------------------------


def _auto_counts(config: Config, cluster: Cluster) -> tuple[int, int]:
    """Default numbers of trainer ranks and policy engines, if they share the devices: one per GPU or core."""
    if config.runtime == "local":
        return 1, 1
    group, node_gpus = config.placement.trainer.tensor_parallel, _node_gpus(cluster)
    if cluster.gpus:
        places = len(within_nodes(node_gpus, _widths(config)["engine"]))
        return _whole_copies(config, group * len(within_nodes(node_gpus, group))), places
    node_ranks = [min(node.cores, MAX_AUTO) for node in cluster.nodes]
    return _whole_copies(config, sum(ranks - ranks % group for ranks in node_ranks)), sum(node_ranks)


def _whole_copies(config: Config, ranks: int) -> int:
    """At most this number of ranks, in whole copies of the model; at least one copy."""
    copy = config.placement.trainer.tensor_parallel * config.placement.trainer.pipeline_parallel
    return max(copy, ranks - ranks % copy)


def _shares_of_gpus(config: Config, cluster: Cluster) -> tuple[int, int]:
    """Disaggregated: default numbers of trainer ranks and policy engines. The trainer gets half of the GPUs that judges
    and scorers leave; both get less if tensor-parallel groups do not fill the nodes."""
    widths, rewards, given = _widths(config), config.rewards, config.placement
    group, node_gpus = given.trainer.tensor_parallel, _node_gpus(cluster)
    others = {f"judge-{judge.name}": judge.replicas for judge in rewards.engine_judges}
    others |= {f"scorer-{model.name}": model.replicas for model in rewards.models}
    others |= {CRITIC: config.critic_ranks} if config.critic_ranks else {}
    left = cluster.gpus - sum(count * widths.get(kind, 1) for kind, count in others.items())
    most = given.trainer.ranks if given.trainer.ranks != "auto" else max(group, left // 2 // group * group)
    least = most if given.trainer.ranks != "auto" else group
    for ranks in range(most, least - 1, -group):
        for engines in range((left - ranks) // widths["engine"], 0, -1):
            with contextlib.suppress(UserError):  # it does not fit
                separate_gpus(node_gpus, {"engine": engines, **others, TRAINER: ranks}, widths, group)
                return ranks, engines
    return most, max(1, (left - most) // widths["engine"])  # too many: separate_gpus says what does not fit


def _reward_workers(config: Config, cluster: Cluster, controller_nodes: tuple[int, ...]) -> int:
    if not config.rewards.functions:
        return 0
    if config.rewards.workers != "auto":
        return config.rewards.workers
    return 0 if config.runtime == "local" else min(MAX_AUTO, _cores_per(cluster, controller_nodes))


def _environment_processes(config: Config, cluster: Cluster, controller_nodes: tuple[int, ...]) -> int:
    if config.environment is None:
        return 0
    given = config.environment.processes
    return min(MAX_AUTO, _cores_per(cluster, controller_nodes)) if given == "auto" else given


def _sleep_level(config: Config, has_gpus: bool) -> int:
    level = config.generation.sleep
    mode = config.placement.mode
    if not kind_of(config).engines_sleep or mode == "disaggregated":  # the trainer does not need their memory
        return 0
    if config.sampling.max_staleness and mode == "shared":  # they go on while it works
        return 0
    if level != "auto":
        return level
    on_gpu = has_gpus and config.training.device != "cpu"
    return (1 if config.model.lora else 2) if on_gpu else 0  # adapters need the base weights, which level 1 keeps


def _cores_per(cluster: Cluster, nodes: tuple[int, ...]) -> int:
    """Cores for each of these processes, on the node where they have the fewest."""
    return min(max(1, cluster.nodes[node].cores // count) for node, count in Counter(nodes).items())


# ---- nodes and GPUs -------------------------------------------------------------------------------------------------


def _node_gpus(cluster: Cluster) -> list[int]:
    return [node.gpus for node in cluster.nodes]


def _check_widths(config: Config, cluster: Cluster) -> None:
    """Every tensor-parallel group fits on a node."""
    if not cluster.gpus or config.runtime == "local":
        return
    largest, keys = max(_node_gpus(cluster)), {"generation.tensor_parallel": _widths(config)["engine"]}
    for key, judge in config.rewards.engine_judges_by_key.items():
        keys[f"{key}.tensor_parallel"] = _widths(config)[f"judge-{judge.name}"]
    keys["placement.trainer.tensor_parallel"] = config.placement.trainer.tensor_parallel
    for key, width in keys.items():
        if width > largest:
            raise UserError(
                f"{key}={width}: a tensor-parallel group stays within a node, and the largest node has {largest} "
                f"GPU(s); expected at most {largest}"
            )


def _assign_gpus(
    config: Config, cluster: Cluster, counts: Mapping[str, int], is_separate: bool, grid: DeviceGrid | None
) -> GpuAssignment:
    widths, group, node_gpus = _widths(config), config.placement.trainer.tensor_parallel, _node_gpus(cluster)
    if config.runtime == "local":  # the process has all GPUs
        return shared_gpus(node_gpus, counts)
    if is_separate:
        return separate_gpus(node_gpus, counts, widths, group)
    blocks = dict.fromkeys(widths, max(widths.values())) if grid is not None else None
    return shared_gpus(node_gpus, counts, widths, group, blocks)


def _role_nodes(
    cluster: Cluster, assigned: GpuAssignment, counts: Mapping[str, int], controllers: int, group: int
) -> dict[str, tuple[int, ...]]:
    """The node of every process. `group`: trainer ranks per tensor-parallel group."""
    if assigned.bundles:
        nodes = {kind: tuple(assigned.node_of(kind, i) for i in range(count)) for kind, count in counts.items()}
        ranks = nodes[TRAINER][::group]
        if controllers < len(ranks):  # each of them calls ranks on several nodes
            return {**nodes, "controller": tuple(ranks[i * len(ranks) // controllers] for i in range(controllers))}
        near = [*ranks, *nodes["engine"]]  # a controller without ranks calls only engines
        return {**nodes, "controller": tuple(near[i % len(near)] for i in range(controllers))}
    order = _spread(cluster, max(controllers, *counts.values()))
    nodes = {kind: tuple(order[:count]) for kind, count in counts.items()}
    nodes[TRAINER] = tuple(order[rank // group] for rank in range(counts[TRAINER]))
    return {**nodes, "controller": tuple(order[:controllers])}


def _spread(cluster: Cluster, count: int) -> list[int]:
    """The nodes of `count` processes, in proportion to their cores. For 4 and 2 cores: 0, 0, 1, 0, 0, 1"""
    order, has = list[int](), [0] * len(cluster.nodes)
    for _ in range(count):
        node = min(range(len(has)), key=lambda n: (has[n] + 1) / cluster.nodes[n].cores)
        has[node] += 1
        order.append(node)
    return order


def _widths(config: Config) -> dict[str, int]:
    """GPUs per replica of each kind of engine. Emulated engines need none."""
    served = {"engine": config.generation} | {f"judge-{judge.name}": judge for judge in config.rewards.engine_judges}
    return {kind: 1 if by.emulated is not None else by.tensor_parallel for kind, by in served.items()}


def _spans(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> 0-2, 5"""
    starts = [i for i in numbers if i - 1 not in numbers]
    ends = [i for i in numbers if i + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


# ---- slots ----------------------------------------------------------------------------------------------------------


def num_slots(config: Config, cluster: Cluster) -> int:
    """Devices to divide. `auto`: the GPUs that whole blocks of a node can use, or the cores."""
    if config.placement.slots != "auto":
        return config.placement.slots
    widest = max(_widths(config).values())
    return widest * len(within_nodes(_node_gpus(cluster), widest)) or cluster.cores


def _grid(config: Config, cluster: Cluster) -> DeviceGrid | None:
    placement = config.placement
    if placement.mode in ("shared", "disaggregated"):
        return None
    widths = {POLICY: config.generation.tensor_parallel}
    widths |= {judge.name: judge.tensor_parallel for judge in config.rewards.engine_judges}
    grid = DeviceGrid(num_slots(config, cluster), widths)
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
        return shares(grid)
    if any(slots % grid.slots_per_block for slots in given.values()) or sum(given.values()) != grid.slots:
        raise UserError(
            f"placement.split={given}: expected multiples of {grid.slots_per_block}, the widest tensor_parallel, that "
            f"add up to placement.slots={grid.slots}"
        )
    return split_by(grid, {role: given[role] // grid.slots_per_block for role in grid.roles})
