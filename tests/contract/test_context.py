"""Contract of context parallelism: ranks that share sequences compute the gradients, metrics and columns of one rank.

Every world runs in its own processes with gloo. They write what they computed, and it is compared with one process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import GptOssConfig

from gcore.config.tree import Config
from gcore.content.tokens import SamplingMask
from gcore.observe.trace import Tracer
from gcore.protocols import Metric, Rendezvous, add_metrics
from gcore.runtime.gloo import join
from gcore.training import attention, objective, ring, varlen
from gcore.training.backend import NewNetwork
from gcore.training.context import ContextGroups, Sharing, choose_method, order_of
from gcore.training.fsdp import FsdpBackend
from gcore.training.logprob_model import to_tensors
from gcore.training.objective import StepData
from gcore.training.rank import TrainerRank
from gcore.training.varlen import Spans, attend_row
from gcore.types import MicroBatch, MiniBatch, Sample, TrainBatch, UserError
from tests.e2e.helpers import RECIPE
from tests.ranks import finish_ranks, free_address, start_ranks
from tests.unit.test_training import CPU, config_of, network_of, samples_of

LOSSES = {
    **{
        f"{loss} {aggregation}": {"policy_loss": loss, "loss_aggregation": aggregation, "kl_coef": 0.1}
        for loss in ("ppo", "gspo", "cispo")
        for aggregation in ("token_mean", "sequence_mean", "fixed_length")
    },
    "entropy, importance": {
        "entropy_coef": 0.5,
        "importance": {"level": "sequence"},
        "kl_coef": 0.1,
        "kl_estimator": "k2",
    },
    "warm_start": None,
}


class World(NamedTuple):
    """Four ranks, micro-batches of three sizes: World(4, shard=2, tensor=1, contexts=(4, 2, 1), heads=4, kv_heads=2)"""

    size: int
    shard: int
    tensor: int
    contexts: tuple[int, ...]  # of the micro-batches, in order
    heads: int
    kv_heads: int
    attention: str = "auto"
    lora: bool = False
    checkpointing: bool = False
    compiled: bool = False

    @property
    def model(self) -> World:
        """The same model on one rank."""
        return World(1, 1, 1, (1,), self.heads, self.kv_heads, lora=self.lora)

    @property
    def losses(self) -> list[str]:
        """With tensor parallelism two are enough: it changes the network, and not what follows."""
        return list(LOSSES) if self.tensor == 1 else ["gspo sequence_mean", "warm_start"]

    @property
    def config(self) -> Config:
        build = {**RECIPE["model"]["build"], "heads": self.heads, "kv_heads": self.kv_heads, "hidden_size": 48}
        lora = {"lora": {"rank": 4}} if self.lora else {}
        training = {"context_attention": self.attention, "compile": self.compiled}
        training["activation_checkpointing"] = self.checkpointing
        algorithm = {"adv_estimator": "reinforce_pp", "kl_coef": 0.1, "kl_in": "reward"}
        return config_of(model={"build": {**build, "max_length": 64}, **lora}, training=training, algorithm=algorithm)


WORLDS = [
    World(4, 4, 1, (4, 4, 2, 1), 4, 1, "ulysses"),  # one key head for four ranks
    World(4, 2, 1, (2, 4, 2, 1), 4, 2, "ring", checkpointing=True),
    World(4, 2, 2, (2, 2, 1), 4, 2),
]
MORE = [
    World(2, 2, 1, (2, 2, 1), 4, 2, "ulysses"),
    World(2, 1, 1, (2,), 3, 1),  # ring, because two ranks do not divide three heads
    World(4, 1, 1, (2, 2, 4), 6, 3, lora=True),  # Ulysses with repeated key heads, then ring
    World(4, 2, 2, (2,), 4, 2, "ring"),
    World(2, 2, 1, (2, 2, 1), 4, 2, "ring", checkpointing=True, compiled=True),
]
TOLERANCE = 1e-5


def samples() -> list[Sample]:
    """Lengths from 3 to 17, and one of 50. Some steps have a sampling mask and a temperature."""
    found = samples_of(7, prompts=4)
    (long,) = samples_of(8, prompts=1, siblings=1)
    content = dataclasses.replace(long.content, tokens_P=np.resize(long.content.tokens_P, 50 - long.num_steps))
    found.append(dataclasses.replace(long, prompt_id=9, content=content))
    for i in range(0, len(found), 2):
        steps = found[i].content.tokens_S
        counts = np.where(np.arange(len(steps)) % 3 == 0, 2, 0).astype(np.int32)
        ids = np.stack([steps, (steps + 1) % 16], 1)[counts > 0].flatten().astype(np.int32)
        content = dataclasses.replace(found[i].content, sampling_mask=SamplingMask(ids, counts))
        found[i] = dataclasses.replace(found[i], content=content, temperature=0.7)
    return found


def mini_batch(world: World, data_rank: int) -> MiniBatch:
    """Of one data-parallel rank: samples are dealt to the positions, and there to the groups, in turn. If there are
    several positions, the first has only the long sample: one group has it, other groups have padding."""
    all_samples = samples()
    micros, later = [], len(world.contexts) - 1
    for position, context in enumerate(world.contexts):
        groups = world.size // world.tensor // context
        here = all_samples[-1:] if position == 0 else all_samples[position - 1 : -1 : later]
        dealt = (here if later else all_samples)[data_rank // context :: groups]
        rows = (tuple(s.key for s in dealt),) if dealt else ()
        width = -(-sum(s.content.size for s in dealt) // 8) * 8
        micros.append(MicroBatch(rows, max(width, 8), context))
    return MiniBatch(tuple(micros), sum(int(s.mask_S.sum()) for s in all_samples), len(all_samples))


def noise(sample: Sample, seed: int) -> torch.Tensor:
    rng = np.random.default_rng([seed, sample.prompt_id, sample.sibling])
    return torch.from_numpy(rng.normal(0, 0.2, sample.num_steps).astype(np.float32))


def gradients_of(backend: FsdpBackend, run: Callable[[], Any]) -> tuple[dict[str, Any], Any]:
    """What reaches the optimizer."""
    found: dict[str, Any] = {}

    def look(lr: float, network: str = "policy") -> float:
        for name, parameter in backend.networks["policy"].model.network.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.full_tensor().tolist()
                parameter.grad = None
        return 1.0

    backend.networks["policy"].optimizer.step = look
    result = run()
    return found, result


def compute(world: World, rank: int) -> dict[str, Any]:
    config, data_rank = world.config, rank // world.tensor
    policy = NewNetwork(lambda: network_of(config))
    make = lambda: FsdpBackend(config, {"policy": policy}, CPU, torch.float32, world.shard, world.tensor)  # noqa: E731
    trainer = TrainerRank(config, make, rank, 1, Tracer(None, f"trainer-{rank}"))
    backend = trainer.backend
    asyncio.run(trainer.end_warm_start())
    mini = mini_batch(world, data_rank)
    keys = {key for micro in mini.micro_batches for row in micro.rows for key in row}
    mine = [s for s in samples() if s.key in keys]
    data = StepData({s.key: s for s in mine})
    passes = {name: backend.outputs(name, mini.micro_batches, data) for name in ("policy", "reference")}
    data.columns["advantages"] = {s.key: torch.full((s.num_steps,), s.reward) for s in mine}
    data.columns["old_logprobs"] = {s.key: passes["policy"][s.key] + noise(s, 1) for s in mine}
    data.columns["ref_logprobs"] = {s.key: passes["reference"][s.key] + noise(s, 2) for s in mine}
    result: dict[str, Any] = {"losses": {}}
    for name in world.losses:
        section = LOSSES[name]
        loss = objective.demonstrations(mini)
        if section is not None:
            loss = objective.policy(config_of(algorithm=section).algorithm, mini, 8)
        found, metrics = gradients_of(
            backend, lambda loss=loss: (backend.forward_backward(mini.micro_batches, data, loss), backend.step(0.0))[0]
        )
        result["losses"][name] = {
            "gradients": found,
            "metrics": {name: dataclasses.astuple(metric) for name, metric in metrics.items()},
        }
    result["logprobs"] = {name: named(values) for name, values in passes.items()}
    result["rank"] = whole_step(trainer, mini, mine)
    return result


def whole_step(trainer: TrainerRank, mini: MiniBatch, mine: list[Sample]) -> dict[str, Any]:
    """KL in the reward and whitened advantages, through the calls of a trainer rank."""
    batch = TrainBatch(1, (mini,), advantages={s.key: s.reward for s in mine})

    async def run() -> Any:
        await trainer.push(0, mine)
        kl = await trainer.compute_logprobs(batch)
        return kl, await trainer.update(batch)

    found, (kl, stats) = gradients_of(trainer.backend, lambda: asyncio.run(run()))
    metrics = {name: dataclasses.astuple(metric) for name, metric in stats.metrics.items()}
    return {"gradients": found, "metrics": metrics, "kl": {str(key): value for key, value in kl.items()}}


def named(values: dict[Any, torch.Tensor]) -> dict[str, list[float]]:
    return {str(key): value.tolist() for key, value in values.items() if key != (-1, -1)}  # without padding


# ---- attention alone, in float64

LENGTHS = [5, 32, 8, 1, 17]
HEADS = [(4, 4), (4, 1), (8, 2), (12, 6)]


class Counter:
    """Bytes that this rank sends to others, by collective."""

    def __init__(self) -> None:
        self.sent: dict[str, int] = {"all_to_all": 0, "ring": 0}

    def __enter__(self) -> dict[str, int]:
        self._plain = dist.all_to_all_single, dist.batch_isend_irecv

        def all_to_all(received: torch.Tensor, sent: torch.Tensor, group: Any) -> None:
            size = dist.get_world_size(group)
            self.sent["all_to_all"] += sent.nbytes * (size - 1) // size  # its own part stays
            self._plain[0](received, sent, group=group)

        def pass_on(ops: list[dist.P2POp]) -> Any:
            self.sent["ring"] += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
            return self._plain[1](ops)

        dist.all_to_all_single, dist.batch_isend_irecv = all_to_all, pass_on
        return self.sent

    def __exit__(self, *error: object) -> None:
        dist.all_to_all_single, dist.batch_isend_irecv = self._plain


def attention_alone(
    groups: ContextGroups, context: int, method: Any, heads: tuple[int, int], window: int | None
) -> dict[str, Any]:
    """Largest differences to attention over the whole row on one rank, relative to the largest value."""
    ranks, multiple = groups.of(context), 2 * context
    lengths = [-(-n // multiple) * multiple for n in LENGTHS]
    starts = np.cumsum([0, *lengths]).tolist()
    order = order_of(starts, context, method)
    rng = torch.Generator().manual_seed(len(starts))
    row = [
        torch.randn(starts[-1], n, 8, dtype=torch.float64, generator=rng).requires_grad_()
        for n in (heads[0], heads[1], heads[1])
    ]
    weight = torch.randn(starts[-1], heads[0], 8, dtype=torch.float64, generator=rng)
    spans = Spans(torch.tensor(starts, dtype=torch.int32), max(lengths))
    expected = attend_row(*row, spans, 0.3, window)
    expected_grads = torch.autograd.grad((expected * weight).sum(), row)
    own = [tensor.detach()[order[ranks.position]].requires_grad_() for tensor in row]
    nothing = torch.zeros(0, dtype=torch.int64)
    sharing = Sharing(ranks, method, spans, nothing, nothing, 0)
    with Counter() as forward:
        ulysses_or_ring = {"ulysses": partial(attention.attend_by_heads, window=window), "ring": ring.attend}[method]
        found = ulysses_or_ring(*own, sharing, scale=0.3)
    with Counter() as backward:
        grads = torch.autograd.grad((found * weight[order[ranks.position]]).sum(), own)
    pairs = zip([found, *grads], [expected, *expected_grads], strict=True)
    with torch.no_grad():
        differences = [float((a - b[order[ranks.position]]).abs().max() / b.abs().max()) for a, b in pairs]
    return {"differences": differences, "forward": forward, "backward": backward, "tokens": starts[-1]}


def attention_cases() -> Iterator[tuple[int, str, tuple[int, int], int | None]]:
    for context in (2, 4):
        for heads in [*HEADS, (3, 1)]:
            for method in ("ulysses", "ring"):
                if method == "ring" or heads[0] % context == 0:
                    yield context, method, heads, None
        yield context, "ulysses", (4, 2), 6


# ---- processes


def member(rank: int, size: int, address: str, folder: str, worlds: list[World]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    join(Rendezvous(rank, size, address), "gloo", timeout_s=120)
    if size == 4:
        groups = ContextGroups(size, 1)
        alone = [attention_alone(groups, *case) for case in attention_cases()]
        (Path(folder) / f"attention-{rank}.json").write_text(json.dumps(alone))
    for world in worlds:
        (Path(folder) / f"{name_of(world)}-{rank}.json").write_text(json.dumps(compute(world, rank)))


def name_of(world: World) -> str:
    return "_".join(str(value).replace(" ", "") for value in world)


def start(folder: Path, worlds: list[World]) -> None:
    for size in sorted({world.size for world in worlds}):
        given = [world for world in worlds if world.size == size]
        finish_ranks(start_ranks(size, member, size, free_address(), str(folder), given))


@pytest.fixture(scope="module", autouse=True)
def one_process() -> None:
    join(Rendezvous(0, 1, None), "gloo")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of all worlds."""
    folder = tmp_path_factory.mktemp("worlds")
    start(folder, WORLDS)
    return folder


