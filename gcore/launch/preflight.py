"""Checks a run before any process starts. A UserError is one line that names the key to change.

    light_checks   without torch, transformers and ray: folders, packages, devices, sizes, datasets, users' functions,
                   servers. They take about a second.
    heavy_checks   with transformers, and torch if needed: tokenizers, templates, the layers of the network.

Both check a sample of the rows. `gcore train --dry-run` prints the results (launch/dry_run.py).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import itertools
import os
import pickle
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gcore.checkpoint.memory import check_memory
from gcore.checkpoint.remote import Remote
from gcore.checkpoint.store import MANIFEST
from gcore.config.advice import warnings as advice
from gcore.config.data import Dataset
from gcore.config.engines import DEFAULT_ENGINE
from gcore.config.environments import ROWS
from gcore.config.judges import RemoteJudge
from gcore.config.secrets import REDACTED, places
from gcore.config.tree import Config
from gcore.content.families import KINDS
from gcore.content.media import BadMedia
from gcore.environments.rows import check as check_environment
from gcore.generation.served import check_served
from gcore.launch.auto_placement import choose_mode
from gcore.launch.build import Roles, quiet
from gcore.launch.build_rewarder import build_rewarder
from gcore.launch.footprint import check_sizes, node_parts
from gcore.launch.gpu_memory import MemoryPlan, plan_memory
from gcore.launch.machines import Cluster
from gcore.launch.node_checks import check_nodes
from gcore.launch.pins import check_models, find_weights
from gcore.launch.plan import Plan, make_plan
from gcore.launch.user_code import load_filter, load_policy_loss, load_workflow, make_advantage_settings
from gcore.modalities.base import PolicyKind
from gcore.modalities.table import kind_of
from gcore.observe.trackers import check_trackers
from gcore.prompts.answers import load_answered
from gcore.prompts.media import unread_media
from gcore.prompts.rows import PROMPTS, check_numbers, load_rows, prompt_of, reward_columns
from gcore.prompts.source import check_bad_rows, sample_digest, sample_of
from gcore.rewarding.functions import FunctionSource
from gcore.rewarding.http import HttpSource
from gcore.rewarding.judge import JudgeSource
from gcore.rewarding.judge_backend import RemoteBackend
from gcore.sandbox.pool import make_kind
from gcore.types import Prompt, UserError, writing

ACCELERATORS = ("nvidia[0-9]*", "kfd", "dxg")  # in /dev: NVIDIA, AMD, Windows' subsystem for Linux
DatasetSplit = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class OpenDataset:
    """A dataset and the rows to check. OpenDataset("data.train", "train", Dataset(...), [...], (0, 1, 3, ...), "")"""

    key: str
    split: DatasetSplit
    spec: Dataset
    rows: Sequence[dict[str, Any]]
    sample: tuple[int, ...]
    eval_set: str  # its name, of several


@dataclass(frozen=True, slots=True)
class DatasetCheck:
    """Result for the checked rows. DatasetCheck("data.train", num_rows=7473, num_checked=200, too_long=(3, 9), ...)"""

    key: str
    num_rows: int
    num_checked: int
    too_long: tuple[int, ...]  # row numbers
    longest: int  # tokens
    prompt: Prompt | None  # the first one that is not too long
    digest: str = ""  # sample_digest
    note: str = ""  # for the user
    has_media: bool = False
    mean: float = 0.0  # tokens of the prompts that are not too long


@dataclass(frozen=True, slots=True)
class ReadyRun:
    """A run that passed all checks. `config`: without `auto` in placement and memory."""

    config: Config
    plan: Plan
    mode_note: str  # why this placement mode
    memory: MemoryPlan
    warnings: list[str]
    datasets: list[DatasetCheck]
    tokenizer: Any  # of the policy
    unshared: str = ""  # why samples do not share prefixes; empty: they can

    @property
    def notes(self) -> list[str]:
        """For the user."""
        return [*filter(None, [self.mode_note]), *self.memory.notes, *self.warnings]


def make_ready(config: Config, cluster: Cluster, trains: bool = True) -> ReadyRun:
    """For these machines: the placement mode, the plan, the memory of the trainer, all checks. Here the plan of a run
    is made, once. UserError if the run cannot work there."""
    check_models(config)
    config, mode_note = choose_mode(config, cluster)
    plan = make_plan(config, cluster)
    memory = plan_memory(config, plan) if trains else MemoryPlan(config)
    warnings, datasets, tokenizer = preflight(memory.config, plan, trains)
    warnings += check_nodes(memory.config, plan, trains)
    config = memory.config
    if config.generation.media == "auto":
        media = any(data.has_media for data in datasets)
        config = config.changed("generation", media=media)
    unshared = _unshared(config, plan, warnings) if trains else ""
    return ReadyRun(config, plan, mode_note, memory, warnings, datasets, tokenizer, unshared)


def _unshared(config: Config, plan: Plan, warnings: list[str]) -> str:
    """Why samples do not share prefixes. UserError if the recipe asks for what is not possible."""
    wanted, key = config.training.share_prefixes, "training.share_prefixes"
    if wanted is False:
        return f"{key}=false"
    if why := kind_of(config).unshared():
        if wanted is True:
            raise UserError(f"{key}=true: {why}; expected auto or false")
        return why
    if wanted is True and answers_per_prompt(config) == 1:
        warnings.append(f"{key}=true: no effect with one answer per prompt")
    return ""


def answers_per_prompt(config: Config) -> int:
    """That are trained on."""
    if config.needs.pairs:
        return 2
    return 1 if config.is_offline else config.sampling.samples_per_prompt


def preflight(config: Config, plan: Plan, trains: bool = True) -> tuple[list[str], list[DatasetCheck], Any]:
    """Warnings, the datasets, the tokenizer. Raises UserError for the first check that fails. `trains`: the run has
    trainer ranks."""
    warnings, datasets = light_checks(config, plan, trains)
    tokenizer, checked = heavy_checks(config, plan, datasets)
    over = f"checked prompts are longer than data.max_prompt_length={config.data.max_prompt_length}"
    warnings += [f"{data.key}: all {data.num_checked} {over}" for data in checked if data.prompt is None]
    warnings += [data.note for data in checked if data.note]
    return warnings, checked, tokenizer


# ---- light: without torch, transformers and ray ---------------------------------------------------------------------


def light_checks(config: Config, plan: Plan, trains: bool = True) -> tuple[list[str], list[OpenDataset]]:
    """Warnings, and the open datasets. The cheapest checks come first."""
    _saved_values(config, trains)
    _disk(config)
    _resume(config.run.resume)
    if trains and config.checkpoint.copy_to is not None:
        Remote(config.checkpoint.copy_to, config.run.name).check()
    if trains and config.checkpoint.memory_every:
        check_memory(len(plan.nodes))
    _packages(config)
    find_weights(config, of_hub=False)
    warnings = advice(config) if trains else []
    _devices(config, plan)
    warnings += _sizes(config, plan, trains)
    kind = kind_of(config)
    warnings += kind.check(plan.topology, trains)
    datasets = [_open(config, "train", config.data.train, kind.media)]
    datasets += [_open(config, "eval", spec, kind.media, name) for name, spec in config.data.eval_sets.items()]
    if config.runtime == "ray" or plan.reward_workers:
        pickle.dumps(config)  # UserError if it holds a Python object that cannot be sent to other processes
    load_workflow(config.workflow)
    if config.sandbox is not None:
        make_kind(config.sandbox)
    if config.environment is not None and not any(data.spec.task == ROWS for data in datasets):
        check_environment(config.environment)  # its rows were not read
    load_filter(config.sampling.filter)
    make_advantage_settings(config)
    load_policy_loss(config.algorithm.policy_loss)
    _sources(config, [data for data in datasets if not config.trains_on_answers(data.split)])
    return warnings, datasets


def _disk(config: Config) -> None:
    folder = Path(config.run.dir)
    with writing(f"run.dir={folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(b"x")
    free = shutil.disk_usage(folder).free / 2**20
    if free < config.observe.min_free_disk_mb:
        raise UserError(
            f"run.dir={folder}: {free:.0f} MB free, expected at least observe.min_free_disk_mb="
            f"{config.observe.min_free_disk_mb}; free some space or choose another run.dir"
        )


def _saved_values(config: Config, trains: bool) -> None:
    """A run's config.yaml has no secrets. Some of them an evaluation does not need."""
    unused = () if trains else ("data.train.", "checkpoint.")
    missing = [key for key in places(config.model_dump(mode="json")) if not key.startswith(unused)]
    if missing:
        raise UserError(
            f"got {REDACTED}, because a run does not save secrets; expected the value of {', '.join(missing)} "
            f"(on the command line: {missing[0]}=...)"
        )


