"""The roles that the control planes of bench/controllers.py call: emulated engines, judges, trainer ranks, and rewards.

    Host (one process) ── many LabEngine and LabRank, one reward worker; MeteredHandle counts calls and bytes to them

Content travels in one of three ways, and the engine follows the request: `Tokens` inline (the product's own type),
`Pictured` (tokens, and images inline or as files of content/media.py), `Remote` (references to the object store).
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gcore.content.media import ArrayRef, store
from gcore.content.tokens import NO_TOKENS, Tokens, tokens_of
from gcore.cost.replica_speed import ReplicaSpeed
from gcore.emulate.engine import EmulatedEngine, log_normal
from gcore.emulate.trainer import EmulatedTrainer
from gcore.protocols import Handle, UpdateStats
from gcore.types import Completion, Floats, Key, Request, Sample, SampleWork, SamplingParams, TrainBatch

ALPHABET = "0123456789+="
HEAVY = 10
FIRST_TOKEN = 4  # after the special tokens of a built tokenizer


@dataclass(frozen=True, slots=True)
class Workload:
    """One training step. Workload("text", prompts=128, siblings=8, tokens=2048)"""

    name: str
    prompts: int  # groups that are trained on
    siblings: int
    tokens: int  # mean length of a response
    sigma: float = 0.3  # of the log-normal lengths
    images: int = 0  # that the engine makes for each sample
    image_bytes: int = 2**20
    judges: int = 0  # each reads every response, once per turn
    verdict: int = 64  # tokens
    feedback: int = 0  # tokens after the first turn; 0: one turn
    rejected: float = 0.0  # fraction of groups without spread, which dynamic sampling replaces
    slots: int = 64  # sequences that an engine decodes at the same time
    per_sequence_s: float = 0.0  # that each of them adds to a decoding step
    heavy: str = ""  # "one share": the prompts of controller 0 have HEAVY x longer responses; "spread": as many, evenly
    shares: int = 1  # of which one is heavy

    @property
    def samples(self) -> int:
        return self.prompts * self.siblings

    @property
    def most_tokens(self) -> int:
        return 2 * self.tokens

    def max_tokens(self, prompt: int) -> int:
        """Of a prompt's responses. The lengths are proportional to it."""
        turn = 0 if self.heavy == "one share" else prompt // self.shares % self.shares
        return self.most_tokens // HEAVY if self.heavy and prompt % self.shares != turn else self.most_tokens


# ---- content ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pictured:
    """Implements content.base.Content: tokens, and images that the engine made."""

    tokens: Tokens
    made: tuple[np.ndarray | ArrayRef, ...] = ()

    @property
    def num_steps(self) -> int:
        return self.tokens.num_steps

    @property
    def size(self) -> int:
        return self.tokens.size

    @property
    def actions_S(self) -> Any:
        return np.ones(self.num_steps, np.bool_)

    @property
    def work(self) -> SampleWork:
        return SampleWork(self.size)  # without the images: the same layout in all control planes

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + sum(a.nbytes for a in self.made if not isinstance(a, ArrayRef))

    def extended(self, *pieces: Pictured) -> Pictured:
        made = [*self.made, *(image for piece in pieces for image in piece.made)]
        return Pictured(self.tokens.extended(*(piece.tokens for piece in pieces)), tuple(made))

    def end(self, params: SamplingParams) -> Any:
        return self.tokens.end(params)

    def digest(self) -> bytes:
        return self.tokens.digest()


@dataclass(frozen=True, slots=True)
class Piece:
    """Some steps of a sample in the object store (`ref`: a Payload), or a few steps inline."""

    steps: int
    digest: bytes
    ref: Any = None
    inline: Tokens | None = None


@dataclass(frozen=True, slots=True)
class Payload:
    """What an engine leaves in the object store."""

    tokens: Tokens
    logprobs_S: Floats
    images: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True, slots=True)
