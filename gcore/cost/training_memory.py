"""Memory of one trainer rank, by phase and part, in bytes; and the choice of checkpointing and off-load that fits.

    TrainingRank ──training_memory──> Memory: GPU and host, phase -> part -> bytes
    TrainingRank, Engines, GPU ──choose──> Choice: the rank with checkpointing and off-load decided, peaks, reasons

    phase           on the GPU, beside what engines hold there
    start           weights, KL reference, and the first weight update: engines are awake
    rollout         what `offload` leaves: engines generate
    logprobs        only with a KL reference: its forward pass
    critic backward, critic step    only with a critic: as below, of the critic instead of the policy
    backward        gradients, weights in the compute dtype, activations; moments only without off-load
    optimizer step  weights, gradients, moments; of off-loaded moments a part at a time
    weight update   weights, and buckets of whole tensors on their way to the engines

Pure arithmetic over the model's shape; docs/planner.md has the formulas as a table and compares them with measurements.
Assumed: gradients are scattered after every micro-batch if weights are sharded, and accumulated whole if they are not;
tensor parallelism divides the matrices of the layers, and neither the embedding nor the head; a trainer returns cached
memory to the GPU before engines wake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from gcore.cost.shapes import Shape

Offload = Literal["none", "optimizer", "all"]
OFFLOADS: tuple[Offload, ...] = get_args(Offload)  # the least first
Phase = Literal[
    "start", "rollout", "logprobs", "critic backward", "critic step", "backward", "optimizer step", "weight update"
]
# In the order of tables. "engines": everything on the GPU that is not the trainer's.
PARTS = (
    *("weights", "gradients", "moments", "copies", "reference", "critic", "critic moments"),
    *("activations", "work", "buckets", "engines"),
)
PART_TITLES = {"copies": "bf16 copy", "work": "temporary"}  # in tables, where the name says too little
Parts = Mapping[str, float]

LOGITS_AT_ONCE = 1 << 27  # as in training/logprob_model.py; compiled, a chunk has four times as many
LAYERS_PER_GROUP = 4  # as in training/fsdp.py: layers that are cast together if weights are not sharded
TOKENS_AT_ONCE, MOST_AT_ONCE = 1 << 16, 4  # as there: passes without gradients join micro-batches
BUCKET_BYTES = 2.0**30  # as in weights/bucket.py
PART_BYTES, SLOTS = 2.0**30, 3  # as in training/optimizer.py: off-loaded moments that are on the GPU at a time
GATHERED_LAYERS = 2  # of a sharded network: the layer in use, and the next one
COMFORTABLE = 0.9  # of a GPU; the rest is for CUDA contexts and fragmentation. Above it: a warning
GB = 1e9


@dataclass(frozen=True)
class TrainingRank:
    """What determines the memory of a rank. TrainingRank(SHAPES["7B"], shard=8, checkpointing=True, offload="none")"""

    shape: Shape
    shard: int = 1  # ranks that share one copy of the weights
    tensor_parallel: int = 1
    max_tokens: int = 16384  # per micro-batch
    checkpointing: bool = False
    kl: bool = False  # with a KL reference
    adapters: int = 0  # trained parameters of adapters on frozen weights; 0: all weights are trained
    offload: Offload = "none"
    keep: float = 0.0  # bytes of off-loaded moments that stay on the GPU
    cpu: bool = False
    float32: bool = False  # forward and backward in float32 on a GPU; on a CPU they always are
    compiled: bool = True
    micro_batches: int = 2  # per update: with one, there are no gradients until its backward pass
    critic: Shape | None = None  # a second trained network, with one output

    @property
    def own_parameters(self) -> float:
        """Parameters in this rank's shard."""
        layers = self.shape.layers * self.shape.layer_parameters / self.tensor_parallel
        return (layers + self.shape.tables + self.shape.hidden) / self.shard

    @property
    def trained_parameters(self) -> float:
        """Parameters in this rank's shard that have gradients and moments."""
        return self.adapters / self.shard / self.tensor_parallel if self.adapters else self.own_parameters

    @property
    def width(self) -> int:
        """Bytes of the compute dtype."""
        return 4 if self.cpu or self.float32 else 2


@dataclass(frozen=True)
class Memory:
    """Peaks of one rank: phase -> part -> bytes. Memory(gpu={"start": {"weights": 6.2e9}, ...}, host={...})"""

    gpu: Mapping[Phase, Parts]
    host: Mapping[Phase, Parts]