def _resume(resume: str) -> None:
    """The checkpoint exists. The controller verifies its checksums later, because that takes long."""
    if resume not in ("never", "auto") and not (Path(resume) / MANIFEST).is_file():
        raise UserError(
            f"run.resume={resume}: no complete checkpoint there (expected `auto`, `never` or a folder step_N)"
        )


def _packages(config: Config) -> None:
    check_trackers(config.observe)
    if config.runtime == "ray" and importlib.util.find_spec("ray") is None:
        raise UserError("runtime=ray: Ray is not installed; `pip install ray`, or use runtime=local")
    missing = [name for name in ("megatron", "mbridge") if importlib.util.find_spec(name) is None]
    if config.training.backend == "megatron" and missing:
        raise UserError(
            f"training.backend=megatron: {missing[0]} is not installed; `pip install 'gcore-rl[megatron]'`, or use "
            "training.backend=fsdp"
        )
    for key, serving in (("generation", config.generation), *config.rewards.engine_judges_by_key.items()):
        traits = serving.traits
        if traits.packages and importlib.util.find_spec(traits.packages[0]) is None:
            raise UserError(
                f"{key}.engine={serving.engine}: {traits.library} is not installed (see docs/engines.md), or use "
                f"engine={DEFAULT_ENGINE}"
            )


