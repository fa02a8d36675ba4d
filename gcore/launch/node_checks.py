"""Compares the nodes of a cluster with the driver's machine: versions, code, files, the run's folder, ports, clocks.

gcore train, --dry-run    a difference that would break the run ends it with one line each, before a role starts
gcore doctor --cluster    prints what is on each node, and the differences
during a run              a new node that would break the run is left out
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gcore import user_files
from gcore.config.engines import ENGINES
from gcore.config.judges import VerdictJudge
from gcore.config.tree import Config
from gcore.launch.machines import Cluster, Machine, cluster_of
from gcore.launch.pins import models_of
from gcore.launch.plan import Plan
from gcore.rewarding.judge import FUNCTION
from gcore.runtime.protocol import NodeFacts
from gcore.types import UserError, writing

SAME = ("torch", "transformers", "tokenizers", "numpy", "ray")  # a run with several versions of these would break
CLOCK_S = 1.0  # a larger difference is reported
LINK_MB = 64  # sent from each node to the next by `gcore doctor --cluster`
SLOW_LINK_MB_S = 100.0


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference("node 10.0.0.2 (host2): torch 2.9.1, ...", breaks=True)"""

    text: str
    breaks: bool = True  # a run would fail, or compute something else there


def differences(
    driver: NodeFacts,
    nodes: Sequence[NodeFacts],
    *,
    engines: Collection[str] | None = None,
    files: Mapping[str, str] | None = None,
    folder: str = "",
) -> list[Difference]:
    """One line each. `engines`: those that the run uses; None: no run is known. `files`: key -> path that nodes need.
    `folder`: key and path of the folder that was compared."""
    differing = []
    for node in nodes:
        name = f"node {node.address}" + (f" ({node.host})" if node.host else "")
        if node.failure:
            differing.append(Difference(f"{name}: cannot be used: {node.failure}; is G-Core installed there?"))
            continue
        of_node = (*_versions(driver, node, engines), *_files(driver, node, files or {}), *_surroundings(node, folder))
        differing += [replace(difference, text=f"{name}: {difference.text}") for difference in of_node]
    kinds = {gpu for node in nodes for gpu in node.gpus}
    if len(kinds) > 1:
        text = f"GPUs of {len(kinds)} kinds: {', '.join(sorted(kinds))}; a step is as slow as the slowest of them"
        differing.append(Difference(text, breaks=False))
    return differing


def _versions(driver: NodeFacts, node: NodeFacts, engines: Collection[str] | None) -> Iterator[Difference]:
    if node.code != driver.code:
        there, here = (f"{facts.versions.get('gcore')}, digest {facts.code}" for facts in (node, driver))
        yield Difference(f"other code of G-Core ({there}), expected {here}")
    minors = [facts.versions.get("python", "").split(".")[:2] for facts in (driver, node)]
    breaking = {"python": minors[0] != minors[1], **dict.fromkeys(SAME, True), "safetensors": False}
    for engine, traits in ENGINES.items():  # of those that it uses
        for package in traits.packages:
            both = package in driver.versions and package in node.versions
            breaking[package] = both if engines is None else engine in engines
    for package, breaks in breaking.items():
        theirs, ours = node.versions.get(package), driver.versions.get(package)
        if theirs != ours:
            is_other_build = theirs and ours and theirs.partition("+")[0] == ours.partition("+")[0]  # +cpu, +cu130
            text = f"{package} {theirs or 'is not installed'}, expected {ours or 'none'} as on the driver's machine"
            yield Difference(text, breaks and not is_other_build)


def _files(driver: NodeFacts, node: NodeFacts, files: Mapping[str, str]) -> Iterator[Difference]:
    for key, path in files.items():
        theirs, ours = node.sizes.get(path, -1), driver.sizes.get(path, -1)
        if theirs < 0:
            yield Difference(f"{key}={path}: no such file or folder there; share it, at the same path")
        elif theirs != ours:
            yield Difference(f"{key}={path}: another file there, {theirs:,} bytes instead of {ours:,}")