class Remote:
    """Implements content.base.Content for a controller that sees metadata only. One piece counts as one step: arrays
    over steps (mask, logprobs, versions) then have one entry per piece, and the rank expands them."""

    context: Tokens
    pieces: tuple[Piece, ...] = ()

    @property
    def num_steps(self) -> int:
        return len(self.pieces)

    @property
    def size(self) -> int:
        return self.context.size + sum(piece.steps for piece in self.pieces)

    @property
    def actions_S(self) -> Any:
        return np.ones(self.num_steps, np.bool_)

    @property
    def work(self) -> SampleWork:
        return SampleWork(self.size)

    @property
    def nbytes(self) -> int:
        return self.context.nbytes

    def extended(self, *others: Remote) -> Remote:
        return Remote(self.context, (*self.pieces, *(piece for other in others for piece in other.pieces)))

    def end(self, params: SamplingParams) -> None:
        return None

    def digest(self) -> bytes:
        return hashlib.blake2b(b"".join(piece.digest for piece in self.pieces), digest_size=16).digest()


def in_ray() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def put(value: Any) -> Any:
    """A reference that can be awaited many times. Without Ray: a finished future of this event loop."""
    if in_ray():
        import ray

        return ray.put(value)
    future = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future


async def payloads(content: Remote) -> list[Payload]:
    refs = [piece.ref for piece in content.pieces if piece.ref is not None]
    found = iter(await asyncio.gather(*refs))
    return [Payload(p.inline, np.zeros(p.steps, np.float32)) if p.inline else next(found) for p in content.pieces]


async def as_tokens(content: Any) -> Tokens:
    """What the emulated engine reads of any content."""
    if isinstance(content, Remote):
        return content.context.extended(*(payload.tokens for payload in await payloads(content)))
    return content.tokens if isinstance(content, Pictured) else content


# ---- emulated roles --------------------------------------------------------------------------------------------------