EXPECTED: dict[World, dict[str, Any]] = {}


def expected_of(world: World) -> dict[str, Any]:
    if world.model not in EXPECTED:
        EXPECTED[world.model] = compute(world.model, 0)
    return EXPECTED[world.model]


def check(world: World, folder: Path) -> None:
    ranks = [json.loads((folder / f"{name_of(world)}-{rank}.json").read_text()) for rank in range(world.size)]
    expected = expected_of(world)
    for name in ("policy", "reference"):
        assert {key for rank in ranks for key in rank["logprobs"][name]} == expected["logprobs"][name].keys()
        for key, value in [pair for rank in ranks for pair in rank["logprobs"][name].items()]:
            assert np.allclose(value, expected["logprobs"][name][key], atol=TOLERANCE, rtol=0), (name, key)
    for name, wanted in [*((name, expected["losses"][name]) for name in world.losses), ("rank", expected["rank"])]:
        found = [rank["rank"] if name == "rank" else rank["losses"][name] for rank in ranks]
        same_gradients(found[0]["gradients"], wanted["gradients"], name)
        assert means([f["metrics"] for f in found], world.tensor) == pytest.approx(
            means([wanted["metrics"]]), abs=TOLERANCE, rel=1e-4
        ), name
    for rank in ranks:
        for key, value in rank["rank"]["kl"].items():
            assert value == pytest.approx(expected["rank"]["kl"][key], abs=TOLERANCE)
    assert {key for rank in ranks for key in rank["rank"]["kl"]} == expected["rank"]["kl"].keys()


