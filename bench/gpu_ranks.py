"""Several ranks on one GPU: do they train as one rank does?

    python bench/gpu_ranks.py --json ranks.json        # one H200: about two minutes
    python bench/gpu_ranks.py --rehearse               # the same on a CPU with a tiny model

NCCL wants a device per rank, so the ranks of a case share the GPU, and their collectives go through the host
(bench/staged.py): seconds are no measure of a cluster. Each case trains a model with random weights for three updates
(GRPO with a KL to the reference and an entropy bonus) from the same samples, in processes of its own with a time limit,
and is compared with one rank:

    loss      the largest difference of the loss, of the three updates
    norm      the largest relative difference of the norm of the gradients
    weights   the largest difference of a weight after the three updates
    update    |w - w of one rank| / |w of one rank - w at the start|, over all weights
    seconds   of the last update, and of the whole case with the start of its processes

Cases: FSDP2; FSDP2 x tensor; context parallelism by ring and by Ulysses (bfloat16: on a GPU these are its kernels);
Megatron-Core; an optimizer in host memory; a checkpoint saved by two ranks and loaded by four; ranks of a critic apart
from those of the policy; and weights sent to two embedded engines, which must be those of the trainer to the last bit
and must answer alike: by CUDA IPC (on a CPU: through host memory), and by a broadcast over gloo.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.util
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from bench import staged  # noqa: E402
from bench.common import free_address, write_json  # noqa: E402
from gcore.config.tree import Config  # noqa: E402
from gcore.content.tokens import Tokens  # noqa: E402
from gcore.cost.workload import CostModel  # noqa: E402
from gcore.generation.embedded import EmbeddedBackend  # noqa: E402
from gcore.generation.engine_shell import SteppedEngine  # noqa: E402
from gcore.models.networks import load_model, make_empty  # noqa: E402
from gcore.observe.trace import Tracer  # noqa: E402
from gcore.preparation.balance import make_layout  # noqa: E402
from gcore.preparation.samples import meta_of  # noqa: E402
from gcore.prompts.tokenizer import load_tokenizer  # noqa: E402
from gcore.protocols import Metric, Receivers, Rendezvous, add_metrics  # noqa: E402
from gcore.runtime.gloo import join  # noqa: E402
from gcore.training.backend import NewNetwork  # noqa: E402
from gcore.training.critic import networks_of, new_critic  # noqa: E402
from gcore.training.fsdp import FsdpBackend  # noqa: E402
from gcore.training.rank import TrainerRank  # noqa: E402
from gcore.types import MicroBatch, MiniBatch, Request, Sample, SamplingParams, Topology, TrainBatch  # noqa: E402
from gcore.weights.broadcast import BroadcastSender  # noqa: E402
from gcore.weights.bucket import unpack_bucket  # noqa: E402
from gcore.weights.pretrained import open_weights  # noqa: E402
from gcore.weights.publisher import TransferMethod, WeightPublisher  # noqa: E402

UPDATES = 3
PRELOAD = ["bench.gpu_ranks", "transformers.models.qwen3.modeling_qwen3"]
LIMITS = {
    "float32": {"loss": 1e-4, "norm": 1e-3, "update": 2e-3},
    "bfloat16": {"loss": 2e-2, "norm": 5e-2, "update": 0.2},
}
ENGINES = ("engine-0", "engine-1")
COLUMNS = {"case": 34, "loss": 11, "norm": 11, "weights": 11, "update": 11, "update s": 10, "case s": 8}


@dataclasses.dataclass(frozen=True)
class Case:
    """Case("FSDP 2 x tensor 2", ranks=4, shard=2, tensor=2). `run`: the function of its processes, by name."""

    name: str
    ranks: int = 1
    shard: int = 1
    tensor: int = 1
    context: int = 1
    method: str = "auto"
    dtype: str = "float32"
    backend: str = "fsdp"
    offload: str = "none"
    critic: int = 0  # 1: beside the policy; 2: on ranks of its own
    run: str = "train"
    source: str = ""  # of weights: how they get to the engines

    @property
    def processes(self) -> int:
        return self.ranks + (self.ranks if self.critic == 2 else 0) + (len(ENGINES) if self.source else 0)

    @property
    def reference(self) -> str:
        """The case with one rank that it is compared with."""
        return "one rank, critic" if self.critic else f"one rank, {self.dtype}"

    @property
    def topology(self) -> Topology:
        return Topology(self.ranks, self.tensor)


CASES = [
    Case("one rank, float32"),
    Case("one rank, bfloat16", dtype="bfloat16"),
    Case("one rank, critic", critic=1),
    Case("FSDP 2", 2, 2),
    Case("FSDP 4", 4, 4),
    Case("FSDP 2 x tensor 2", 4, 2, 2),
    Case("context 2, ring", 2, 2, context=2, method="ring", dtype="bfloat16"),
    Case("context 2, Ulysses", 2, 2, context=2, method="ulysses", dtype="bfloat16"),
    Case("Megatron tensor 2", 2, tensor=2, backend="megatron"),
    Case("FSDP 2, optimizer off-loaded", 2, 2, offload="optimizer"),
    Case("saved by 2, loaded by 4", 4, 4, run="reshard"),
    Case("critic on 2 ranks of its own", 2, 2, critic=2, run="apart"),
    Case("2 engines, CUDA IPC", 2, 2, run="send", source="cuda_ipc"),
    Case("2 engines, broadcast", 2, 2, run="send", source="broadcast"),
]


# ---- the table -------------------------------------------------------------------------------------------------------


def main() -> None:
    args = parse()
    if not args.rehearse:
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the server of the forks must not start CUDA
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.setdefault("OMP_NUM_THREADS", "1" if args.rehearse else "4")
    work = Path(tempfile.mkdtemp(prefix="gpu-ranks-", dir=args.work))
    began, record, failed = time.perf_counter(), dict[str, Any](), list[str]()
    args.start = start_method(args.rehearse)
    print(
        "".join(f"{name:<{width}}" if i == 0 else f"{name:>{width}}" for i, (name, width) in enumerate(COLUMNS.items()))
    )
    try:
        for case in CASES:
            if args.only and case.name not in args.only and not case.name.startswith("one rank"):
                continue
            found = skipped(case) or run_case(case, args, work)
            record[case.name] = found
            print(row_of(case, found), flush=True)
            if found.get("error"):
                failed.append(case.name)
            write_json(args.json, {"settings": vars(args), "cases": record})
    finally:
        shutil.rmtree(work, ignore_errors=True)
    limits = "; ".join(f"{dtype}: {', '.join(f'{n} {v:g}' for n, v in each.items())}" for dtype, each in LIMITS.items())
    print(f"allowed: {limits}. All cases: {time.perf_counter() - began:.0f} s")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def start_method(rehearse: bool) -> str:
    """Processes are forked from a server that has imported everything, which takes seconds. A library that has started
    CUDA in that server would make it useless: then each process imports for itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    probe = context.Process(target=probe_device, args=("cpu" if rehearse else "cuda",))
    probe.start()
    probe.join()
    return "spawn" if probe.exitcode else "forkserver"