def _surroundings(node: NodeFacts, folder: str) -> Iterator[Difference]:
    """Its network, its clock, and the folder of the run."""
    if not node.interface:
        text = f"no interface of the machine has the address {node.address}, so other nodes cannot connect"
        yield Difference(f"{text} (ray start --node-ip-address)")
    if node.link:
        text = f"cannot connect to the next node at a free port ({node.link})"
        yield Difference(f"{text}; collectives need all ports between the nodes")
    elif 0 < node.link_mb_s < SLOW_LINK_MB_S:
        text = f"only {node.link_mb_s:.0f} MB/s to the next node; weights and samples cross it in every step"
        yield Difference(text, breaks=False)
    if node.folder:
        text = f"{folder}: {node.folder}; trainer ranks and controllers on all nodes write to it, so it must be on"
        yield Difference(f"{text} storage that the nodes share, at the same path")
    if abs(node.clock_s) - node.clock_error_s > CLOCK_S:
        text = f"its clock is {abs(node.clock_s):.1f} s {'ahead of' if node.clock_s > 0 else 'behind'} the driver's"
        yield Difference(f"{text}; timelines of the run mix up (use NTP)", breaks=False)


# ---- a run ----------------------------------------------------------------------------------------------------------


def sent_files(config: Config) -> list[str]:
    """Files of the recipe that the driver sends to the nodes: code, templates, datasets in a file."""
    rewards, data = config.rewards, config.data
    functions = [*(spec.path for spec in rewards.functions), config.workflow, config.sampling.filter]
    judges = [judge for judge in rewards.judges if isinstance(judge, VerdictJudge)]
    functions += [judge.verdict for judge in judges if FUNCTION.fullmatch(judge.verdict)]
    functions += [spec.task for spec in (data.train, *data.eval_sets.values()) if spec.task is not None]
    functions += [config.algorithm.adv_estimator, config.algorithm.policy_loss]
    functions += [config.sandbox.kind] if config.sandbox else []
    if config.environment is not None:
        functions += [config.environment.source, str(config.environment.args.get("game", ""))]
    code = [path.rpartition(":")[0] for path in functions]
    templates = [config.model.chat_template, *(judge.template for judge in judges)]
    datasets = [spec.path for spec in (data.train, *data.eval_sets.values())]
    return [
        *(place for place in code if place.endswith(".py")),
        *(text for text in (*templates, *datasets) if text and "{" not in text and Path(text).expanduser().is_file()),
    ]


def needed_files(config: Config, sent: Collection[str]) -> dict[str, str]:
    """Key -> file or folder of this machine that the nodes need too: models, tokenizers, large datasets."""
    data, models = config.data, models_of(config)
    paths = {f"{key}.path": model.path for key, model in models.items()}
    paths |= {f"{key}.tokenizer": model.tokenizer for key, model in models.items()}
    paths |= {"data.train.path": data.train.path}
    paths |= {f"data.eval.{name}.path".replace("..", "."): spec.path for name, spec in data.eval_sets.items()}
    here = {key: path for key, path in paths.items() if path and Path(path).expanduser().exists()}
    return {key: os.path.abspath(Path(path).expanduser()) for key, path in here.items() if path not in sent}


def check_nodes(config: Config, plan: Plan, trains: bool = True) -> list[str]:
    """Notes for the user. UserError if a node of the plan would break the run. Without a cluster: nothing."""
    used = sorted({node for nodes in plan.role_nodes.values() for node in nodes})
    differing = compare_nodes(config, [plan.nodes[i] for i in used], trains)
    if broken := [difference.text for difference in differing if difference.breaks]:
        raise UserError("\n  ".join([f"{len(broken)} problem(s) of the Ray cluster:", *broken]))
    return [difference.text for difference in differing]


def compare_nodes(config: Config, nodes: Sequence[Machine], trains: bool) -> list[Difference]:
    if not Cluster(tuple(nodes)).is_joined:
        return []
    names = sent_files(config)
    left_out = user_files.pack(names).left_out
    files = needed_files(config, set(names) - set(left_out))
    folder = Path(config.run.dir) if trains else None
    driver, facts = look_at_nodes(nodes, list(files.values()), folder)
    engines = {config.generation.engine, *(judge.engine for judge in config.rewards.engine_judges)}
    differing = differences(driver, facts, engines=engines, files=files, folder=f"run.dir={config.run.dir}")
    packages = {name: size for name, size in left_out.items() if name not in names}
    return differing + [
        Difference(f"package {name} has {size} MB and is not sent to the nodes; it must be installed there", False)
        for name, size in packages.items()
    ]