class LabEngine:
    """The product's emulated engine, which also makes images and answers in the form of its request."""

    def __init__(self, workload: Workload, step_s: float, is_judge: bool) -> None:
        self._workload, self._is_judge = workload, is_judge
        self.media: str | None = None  # folder for images by reference; None: images inline
        tokens, sigma = (workload.verdict, 0.1) if is_judge else (workload.tokens, workload.sigma)
        cost = (step_s, workload.per_sequence_s, 0.0)
        speed = ReplicaSpeed(*cost, max_concurrent=workload.slots, sleep_s=0.0, wake_s=0.0, weights_s=0.0)
        of_most = log_normal(tokens / np.exp(sigma**2 / 2), sigma)
        self._engine = EmulatedEngine(
            speed,
            lengths=lambda request: max(1, of_most(request) * request.params.max_tokens // workload.most_tokens),
            tokens=range(FIRST_TOKEN, FIRST_TOKEN + len(ALPHABET)),
        )
        self.stats, self.abort = self._engine.stats, self._engine.abort

    async def generate(self, requests: Sequence[Request], ticket: str = "") -> list[Completion]:
        whole = [replace(r, content=await as_tokens(r.content)) for r in requests]
        if self._is_judge:  # it reads the whole conversation as its prompt
            whole = [replace(r, content=Tokens(tokens_of(r.content).tokens_T)) for r in whole]
        completions = await self._engine.generate(whole, ticket)
        if self._is_judge:  # a verdict is small: every control plane gets it inline
            return completions
        return [self._packed(r, c) for r, c in zip(requests, completions, strict=True)]

    def _packed(self, request: Request, completion: Completion) -> Completion:
        tokens = completion.content
        assert isinstance(tokens, Tokens)
        made = [picture(request.noise_key, i, self._workload.image_bytes) for i in range(self._workload.images)]
        match request.content:
            case Remote():
                ref = put(Payload(tokens, completion.logprobs_S, tuple(made)))
                piece = Piece(tokens.num_steps, tokens.digest(), ref)
                one = completion.versions_S[:1]
                return Completion(Remote(Tokens(NO_TOKENS), (piece,)), np.zeros(1, np.float32), one, completion.finish)
            case Pictured():
                images = made if self.media is None else [store(image, Path(self.media)) for image in made]
                return replace(completion, content=Pictured(tokens, tuple(images)))
            case _:
                return completion


def picture(key: int, number: int, size: int) -> np.ndarray:
    """An image that differs from those of all other keys and numbers."""
    image = np.zeros(size, np.uint8)
    image[:16] = np.frombuffer(np.array([key % 2**63, number], np.int64).tobytes(), np.uint8)
    return image


class LabRank(EmulatedTrainer):
    """The product's emulated rank. It resolves references when samples arrive, and can hash what it received."""

    def __init__(self, rank: int) -> None:
        super().__init__(0.0, rank=rank)
        self.hashing = False
        self.digests: dict[Key, bytes] = {}
        self.started = 0.0  # time.monotonic() of the last update, when all samples were here

    async def push(self, source: int, samples: Sequence[Sample]) -> None:
        await super().push(source, [await resolved(sample) for sample in samples])

    async def update(self, batch: TrainBatch) -> UpdateStats:
        self.started = time.monotonic()
        if self.hashing:
            self.digests = {sample.key: digest_of(sample) for sample in self._of(batch.keys)}
        return await super().update(batch)

    # The classic controller sends whole columns with every call, as padded arrays.

    async def logprobs(self, columns: Mapping[str, Any]) -> Floats:
        """One column back: what a forward pass would compute."""
        return np.zeros(columns["tokens"].shape, np.float32)

    async def update_columns(self, batch: TrainBatch, columns: Mapping[str, Any]) -> UpdateStats:
        await EmulatedTrainer.push(self, 0, rows_to_samples(columns))
        return await self.update(batch)


async def resolved(sample: Sample) -> Sample:
    """The sample with its payloads instead of references."""
    content = sample.content
    if isinstance(content, Remote):
        found = await payloads(content)
        flags = zip(found, sample.mask_S, strict=True)
        images = tuple(image for payload in found for image in payload.images)
        tokens = content.context.extended(*(payload.tokens for payload in found))
        return replace(
            sample,
            content=Pictured(tokens, images) if images else tokens,
            mask_S=np.concatenate([np.full(len(p.logprobs_S), flag) for p, flag in flags]),
            rollout_logprobs_S=np.concatenate([payload.logprobs_S for payload in found]),
        )
    if isinstance(content, Pictured) and any(isinstance(a, ArrayRef) for a in content.made):
        images = tuple(a.read() if isinstance(a, ArrayRef) else a for a in content.made)
        return replace(sample, content=Pictured(content.tokens, images))
    return sample


def rows_to_samples(columns: Mapping[str, Any]) -> list[Sample]:
    found = []
    for i, (prompt_id, sibling) in enumerate(columns["keys"].tolist()):
        steps = int(columns["steps"][i])
        tokens = Tokens(columns["prompts"][i], columns["tokens"][i, :steps])
        content: Any = Pictured(tokens, tuple(columns["images"][i])) if columns["images"] else tokens
        found.append(
            Sample(
                prompt_id,
                sibling,
                content,
                mask_S=columns["mask"][i, :steps],
                rollout_logprobs_S=columns["logprobs"][i, :steps],
                reward=float(columns["rewards"][i]),
            )
        )
    return found


def digest_of(sample: Sample) -> bytes:
    """Of everything that a rank trains on."""
    content = sample.content
    total = hashlib.blake2b(digest_size=16)
    tokens = content.tokens if isinstance(content, Pictured) else tokens_of(content)
    for array in (tokens.tokens_P, tokens.tokens_S, sample.mask_S, sample.rollout_logprobs_S, [sample.reward]):
        total.update(np.ascontiguousarray(array).tobytes())
    if isinstance(content, Pictured):
        for image in content.made:
            assert isinstance(image, np.ndarray)  # see `resolved`
            total.update(np.ascontiguousarray(image).data)
    return total.digest()


def rule(text: str) -> float:
    """The rule-based reward of all control planes."""
    return text.count("7") / max(1, len(text))


class Host:
    """A process with several roles. Their handles are MeteredHandle. `names`: "engine-3", "judge-0-3", "rank-17"."""

    def __init__(self, names: Sequence[str], workload: Workload, step_s: float, *_: Any) -> None:
        self._roles: dict[str, Any] = {}
        for name in names:
            kind = name.partition("-")[0]
            if kind == "rank":
                self._roles[name] = LabRank(int(name.rpartition("-")[2]))
            elif kind in ("engine", "judge"):
                self._roles[name] = LabEngine(workload, step_s, kind == "judge")
        self._decoder: Any = None

    async def on(self, name: str, method: str, *args: Any) -> Any:
        return await getattr(self._roles[name], method)(*args)

    async def open(self, media: str | None) -> None:
        """Before the first step of a control plane."""
        for role in self._roles.values():
            if isinstance(role, LabEngine):
                role.media = media

    async def ping(self) -> None:
        """For latencies under load."""

    async def score(self, contents: Sequence[Remote]) -> list[float]:
        """Rule-based rewards of responses that the controller has only as references."""
        if self._decoder is None:
            self._decoder = make_decoder()
        tokens = [await as_tokens(content) for content in contents]
        return [rule(text) for text in await self._decoder.texts([t.tokens_S for t in tokens])]

    async def observe(self, hashing: bool) -> dict[str, Any]:
        """What the ranks received in the last step, when they started it, and the CPU seconds of this process."""
        ranks = [role for role in self._roles.values() if isinstance(role, LabRank)]
        found = {key: digest for rank in ranks for key, digest in rank.digests.items()}
        for rank in ranks:
            rank.hashing, rank.digests = hashing, {}
        return {"digests": found, "started": max((r.started for r in ranks), default=0.0), "cpu_s": time.process_time()}


def make_decoder() -> Any:
    from gcore.config.base import Model
    from gcore.content.decoding import Detokenizer
    from gcore.prompts.tokenizer import load_tokenizer

    return Detokenizer(load_tokenizer(Model.model_validate({"build": {"alphabet": ALPHABET, "max_length": 64}})))


# ---- what is counted -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Meter:
    """Calls and bytes of one controller. Bytes are counted only in some steps: counting takes CPU time."""

    counting: bool = False
    calls: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    collectives: int = 0
    by_method: dict[str, list[int]] = field(default_factory=dict)  # calls, bytes out, bytes in

    def sent(self, value: Any, method: str = "") -> None:
        self.calls += 1
        if self.counting:
            size = pickled_bytes(value)
            self.bytes_out += size
            row = self.by_method.setdefault(method, [0, 0, 0])
            row[0], row[1] = row[0] + 1, row[1] + size

    def received(self, value: Any, method: str = "") -> None:
        if self.counting:
            size = pickled_bytes(value)
            self.bytes_in += size
            self.by_method.setdefault(method, [0, 0, 0])[2] += size


class _SizePickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value).__name__ in ("ObjectRef", "Future"):  # Ray sends the id and the address of the owner
            return bytes, (bytes(28 + OWNER_BYTES),)
        return NotImplemented