def _sizes(config: Config, plan: Plan, trains: bool) -> list[str]:
    """Memory and cores of every node."""
    warnings = []
    for node, own in node_parts(config, plan, trains):
        before, after = (f"node {node.address}: ", " (counts of this node)") if len(plan.nodes) > 1 else ("", "")
        try:
            warnings += [before + warning + after for warning in check_sizes(own, node)]
        except UserError as error:
            raise UserError(f"{before}{error}{after}") from None
    return warnings


def _devices(config: Config, plan: Plan) -> None:
    """With `cuda`, the machine has a GPU and PyTorch was built for CUDA. On a cluster the nodes have GPUs."""
    if config.training.device != "cuda":
        return
    key, advice = "training.device=cuda", "use training.device=cpu (or auto)"
    if Cluster(plan.nodes).is_joined:
        if not any(node.gpus for node in plan.nodes):
            raise UserError(f"{key}: no node of the Ray cluster has a GPU; {advice}")
        return
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or not any(any(Path("/dev").glob(name)) for name in ACCELERATORS):
        why = "CUDA_VISIBLE_DEVICES hides all GPUs" if hidden else "this machine has no GPU"
        raise UserError(f"{key}: {why}; {advice}")
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return
    if version.endswith("+cpu"):
        raise UserError(f"{key}: PyTorch {version} is built only for CPUs; {advice}")


def _open(
    config: Config, split: DatasetSplit, spec: Dataset, media: tuple[str, ...], eval_set: str = ""
) -> OpenDataset:
    """Open the dataset; each row of the sample has a prompt."""
    key = f"data.{split}.{eval_set}" if eval_set else f"data.{split}"
    rows = load_answered(spec, config.needs, key) if config.trains_on_answers(split) else load_rows(spec, key, media)
    data = OpenDataset(key, split, spec, rows, sample_of(len(rows)), eval_set)
    for index in data.sample:
        row = rows[index]
        names = PROMPTS if spec.prompt_column == "auto" else (spec.prompt_column,)
        if (empty := [name for name in names if name in row]) and all(row[name] is None for name in empty):
            raise UserError(f"{key}: row {index} has no prompt: its column {empty[0]!r} is empty (null)")
        try:
            check_numbers(row, key)
            prompt_of(row, spec, key)
        except UserError as error:
            raise _of_row(error, data, index) from None
    return data


def _of_row(error: UserError, data: OpenDataset, index: int) -> UserError:
    return UserError(f"{data.key}: row {index}: {str(error).removeprefix(f'{data.key}: ')}")