def probe_device(device: str) -> None:
    torch.zeros(1, device=device)


def skipped(case: Case) -> dict[str, Any]:
    if case.backend == "megatron" and importlib.util.find_spec("megatron") is None:
        return {"skipped": "megatron-core is not installed"}
    return {}


def row_of(case: Case, found: dict[str, Any]) -> str:
    if "skipped" in found:
        return f"{case.name:<34}  skipped: {found['skipped']}"
    cells = [f"{found[name]:.1e}" if name in found else "" for name in ("loss", "norm", "weights", "update")]
    cells += [f"{found[name]:.2f}" if name in found else "" for name in ("update_s", "case_s")]
    widths = list(COLUMNS.values())
    row = f"{case.name:<{widths[0]}}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths[1:], strict=True))
    notes = [text for text in (found.get("note"), found.get("error")) if text]
    return f"{row}  {'; '.join(notes)}".rstrip()


def run_case(case: Case, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Its processes, until all of them have ended or the time is up."""
    folder = work / case.name.replace(" ", "-")
    folder.mkdir()
    context, began = multiprocessing.get_context(args.start), time.perf_counter()
    queues = [context.Queue() for _ in range(case.processes)]
    addresses = [free_address() for _ in range(2)]
    options = {"rehearse": args.rehearse, "work": str(work), "folder": str(folder), "addresses": addresses}
    processes = [
        context.Process(target=member, args=(case, rank, queues, options), daemon=True)
        for rank in range(case.processes)
    ]
    for process in processes:
        process.start()
    while time.perf_counter() - began < args.limit and any(p.is_alive() for p in processes):
        if any(p.exitcode for p in processes):  # the others wait for it
            break
        time.sleep(0.05)
    late = [i for i, p in enumerate(processes) if p.is_alive()]
    broken = [i for i, p in enumerate(processes) if p.exitcode]
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    file = folder / "result.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    found["case_s"] = time.perf_counter() - began
    if broken or late:
        texts = [path.read_text().strip() for path in sorted(folder.glob("error-*"))]
        ends = [path.read_text(errors="replace").strip()[-2000:] for path in sorted(folder.glob("*.log"))]
        print(*(texts[:1] or ends), sep="\n", file=sys.stderr, flush=True)
        why = (
            texts[0].splitlines()[-1] if texts else f"processes {late or broken} did not end within {args.limit:.0f} s"
        )
        found["error"] = f"FAILED: {why[:200]}"
    elif not found.get("error") and not case.name.startswith("one rank"):
        limits = LIMITS[case.dtype]
        if over := [f"{n}={found[n]:.1e} > {limits[n]:g}" for n in limits if n in found and not found[n] <= limits[n]]:
            found["error"] = f"DIFFERS: {', '.join(over)}"
    return found


def member(case: Case, rank: int, queues: Sequence[Any], options: dict[str, Any]) -> None:
    """A process of a case. What it prints goes to a file, of which the end is shown if it fails."""
    with (Path(options["folder"]) / f"{rank}.log").open("w") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    try:
        RUNS[case.run](Place(case, rank, tuple(queues), **options))
    except BaseException:
        (Path(options["folder"]) / f"error-{time.time():.3f}-{rank}").write_text(traceback.format_exc())
        raise


# ---- a process -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """Of one process in its case. `queues`: one to each process."""

    case: Case
    rank: int
    queues: tuple[Any, ...]
    rehearse: bool
    work: str
    folder: str
    addresses: Sequence[str]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.rehearse else torch.device("cuda", 0)

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.case.dtype)
        return found

    @property
    def config(self) -> Config:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "layers": 2, "heads": 4, "kv_heads": 2, "max_length": 64}
        if not self.rehearse:  # 0.11B
            sizes |= {"hidden_size": 768, "intermediate_size": 3072, "layers": 14, "heads": 12, "kv_heads": 4}
            sizes |= {"max_length": 512}
        rates = {"lr": 1e-3, "max_grad_norm": 1.0}
        algorithm: dict[str, Any] = {"kl_coef": 0.1, "entropy_coef": 0.01}
        if self.case.critic:
            algorithm = {"adv_estimator": "gae", "gae_lambda": 0.9, "kl_coef": 0.1, "kl_in": "reward"}
            algorithm |= {"kl_estimator": "k1", "entropy_coef": 0.01}
        placement = {"critic": {"ranks": self.case.ranks, "shard": self.case.shard}} if self.case.critic == 2 else {}
        return Config.model_validate(
            {
                "run": {"name": "ranks", "steps": 100, "seed": 3, "dir": self.folder},
                "model": {"build": {**sizes, "alphabet": "0123456789+="}},
                "data": {"train": {"task": "arithmetic"}, "max_prompt_length": sizes["max_length"] // 4},
                "generation": {"max_response_length": sizes["max_length"] // 2},
                "rewards": {"functions": [{"name": "exact", "path": "gcore.rewarding.rules:exact_answer"}]},
                "algorithm": algorithm,
                "critic": rates,
                # a larger eps: Adam divides gradients near 0 by themselves, rounding errors included
                "training": {
                    **rates,
                    "eps": 1e-4,
                    "compile": False,
                    "activation_checkpointing": False,
                    "context_attention": self.case.method,
                    "offload": self.case.offload,
                },
                "placement": {"mode": "disaggregated", **placement},
            }
        )

    def join(self, rank: int, size: int, number: int = 0) -> None:
        """A world of ranks on this device. `number`: of the address."""
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        staged.register()
        if not self.rehearse:
            torch.cuda.set_device(self.device)
        join(Rendezvous(rank, size, self.addresses[number]), staged.NAME, timeout_s=120)

    def send(self, to: int, value: Any) -> None:
        self.queues[to].put(value)

    def receive(self) -> Any:
        return self.queues[self.rank].get(timeout=120)

    def save(self, result: dict[str, Any]) -> None:
        (Path(self.folder) / "result.json").write_text(json.dumps(result))


def backend_of(place: Place, case: Case, critic: bool = False) -> Callable[[], Any]:
    """`critic`: of ranks that train it alone."""
    config, context = place.config, case.context
    tokenizer = load_tokenizer(config.model)
    make = partial(make_empty, config.model, tokenizer)
    weights = partial(open_weights, model=config.model, seed=config.run.seed, tokenizer=tokenizer)
    policy = NewNetwork(make, open=weights)
    networks: Any = networks_of(config, policy, tokenizer, config.max_length)
    if case.critic == 2:
        networks = {"critic": new_critic(config, tokenizer, config.max_length)} if critic else {"policy": policy}
    if case.backend == "megatron":
        from gcore.training.megatron.backend import MegatronBackend

        return partial(MegatronBackend, config, networks, place.device, place.dtype, case.topology, context)
    return partial(FsdpBackend, config, networks, place.device, place.dtype, case.shard, case.tensor, context)


def trainer_of(place: Place, case: Case, rank: int, critic: bool = False, **more: Any) -> TrainerRank:
    threads = torch.get_num_threads()
    return TrainerRank(place.config, backend_of(place, case, critic), rank, threads, Tracer(None, "trainer"), **more)


def samples_of(place: Place, step: int) -> list[Sample]:
    """The same in every case. `reward`: the advantage."""
    rng, longest = np.random.default_rng(step), place.config.max_length
    found = []
    for prompt in range(4 if place.rehearse else 8):
        start = rng.integers(4, 16, rng.integers(2, longest // 4))
        for sibling in range(4):
            n = int(rng.integers(2, longest // 2))
            mask = rng.random(n) > 0.1
            mask[-1] = True
            tokens = np.concatenate([start, rng.integers(4, 16, n)]).astype(np.int32)
            logprobs = -rng.exponential(1, n).astype(np.float32)
            found.append(Sample(prompt, sibling, Tokens.split(tokens, n), mask, logprobs, reward=float(rng.normal())))
    return found


def batch_of(place: Place, case: Case, step: int, rank: int) -> tuple[list[Sample], TrainBatch]:
    """Of one rank."""
    samples, topology = samples_of(place, step), case.topology
    if case.context > 1:
        batch = shared_batch(samples, step, case.context)
    else:
        layout = make_layout(
            [meta_of(sample) for sample in samples],
            step=step,
            num_ranks=topology.data_parallel,
            mini_batches=1,
            max_tokens=sum(sample.content.size for sample in samples),
            cost=CostModel(6.0 * 768),
            sharded=case.shard > 1,
        )
        batch = layout[topology.data_rank(rank)]
    mine = [sample for sample in samples if sample.key in batch.keys]
    return mine, dataclasses.replace(batch, advantages={sample.key: sample.reward or 0.0 for sample in mine})


def shared_batch(samples: Sequence[Sample], step: int, context: int) -> TrainBatch:
    """Two rows, which all ranks compute together: a layout would share only samples that are too long for a rank."""
    micros = []
    for part in (samples[::2], samples[1::2]):
        length = sum(-(-sample.content.size // (2 * context)) * 2 * context for sample in part)
        micros.append(MicroBatch((tuple(sample.key for sample in part),), length, context))
    actions = sum(int(sample.mask_S.sum()) for sample in samples)
    return TrainBatch(step, (MiniBatch(tuple(micros), actions, len(samples)),))


async def updates(place: Place, case: Case, trainer: TrainerRank, rank: int, steps: Sequence[int]) -> list[Any]:
    """Loss, norm and seconds of each, the same on all ranks of a world."""
    rows = []
    for step in steps:
        samples, batch = batch_of(place, case, step, rank)
        began = time.perf_counter()
        await trainer.push(0, samples)
        await trainer.compute_logprobs(batch)
        stats = await trainer.update(batch)
        rows.append(row_of_update(case, stats, time.perf_counter() - began))
    return rows


def row_of_update(case: Case, stats: Any, seconds: float) -> dict[str, Any]:
    """A collective."""
    own = {name: dataclasses.astuple(metric) for name, metric in stats.metrics.items() if name.endswith("/loss")}
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    first = [found[case.topology.ranks_of(d)[0]] for d in range(case.topology.data_parallel)]
    parts = [{name: Metric(*value) for name, value in each.items()} for each in first]
    losses = {name: metric.value for name, metric in add_metrics(*parts).items()}
    return {"losses": losses, "norm": stats.grad_norm, "seconds": seconds}


async def all_weights(trainer: TrainerRank) -> dict[str, Tensor]:
    """In float32, on the host; of the critic too if it is beside the policy. A collective."""
    found: dict[str, Tensor] = {}
    if "policy" in trainer.trained:
        for index in range((await trainer.weight_plan()).num_buckets):
            packed = await trainer.weight_bucket(index, Receivers(()))
            found |= {name: tensor.clone() for name, tensor in unpack_bucket(packed).items()} if packed else {}
    if "critic" in trainer.trained:
        critic = trainer.backend.networks["critic"].parameters
        found |= {f"critic/{name}": value.full_tensor().detach().cpu() for name, value in critic.items()}
    return found


def compare(place: Place, rows: Sequence[Any], weights: dict[str, Tensor], note: str = "") -> None:
    """Called by rank 0. A case with one rank writes what others are compared with."""
    own = Path(place.work) / f"{place.case.name}.pt"
    if place.case.name == place.case.reference:
        torch.save({"rows": rows, "weights": weights}, own)
    alone = torch.load(Path(place.work) / f"{place.case.reference}.pt", mmap=True)
    # one rank in bfloat16 beside one in float32: what rounding alone changes
    if place.case.name == "one rank, bfloat16":
        alone = torch.load(Path(place.work) / "one rank, float32.pt", mmap=True)
    start = torch.load(Path(place.work) / "start.pt", mmap=True)
    result: dict[str, Any] = {"update_s": rows[-1]["seconds"], "rows": rows, "note": note}
    expected = alone["rows"][-len(rows) :]
    pairs = list(zip(rows, expected, strict=True))
    result["loss"] = max(abs(a["losses"][n] - b["losses"][n]) for a, b in pairs for n in b["losses"])
    result["norm"] = max(abs(a["norm"] / b["norm"] - 1) for a, b in pairs)
    assert weights.keys() == alone["weights"].keys(), weights.keys() ^ alone["weights"].keys()
    most, apart, moved = 0.0, 0.0, 0.0
    for name, value in alone["weights"].items():
        difference = (weights[name] - value).abs()
        most = max(most, float(difference.max()))
        apart += float(difference.double().square().sum())
        begun = start.get(name.removeprefix("critic/"), torch.zeros(()))  # the head of a critic starts with zeros
        moved += float((value - begun).double().square().sum())
    assert moved > 0, "the weights of one rank have not changed"
    place.save({**result, "weights": most, "update": (apart / moved) ** 0.5})


# ---- the cases -------------------------------------------------------------------------------------------------------


def train(place: Place) -> None:
    case, rank = place.case, place.rank
    place.join(rank, case.ranks)
    trainer = trainer_of(place, case, rank)

    async def run() -> None:
        if case.name == CASES[0].name:
            torch.save(await all_weights(trainer), Path(place.work) / "start.pt")
        await trainer.end_warm_start()
        rows = await updates(place, case, trainer, rank, range(1, UPDATES + 1))
        weights = await all_weights(trainer)
        if rank == 0:
            compare(place, rows, weights, check_case(case, trainer))

    asyncio.run(run())


def check_case(case: Case, trainer: TrainerRank) -> str:
    """That the case was what its name says. Returns what is worth reading."""
    if case.offload == "optimizer":
        state = trainer.backend.networks["policy"].optimizer.state
        homes = {str(entry["exp_avg"].to_local().device) for entry in state.values()}
        assert homes == {"cpu"}, homes
        return "moments in host memory"
    return ""


def reshard(place: Place) -> None:
    """Two ranks train and save before the last update; four load and make it."""
    case, rank = place.case, place.rank
    two, folder = dataclasses.replace(case, ranks=2, shard=2), Path(place.folder) / "saved"
    rows: list[Any] = []

    async def first() -> None:
        trainer = trainer_of(place, two, rank)
        await trainer.end_warm_start()
        rows.extend(await updates(place, two, trainer, rank, range(1, UPDATES)))
        folder.mkdir(exist_ok=True)
        await trainer.snapshot()
        written = await trainer.write(str(folder))
        assert not written.error, written.error

    if rank < two.ranks:
        place.join(rank, two.ranks)
        asyncio.run(first())
        dist.barrier()
        dist.destroy_process_group()
        place.send(rank + 2, "saved")
    else:
        place.receive()

    async def second() -> None:
        trainer = trainer_of(place, case, rank)
        began = time.perf_counter()
        await trainer.load(str(folder))
        load_s = time.perf_counter() - began
        assert trainer.trained["policy"].updates == UPDATES - 1
        rows.extend(await updates(place, case, trainer, rank, [UPDATES]))
        weights = await all_weights(trainer)
        if rank == 0:
            size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
            compare(place, rows, weights, f"{size / 1e9:.2f} GB loaded in {load_s:.1f} s")

    place.join(rank, case.ranks, 1)
    asyncio.run(second())


def apart(place: Place) -> None:
    """Ranks of the policy and ranks of the critic: two worlds, which exchange columns as a controller does."""
    case = place.case
    is_critic, rank = place.rank >= case.ranks, place.rank % case.ranks
    other = rank if is_critic else rank + case.ranks
    place.join(rank, case.ranks, int(is_critic))
    trainer = trainer_of(place, case, rank, is_critic)

    async def run() -> None:
        if is_critic:
            for _ in range(place.receive()):
                await trainer.load_policy(place.receive())
        await trainer.end_warm_start()
        if not is_critic:
            plan = await trainer.weight_plan()
            place.send(other, plan.critic_buckets)
            for index in range(plan.critic_buckets):
                bucket = await trainer.weight_bucket(index, Receivers(("critic",), are_critics=True))
                if rank == 0:
                    for to in range(case.ranks, 2 * case.ranks):
                        place.send(to, bucket)
        rows = []
        for step in range(1, UPDATES + 1):
            samples, batch = batch_of(place, case, step, rank)
            began = time.perf_counter()
            await trainer.push(0, samples)
            await trainer.compute_logprobs(batch)
            mine, theirs = ("values", "penalties") if is_critic else ("penalties", "values")
            if mine == "values" or place.config.algorithm.kl_per_step:
                place.send(other, await trainer.column(mine, sorted(batch.keys)))  # type: ignore[arg-type]
            if theirs == "values" or place.config.algorithm.kl_per_step:
                await trainer.take_column(theirs, place.receive())  # type: ignore[arg-type]
            stats = await trainer.update(batch)
            rows.append(row_of_update(case, stats, time.perf_counter() - began))
        weights = await all_weights(trainer)
        if rank == 0 and is_critic:
            torch.save(weights, Path(place.folder) / "critic.pt")
            place.send(0, rows)
        elif rank == 0:
            for row, more in zip(rows, place.receive(), strict=True):
                row["losses"] |= more["losses"]
            compare(place, rows, {**weights, **torch.load(Path(place.folder) / "critic.pt")})

    asyncio.run(run())


def send(place: Place) -> None:
    """Two ranks send their weights to two engines, with other weights at first. Then they train and send again."""
    if place.rank >= place.case.ranks:
        return asyncio.run(serve(place))
    case, rank = place.case, place.rank
    place.join(rank, case.ranks)
    method: TransferMethod = (
        "broadcast" if case.source == "broadcast" else "host_memory" if place.rehearse else "cuda_ipc"
    )
    sender = BroadcastSender(torch.device("cpu"), "127.0.0.1") if method == "broadcast" and rank == 0 else None
    trainer = trainer_of(place, case, rank, publisher=WeightPublisher(rank, method, torch.float32, sender))
    engines = [rank] if method == "cuda_ipc" else [0, 1] if rank == 0 else []

    async def run() -> None:
        await trainer.end_warm_start()
        rows, seconds = [], []
        for version in range(UPDATES + 1):
            began = time.perf_counter()
            plan = await trainer.weight_plan()
            for index in range(plan.num_buckets):
                bucket = await trainer.weight_bucket(index, Receivers(ENGINES))
                for engine in engines:
                    place.send(case.ranks + engine, (version, bucket, (index, plan.num_buckets)))
                for _ in engines:
                    assert place.receive() == version or index + 1 < plan.num_buckets
            seconds.append(time.perf_counter() - began)
            if version < UPDATES:
                rows += await updates(place, case, trainer, rank, [version + 1])
        plain = WeightPublisher(rank)
        trainer._publisher = plain
        weights = await all_weights(trainer)
        if rank == 0:
            torch.save(weights, Path(place.folder) / "weights.pt")
        for engine in range(len(ENGINES)) if rank == 0 else ():
            place.send(case.ranks + engine, None)
        answers = [place.receive() for _ in ENGINES] if rank == 0 else []
        if rank == 0:
            assert answers[0] == answers[1], "the engines answer differently"
            assert len(answers[0]) > 0, "the engines answer nothing"
            size = sum(weight.nbytes for weight in weights.values()) / 1e9
            compare(place, rows, weights, f"{method}: {size:.2f} GB to both engines in {min(seconds):.2f} s")

    asyncio.run(run())


async def serve(place: Place) -> None:
    """An engine. Its weights must be those of the trainer."""
    config, trainers = place.config, place.case.ranks
    tokenizer = load_tokenizer(config.model)
    engine_number = place.rank - trainers
    source = engine_number if place.case.source == "cuda_ipc" and not place.rehearse else 0
    network = load_model(config.model, tokenizer, 100 + engine_number, torch.float32, place.device)
    backend = EmbeddedBackend(network, 8, config.max_length)
    engine = SteppedEngine(backend)
    while (message := await asyncio.to_thread(place.receive)) is not None:
        version, bucket, which = message
        place.send(source, await engine.load_weights(version, bucket, which))
    expected, own = torch.load(Path(place.folder) / "weights.pt"), dict(network.named_parameters())
    assert expected.keys() <= own.keys(), expected.keys() - own.keys()
    for name, value in expected.items():
        assert torch.equal(own[name].detach().cpu(), value), f"{name} is not the trainer's"
    prompt = Tokens(np.arange(4, 12, dtype=np.int32))
    found = await engine.generate([Request(prompt, SamplingParams(16), noise_key=5 + i) for i in range(4)])
    place.send(0, [token for one in found for token in one.content.tokens_S.tolist()])  # type: ignore[attr-defined]


RUNS: dict[str, Callable[[Place], None]] = {"train": train, "reshard": reshard, "apart": apart, "send": send}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with a tiny model")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="and the cases of one rank")
    parser.add_argument("--limit", type=float, default=60, help="seconds per case; default %(default)s")
    parser.add_argument("--work", type=Path, help="folder of weights and checkpoints; by default a temporary one")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