def training_memory(rank: TrainingRank) -> Memory:
    state = state_bytes(rank.own_parameters, rank.trained_parameters, rank.width, rank.kl, bool(rank.adapters))
    critic = _critic_rank(rank)
    if critic is not None:
        critic_state = state_bytes(critic.own_parameters, critic.own_parameters, critic.width, False, False)
        state |= {"critic": critic_state["weights"], "critic moments": critic_state["moments"]}
    fixed: dict[str, float] = {name: state[name] for name in ("weights", "reference", "critic") if name in state}
    idle: dict[str, float] = fixed | {name: state[name] for name in ("moments", "critic moments") if name in state}
    buckets = {"buckets": _buckets(rank)}
    phases: dict[Phase, dict[str, float]] = {
        "start": fixed | buckets,
        "rollout": idle,
        "logprobs": idle | {"copies": _copies(rank), "work": _pass_work(rank)},
        "backward": idle
        | {
            "gradients": state["gradients"] if rank.micro_batches > 1 else 0.0,
            "copies": _copies(rank),
            "activations": _activations(rank),
            "work": _backward_work(rank),
        },
        "optimizer step": idle | {"gradients": state["gradients"], "moments": _moments_at_once(rank, state["moments"])},
        "weight update": idle | buckets,
    }
    if critic is not None:
        phases["critic backward"], phases["critic step"] = _critic_phases(critic, critic_state, idle)
    if not rank.kl or rank.adapters:  # the reference of adapters is a copy of them, with the policy's weights
        del phases["logprobs"]
    if rank.cpu:
        return Memory({phase: {} for phase in phases}, {phase: _some(parts) for phase, parts in phases.items()})
    gpu, host, kept = dict[Phase, Parts](), dict[Phase, Parts](), {"moments": min(rank.keep, state["moments"])}
    for phase, parts in phases.items():
        moved = off_gpu(rank.offload, phase)
        gpu[phase] = _some({n: size if n not in moved else kept.get(n, 0.0) for n, size in parts.items()})
        away = off_gpu(rank.offload) if phase != "start" else ()  # pinned host memory is kept for the next
        host[phase] = _some({name: state[name] - kept.get(name, 0.0) for name in away if name in state})
    return Memory(gpu, host)


def adapter_parameters(shape: Shape, rank: int, targets: Sequence[str] = ()) -> int:
    """Parameters of low-rank adapters. `targets`: names as in model.lora.targets; none: all matrices of a layer."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sides = {
        "q_proj": shape.hidden + queries,
        "k_proj": shape.hidden + keys,
        "v_proj": shape.hidden + keys,
        "o_proj": queries + shape.hidden,
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), shape.hidden + shape.intermediate),
    }
    return shape.layers * rank * sum(size for name, size in sides.items() if not targets or name in targets)


def _critic_rank(rank: TrainingRank) -> TrainingRank | None:
    """The critic of this rank as a network of its own: all of its weights are trained, and it has no vocabulary."""
    if rank.critic is None:
        return None
    return replace(rank, shape=replace(rank.critic, tied=True), critic=None, adapters=0, kl=False, keep=0.0)


def _critic_phases(critic: TrainingRank, state: Parts, idle: Parts) -> tuple[dict[str, float], dict[str, float]]:
    """Its backward pass and its optimizer step, beside what the policy keeps. `state`: of the critic."""
    layer = _layer_work(critic) + (4 + critic.width) * critic.shape.layer_parameters / critic.tensor_parallel
    if critic.checkpointing:
        layer += critic.max_tokens * kept_per_token(replace(critic, checkpointing=False))
    backward = {
        "gradients": state["gradients"] if critic.micro_batches > 1 else 0.0,
        "copies": _copies(critic),
        "activations": _activations(critic),
        "work": layer,
    }
    step = {"gradients": state["gradients"], "critic moments": _moments_at_once(critic, state["moments"])}
    return {**idle, **backward}, {**idle, **step}


# ---- parts --------------------------------------------------------------------------------------------------------


def state_bytes(own: float, trained: float, width: int, kl: bool, adapters: bool) -> dict[str, float]:
    """What is kept from step to step, and the gradients. `own`, `trained`: parameters in a rank's shard."""
    weights = width * own + 4 * trained if adapters else 4 * own
    reference = (4 * trained if adapters else width * own) if kl else 0.0
    return {"weights": weights, "gradients": 4 * trained, "moments": 8 * trained, "reference": reference}


def off_gpu(offload: Offload, phase: Phase = "rollout") -> tuple[str, ...]:
    """The parts that are in host memory during a phase."""
    moments = ("moments", "critic moments")
    gone = {"none": (), "optimizer": moments, "all": ("weights", "reference", "critic", *moments)}[offload]
    back: dict[Phase, tuple[str, ...]] = {
        "start": ("weights", "reference", "critic"),
        "critic backward": ("weights", "critic"),
        "critic step": ("weights", "critic", "critic moments"),
        "logprobs": ("weights", "reference"),
        "backward": ("weights",),
        "optimizer step": ("weights", "moments"),
        "weight update": ("weights",),
    }
    return tuple(part for part in gone if part not in back.get(phase, ()))