def _sources(config: Config, datasets: Sequence[OpenDataset]) -> None:
    """Rewards that need no tokenizer: import the user's functions, and connect to the servers."""
    rewards = config.rewards
    functions = [FunctionSource(spec, 1, f"rewards.functions.{i}") for i, spec in enumerate(rewards.functions)]
    servers: list[HttpSource | JudgeSource] = [
        HttpSource(spec, f"rewards.http.{i}") for i, spec in enumerate(rewards.http)
    ]
    for i, judge in enumerate(rewards.judges):
        if isinstance(judge, RemoteJudge):
            place = f"rewards.judges.{i}"
            servers.append(JudgeSource(judge, RemoteBackend(judge, lambda key: 0, place), place))
    for data in datasets:
        rows_of: dict[frozenset[str], int] = {}  # the first row that has these columns
        for index in data.sample:
            rows_of.setdefault(frozenset(reward_columns(data.rows[index], data.spec, data.key)), index)
        for (names, index), source in itertools.product(rows_of.items(), (*functions, *servers)):
            try:
                source.check(names)
            except UserError as error:
                raise UserError(str(error) if index == 0 else f"{data.key}: row {index}: {error}") from None
    if servers:
        asyncio.run(_reach(servers))


async def _reach(servers: Sequence[HttpSource | JudgeSource]) -> None:
    try:
        await asyncio.gather(*(server.reach() for server in servers))
    finally:
        for server in servers:
            server.close()


# ---- heavy: with transformers, and torch if needed ------------------------------------------------------------------


def heavy_checks(config: Config, plan: Plan, datasets: Sequence[OpenDataset]) -> tuple[Any, list[DatasetCheck]]:
    """The policy's tokenizer, and the result for each dataset."""
    quiet()
    kind = kind_of(config)
    tokenizer = kind.tokenizer
    checked = [_render(config, data, kind) for data in datasets]
    rewarder = build_rewarder(config, plan, Roles())
    try:
        for data in checked:
            if data.prompt is not None:
                rewarder.check(data.prompt.columns)
    finally:
        rewarder.close()
    for key, judge in config.rewards.engine_judges_by_key.items():
        check_served(judge.model, judge.engine, f"{key}.model")
    kind.check_network()
    if config.training.device == "cuda" and not Cluster(plan.nodes).is_joined:
        from gcore.models.networks import pick_device

        pick_device("cuda")
    return tokenizer, checked


def _render(config: Config, data: OpenDataset, kind: PolicyKind) -> DatasetCheck:
    """Render the sampled rows with the template, and their demonstrations if there is a warm start."""
    templater = kind.templater(data.split, data.eval_set)
    limit, longest = config.data.max_prompt_length, 0
    too_long, lengths = list[int](), list[int]()
    bad: dict[int, str] = {}
    num_media = 0
    first: Prompt | None = None
    for index in data.sample:
        try:
            prompt = templater.prompt(data.rows[index], index, 0)
            if config.trains_on_answers(data.split):
                templater.answers(data.rows[index])
            if data.split == "train" and config.training.warm_start is not None:
                templater.demonstration(data.rows[index])
        except BadMedia as error:
            bad[index] = str(error)
            continue
        except UserError as error:
            raise _of_row(error, data, index) from None
        num_media += len(prompt.content.work.media)
        longest = max(longest, templater.length(prompt))
        if templater.length(prompt) > limit:
            too_long.append(index)
            continue
        lengths.append(prompt.content.size)
        first = first or prompt
    check_bad_rows(bad, len(data.rows), config.data.media.max_bad_rows, data.key)
    note = _text_alone(data, kind.media[0]) if kind.media and not num_media else ""
    if first is None and len(data.sample) == len(data.rows):
        raise UserError(
            f"{data.key}: all {len(data.rows)} prompts are longer than data.max_prompt_length={limit} (the longest has "
            f"{longest} tokens)"
        )
    digest = sample_digest(data.rows)
    mean = sum(lengths) / len(lengths) if lengths else 0.0
    checked = len(data.rows), len(data.sample), tuple(too_long), longest, first, digest, note
    return DatasetCheck(data.key, *checked, has_media=num_media > 0 or bool(bad), mean=mean)


def _text_alone(data: OpenDataset, kind: str) -> str:
    """A note that a model that takes media gets none. UserError if a column holds some under another name."""
    row, found = KINDS[kind], f"{data.key}: no {kind} in {len(data.sample)} rows"
    for index in data.sample:
        if column := unread_media(data.rows[index]):
            raise UserError(
                f"{found}, and the column {column!r} holds media (row {index}); expected them in the column "
                f"{' or '.join(row.columns)}, or as {kind} parts of messages (rename or remove the column)"
            )
    return f"{found}: the model takes {row.plural}, and reads text alone here"