def same_gradients(found: dict[str, Any], wanted: dict[str, Any], name: str) -> None:
    assert found.keys() == wanted.keys()
    assert max(np.abs(value).max() for value in wanted.values()) > 1e-2
    for parameter, value in wanted.items():
        assert np.allclose(found[parameter], value, atol=TOLERANCE, rtol=1e-4), (name, parameter)


def means(ranks: list[dict[str, Any]], tensor: int = 1) -> dict[str, Any]:
    """Values and weights of all metrics. Ranks of a tensor group count the same samples."""
    total = add_metrics(*({name: Metric(*values) for name, values in rank.items()} for rank in ranks))
    weights = {f"{name} weight": m.weight / tensor for name, m in total.items() if m.reducer == "mean"}
    return {**{name: metric.value for name, metric in total.items()}, **weights}


@pytest.mark.parametrize("world", WORLDS, ids=name_of)
def test_ranks_that_share_sequences_compute_as_one(results: Path, world: World):
    check(world, results)


@pytest.fixture(scope="module")
def more_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("more")
    start(folder, MORE)
    return folder


@pytest.mark.release
@pytest.mark.parametrize("world", MORE, ids=name_of)
def test_more_worlds(more_results: Path, world: World):
    check(world, more_results)


def test_attention_alone_is_exact_and_sends_what_the_formula_says(results: Path):
    for rank in range(4):
        found = json.loads((results / f"attention-{rank}.json").read_text())
        for (k, method, (heads, kv_heads), _), case in zip(attention_cases(), found, strict=True):
            assert max(case["differences"]) < 1e-12, (k, method, heads, kv_heads)
            part = case["tokens"] // k * 8 * 8  # bytes of one head of a rank's tokens: size 8, float64
            repeated = np.lcm(kv_heads, k)
            exchanged = {"all_to_all": 2 * (heads + repeated) * part * (k - 1) // k, "ring": 0}
            passed = {"all_to_all": 0, "ring": 2 * kv_heads * part * (k - 1)}
            assert case["forward"] == (exchanged if method == "ulysses" else passed)
            passed_back = {"all_to_all": 0, "ring": 2 * passed["ring"]}
            assert case["backward"] == (exchanged if method == "ulysses" else passed_back)


# ---- one process


def test_calls_of_the_kernel(monkeypatch):
    """The kernel needs a GPU. Here its calls are checked against its declaration, with tensors that have no memory."""
    monkeypatch.setattr(varlen, "_has_kernel", lambda query: True)
    queries, keys = (Spans(torch.empty(3, dtype=torch.int32, device="meta"), longest) for longest in (64, 32))
    query = torch.empty(20, 4, 64, dtype=torch.bfloat16, device="meta")
    key, value = torch.empty(2, 10, 2, 64, dtype=torch.bfloat16, device="meta").unbind()
    row = torch.empty(2, 20, 2, 64, dtype=torch.bfloat16, device="meta")
    assert attend_row(query, *row, queries, 0.1, window=8).shape == query.shape
    for causal in (False, True):
        output, lse = varlen.attend_block(query, key, value, queries, keys, causal, 0.1)
        assert output.shape == query.shape and lse.shape == (4, 20) and lse.dtype == torch.float32
        given = (query, query, key, value, output, lse, queries, keys, causal, 0.1)
        gradients = varlen.attend_block_backward(*given)
        assert [g.shape for g in gradients] == [query.shape, key.shape, value.shape]


def test_how_a_row_is_split():
    assert order_of([0, 4, 8], 2, "ulysses").tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert order_of([0, 8, 12], 2, "ring").tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


def test_samples_of_a_shared_row_are_padded():
    found = {s.key: s for s in samples_of(prompts=1)}
    packed = to_tensors(MicroBatch((tuple(found),), 40), found, CPU, varlen=True, multiple=8)
    lengths = [-(-s.content.size // 8) * 8 for s in found.values()]
    assert packed.starts.tolist() == np.cumsum([0, *lengths]).tolist()
    for i, sample in enumerate(found.values()):
        first = int(packed.starts[i])
        assert packed.tokens_RW[0, first : first + sample.content.size].tolist() == sample.content.tokens_T.tolist()
        assert packed.select_S[packed.sample_S == i][-1] == first + sample.content.size - 2


def test_which_attention_ranks_use():
    config = network_of(config_of(model={"build": {**RECIPE["model"]["build"], "heads": 4, "kv_heads": 2}})).config
    assert choose_method(config, 4, 1, "auto") == "ulysses"
    assert choose_method(config, 8, 1, "auto") == choose_method(config, 4, 2, "auto") == "ring"
    assert choose_method(config, 2, 1, "ring") == "ring"
    with pytest.raises(UserError, match="context_attention=ulysses: 8 ranks must divide the 4 heads"):
        choose_method(config, 8, 1, "ulysses")
    config.use_sliding_window, config.sliding_window, config.layer_types = True, 8, ["sliding_attention"] * 2
    assert choose_method(config, 4, 1, "auto") == "ulysses"
    with pytest.raises(UserError, match=r"sliding window \(8 tokens\), which ring attention does not support"):
        choose_method(config, 8, 1, "auto")
    with pytest.raises(UserError, match="attention sinks or capped scores"):
        choose_method(GptOssConfig(num_hidden_layers=2), 4, 1, "auto")


def test_ranks_that_cannot_share_are_refused_at_the_start():
    config = World(1, 1, 1, (1,), 3, 1, "ulysses").config
    with pytest.raises(UserError, match="2 ranks must divide the 3 heads"):
        FsdpBackend(config, {"policy": NewNetwork(lambda: network_of(config))}, CPU, torch.float32, context=4)
    FsdpBackend(config, {"policy": NewNetwork(lambda: network_of(config))}, CPU, torch.float32, context=1)