def _moments_at_once(rank: TrainingRank, moments: float) -> float:
    """On the GPU during an optimizer step: some parts of off-loaded moments, at least those of one parameter."""
    if rank.offload == "none" or rank.cpu:
        return moments
    largest = 0.0 if rank.adapters else 8.0 * rank.shape.table_parameters / rank.shard
    return min(moments, rank.keep + (SLOTS - 1) * PART_BYTES + max(PART_BYTES, largest))


def _copies(rank: TrainingRank) -> float:
    """Weights in the compute dtype: all of them if they are not sharded, else what is gathered at a time."""
    shape = rank.shape
    if rank.shard == 1:
        return 0.0 if rank.cpu else rank.width * rank.own_parameters
    return rank.width * (GATHERED_LAYERS * shape.layer_parameters / rank.tensor_parallel + shape.tables)


def kept_per_token(rank: TrainingRank) -> float:
    """Bytes per token that one layer keeps for the backward pass.

    With h hidden, q queries, k keys, i intermediate: compiled layers keep the residual stream before both blocks and
    both norms' outputs (4 h), queries, keys, values, attention's output (2 q + 2 k), gate, up and their product (3 i).
    Eager layers also keep the inputs of the norms in float32 and the output of the activation function.
    """
    shape, tp = rank.shape, rank.tensor_parallel
    if rank.checkpointing:
        return rank.width * shape.hidden
    active, queries = shape.intermediate * max(1, shape.active_experts), shape.heads * shape.head_dim
    keys = shape.head_dim * max(1.0, shape.kv_heads / tp)  # more GPUs than key heads hold copies
    statistics = 4 * shape.heads / tp + 8  # float32: of attention, and of both norms
    if rank.width == 4:  # norms need no copy in float32; counted as eager
        return 4 * (6 * shape.hidden + 2 * queries / tp + 2 * keys + 4 * active / tp) + statistics
    if not rank.compiled:
        return 16 * shape.hidden + 4 * queries / tp + 4 * keys + 8 * active / tp + statistics
    return 2 * (4 * shape.hidden + 2 * queries / tp + 2 * keys + 3 * active / tp) + statistics


def _activations(rank: TrainingRank) -> float:
    """Of all layers; and after the last one: its output, the norm, the steps that predict and their gradient."""
    ends = (20 if rank.width == 4 else 14) * rank.shape.hidden
    return rank.max_tokens * (rank.shape.layers * kept_per_token(rank) + ends)