def look_at_nodes(
    nodes: Sequence[Machine], paths: Sequence[str] = (), folder: Path | None = None, megabytes: int = 0
) -> tuple[NodeFacts, list[NodeFacts]]:
    """Facts of the driver's machine, and of the nodes of the cluster that this process has joined."""
    from gcore.runtime import nodes as probes

    addresses = {node.node_id: node.address for node in nodes}
    return probes.look_here(paths), probes.look_at_nodes(addresses, paths, folder, megabytes)


class NodeGate:
    """The nodes that a run may use later. One that joins and would break the run is left out, and named once."""

    def __init__(self, see: Callable[[Config], Cluster], known: Sequence[Machine]) -> None:
        self._see, self._known = see, {node.node_id for node in known}
        self._refused: set[str] = set()
        self.note: Callable[[str], None] = print

    def see(self, config: Config) -> Cluster:
        cluster = self._see(config)
        for node in cluster.nodes:
            if node.node_id not in self._known | self._refused:
                breaking = [difference.text for difference in compare_nodes(config, [node], True) if difference.breaks]
                (self._refused if breaking else self._known).add(node.node_id)
                for text in breaking:
                    self.note(f"{text}; the run does not use this node")
        left = tuple(node for node in cluster.nodes if node.node_id not in self._refused)
        return Cluster(left) if left else cluster


# ---- gcore doctor --cluster -----------------------------------------------------------------------------------------


def cluster_doctor(folder: str) -> int:
    """Prints the nodes and their differences. 2: a run would break; 0: it would not."""
    from gcore.runtime.ray_cluster import is_joined, list_nodes

    if not is_joined():
        raise UserError("RAY_ADDRESS is not set; expected the address of a Ray cluster, HOST:PORT or auto")
    cluster = cluster_of(*list_nodes())
    directory = Path(folder)
    with writing(f"--run-dir {folder}"):
        directory.mkdir(parents=True, exist_ok=True)
    driver, facts = look_at_nodes(cluster.nodes, (), directory, LINK_MB)
    print(f"cluster     {len(facts)} node(s) that run roles, at {os.environ.get('RAY_ADDRESS', 'the joined cluster')}")
    print(f"driver      {driver.host}: {_shown(driver)}")
    for machine, node in zip(cluster.nodes, facts, strict=True):
        gpus = f"{len(node.gpus)} x {', '.join(sorted(set(node.gpus)))}" if node.gpus else f"{machine.gpus} GPU(s)"
        print(f"node        {node.address} {node.host}: {machine.cores} core(s), {gpus}")
        if not node.failure:
            print(f"            {_shown(node)}")
            print(f"            clock {node.clock_s:+.4f} s (at most {node.clock_error_s:.4f} s wrong)")
    for node, following in zip(facts, [*facts[1:], *facts[:1]], strict=True):
        if node.link_mb_s:
            print(f"link        {node.address} -> {following.address}: {node.link_mb_s:,.0f} MB/s, {LINK_MB} MB by TCP")
    if not any(node.folder or node.failure for node in facts):
        print(f"run folder  {directory.absolute()} is the same folder on all nodes")
    differing = differences(driver, facts, folder=f"--run-dir {directory.absolute()}")
    for difference in differing:
        print(f"{'PROBLEM' if difference.breaks else 'note':12}{difference.text}")
    broken = sum(difference.breaks for difference in differing)
    print(f"{'result':12}" + (f"{broken} problem(s): a run would break" if broken else "a run can use these nodes"))
    sys.stdout.flush()
    return 2 if broken else 0


def _shown(facts: NodeFacts) -> str:
    versions = {name: version for name, version in facts.versions.items() if name != "gcore"}
    return ", ".join(
        [f"gcore {facts.versions.get('gcore')} ({facts.code})", *(f"{name} {v}" for name, v in versions.items())]
    )