OWNER_BYTES = 90  # serialized address of the process that owns an object


def pickled_bytes(value: Any) -> int:
    """Bytes of the message. Arrays are counted and not copied."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _SizePickler(file, 5, buffer_callback=buffers.append).dump(value)
    return file.tell() + sum(buffer.raw().nbytes for buffer in buffers)


class MeteredHandle:
    """Implements protocols.Handle for a role in a Host."""

    def __init__(self, name: str, host: Handle, meter: Meter) -> None:
        self.name, self._host, self._meter = name, host, meter

    def submit(self, method: str, *args: Any) -> Any:
        return self._host.submit("on", self.name, method, *args)

    async def call(self, method: str, *args: Any) -> Any:
        self._meter.sent(args, method)
        answer = await self._host.call("on", self.name, method, *args)
        self._meter.received(answer, method)
        return answer


class MeteredGroup:
    """Implements protocols.ControllerGroup: counts the collectives of a controller."""

    def __init__(self, group: Any, meter: Meter) -> None:
        self.rank, self.size, self._group, self._meter = group.rank, group.size, group, meter

    async def all_gather(self, name: str, value: Any) -> list[Any]:
        self._meter.collectives += 1
        if self._meter.counting and self.size > 1:
            self._meter.bytes_out += pickled_bytes(value)
        values: list[Any] = await self._group.all_gather(name, value)
        if self._meter.counting and self.size > 1:
            self._meter.bytes_in += sum(pickled_bytes(v) for r, v in enumerate(values) if r != self.rank)
        return values

    async def reduce(self, name: str, value: Any, merge: Any) -> Any:
        self._meter.collectives += 1
        if self._meter.counting and self.size > 1:
            self._meter.bytes_out += pickled_bytes(value)
        merged = await self._group.reduce(name, value, merge)
        if self._meter.counting and self.size > 1:
            self._meter.bytes_in += pickled_bytes(merged)
        return merged

    async def barrier(self, name: str) -> None:
        await self.reduce(name, None, lambda _, __: None)

    def subgroup(self) -> MeteredGroup:
        return MeteredGroup(self._group.subgroup(), self._meter)


if __name__ == "__main__":  # a part of other benches
    print(__doc__)