def _logits(rank: TrainingRank, copies: int) -> float:
    """A chunk of logits: compiled, `copies` in the compute dtype; eager, four in float32."""
    compiled = rank.compiled and rank.width == 2
    steps = min(rank.max_tokens, (4 if compiled else 1) * max(1, LOGITS_AT_ONCE // rank.shape.vocab))
    return steps * rank.shape.vocab * (copies * rank.width if compiled else 4 * 4)


def _layer_work(rank: TrainingRank, joined: int = 1) -> float:
    """Temporary tensors of one layer: three of the width of the MLP, four of the hidden width. `joined`: micro-batches
    that are computed together."""
    shape = rank.shape
    active = shape.intermediate * max(1, shape.active_experts) / rank.tensor_parallel
    return joined * rank.max_tokens * rank.width * (3 * active + 4 * shape.hidden)


def _backward_work(rank: TrainingRank) -> float:
    """The larger of: the head (logits, their gradient, its own gradient twice), and one layer (recomputed if there is
    checkpointing; gradients before and while they are reduced)."""
    shape = rank.shape
    table = 0 if rank.adapters else shape.table_parameters
    head = _logits(rank, 2) + (4 + rank.width) * table
    layer = _layer_work(rank) + rank.width * table
    if rank.checkpointing:
        layer += rank.max_tokens * kept_per_token(replace(rank, checkpointing=False))
    layers = 1 if rank.shard > 1 or rank.cpu else LAYERS_PER_GROUP
    trained = rank.adapters / shape.layers if rank.adapters else shape.layer_parameters
    reduced = layers * trained / rank.tensor_parallel * (rank.width + 4 + (4 if rank.shard > 1 else 0))
    freed = layers * rank.max_tokens * kept_per_token(rank)  # when the first group is reduced
    return max(head, layer + max(0.0, reduced - freed))


def _pass_work(rank: TrainingRank) -> float:
    """Of a forward pass that keeps nothing."""
    joined = max(1, min(MOST_AT_ONCE, TOKENS_AT_ONCE // rank.max_tokens))
    hidden = joined * rank.max_tokens * rank.width * 2 * rank.shape.hidden
    return max(_logits(rank, 1), _layer_work(rank, joined)) + hidden


def _buckets(rank: TrainingRank) -> float:
    """Tensors of a bucket, their packed copy and the previous one; and a whole float32 tensor if it is gathered."""
    sent = 4.0 * rank.adapters if rank.adapters else rank.width * float(rank.shape.parameters)
    whole = 0.0 if rank.shard * rank.tensor_parallel == 1 or rank.adapters else 4.0 * rank.shape.table_parameters
    return 3 * min(BUCKET_BYTES, sent) + whole


def _some(parts: Parts) -> dict[str, float]:
    return {name: float(parts[name]) for name in PARTS if parts.get(name)}


# ---- does it fit --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engines:
    """Bytes of everything but the trainer on the rank's GPU. Engines(rollout=60e9, training=5.7e9, update=9e9)"""

    rollout: float = 0.0
    training: float = 0.0
    update: float = 0.0  # during the weight update, before engines have their KV cache

    def during(self, phase: Phase) -> float:
        return {"start": self.rollout, "rollout": self.rollout, "weight update": self.update}.get(phase, self.training)


@dataclass(frozen=True)
class Choice:
    """A rank with checkpointing and off-load decided. `reasons`: why, one line for each that is not the cheapest."""

    rank: TrainingRank
    gpu: Mapping[Phase, Parts]  # with the part "engines"
    host: Mapping[Phase, Parts]
    total: float  # of the GPU
    reasons: tuple[str, ...] = ()

    @property
    def worst(self) -> Phase:
        return max(self.gpu, key=lambda phase: sum(self.gpu[phase].values()))

    @property
    def peak(self) -> float:
        return sum(self.gpu[self.worst].values())

    @property
    def host_peak(self) -> float:
        return max(sum(parts.values()) for parts in self.host.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.total

    @property
    def is_tight(self) -> bool:
        return self.peak > COMFORTABLE * self.total


def choose(
    rank: TrainingRank,
    engines: Engines,
    total: float,
    checkpointing: bool | Literal["auto"] = "auto",
    offload: Offload | Literal["auto"] = "auto",
) -> Choice:
    """The least off-load, and with it no checkpointing if possible, that leaves a tenth of the GPU free. If none does:
    the one with the lowest peak, which may be more than there is."""
    if rank.cpu:
        off = replace(rank, checkpointing=checkpointing is True, offload="none")
        return _with_engines(off, Engines(), total)
    found = [
        _with_engines(replace(rank, checkpointing=recompute, offload=moved), engines, total)
        for moved in (OFFLOADS if offload == "auto" else (offload,))
        for recompute in ((False, True) if checkpointing == "auto" else (checkpointing,))
    ]
    chosen = next((each for each in found if not each.is_tight), None) or min(found, key=lambda each: each.peak)
    return replace(chosen, reasons=tuple(_reasons(chosen, found, checkpointing == "auto", offload == "auto")))


def _with_engines(rank: TrainingRank, engines: Engines, total: float) -> Choice:
    memory = training_memory(rank)
    gpu = {phase: _some({**parts, "engines": engines.during(phase)}) for phase, parts in memory.gpu.items()}
    return Choice(rank, gpu, memory.host, total)


def _reasons(chosen: Choice, found: Sequence[Choice], chose_checkpointing: bool, chose_offload: bool) -> list[str]:
    """Compares the choice with the next cheaper one."""
    by_rank = {(each.rank.checkpointing, each.rank.offload): each for each in found}
    checkpointing, offload = chosen.rank.checkpointing, chosen.rank.offload
    reasons = []
    if chose_checkpointing:
        cheaper = by_rank[False, offload]
        text = f"activation_checkpointing={str(checkpointing).lower()}"
        reasons.append(f"{text}: {_because('without it', cheaper) if checkpointing else 'activations fit'}")
    if chose_offload:
        text = f"offload={offload}"
        if offload == "none":
            reasons.append(f"{text}: the trainer's state fits beside the engines")
        else:
            less = OFFLOADS[OFFLOADS.index(offload) - 1]
            cheaper = min((by_rank[key] for key in by_rank if key[1] == less), key=lambda each: each.peak)
            reasons.append(f"{text}: {_because(f'with {less}', cheaper)}")
    return reasons


def _because(condition: str, other: Choice) -> str:
    return f"{condition}, the phase `{other.worst}` needs {other.peak / GB:.0f} of {other.total / GB:.0f} GB"
