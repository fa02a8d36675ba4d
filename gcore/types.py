"""The values that flow through G-Core: one frozen type per stage.

    Prompt ──generation──> Rollout ──rewarding──> Scored ──preparation──> Sample ──pack──> TrainBatch

An engine receives a Request and returns a Completion; one or more completions make a Rollout. The rollouts of one
prompt are a *group*. They are numbered, and are *siblings* of each other. A rollout whose agent rewrote its history, or
had several conversations, is a *trajectory* of several *segments*: one sibling with one reward, a Sample per segment.

The suffix of an array name is its axis: `_S` are the *steps* (one token or one denoising step: the unit of decision),
`_P` the tokens of the prompt, `_T` the whole sequence (`_P` followed by `_S`). What a step consists of (tokens,
images, ...) is in `content`: see content/base.py.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gcore.content.base import Content

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Pixels = npt.NDArray[np.uint8]  # an image: height x width x 3, red, green, blue
Message = dict[str, Any]
Finish = Literal["stop", "length", "abort"]
Key = tuple[int, int]  # identifies a sample: prompt id, sibling
# What a trainer rank minimizes: the value of the key `objective`, or as `sft` in the warm start, before `policy`.
ObjectiveName = Literal[
    "policy",
    "warm_start",
    "sft",
    "dpo",
    "ipo",
    "hinge",
    "robust_dpo",
    "apo_zero",
    "apo_down",
    "orpo",
    "simpo",
    "kto",
    "reward_model",
]
PARAM_SYNONYMS = {  # names in other libraries -> names here
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop_token_ids": "stop_tokens",
}


class UserError(ValueError):
    """An error that the user can fix. Printed as one line: what, got, expected, and the key to change."""


@contextlib.contextmanager
def writing(place: object, then: str = "") -> Iterator[None]:
    """UserError instead of OSError: no right to write there, or the disk is full. `place`: with its key."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{place}: cannot write to it: {error.strerror or error}{then}") from None


class RewardError(RuntimeError):
    """A reward could not be computed. The group is dropped and counted; it never becomes a zero."""

    reason = "reward_error"  # under which it is counted


class WorkflowError(RuntimeError):
    """The user's workflow raised for one prompt. The group is dropped and counted."""

    reason = "workflow_error"


class SessionLeft(WorkflowError):
    """An agent has sent no request of its session for a long time. The group is dropped and counted."""

    reason = "session_left"


class EnvironmentFailure(WorkflowError):
    """An episode of an environment failed. `cause`: a name in environments/base.py. Its sample begins again, or is
    dropped and counted; it never becomes a zero."""

    reason = "environment_error"

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause
        self.suspect = False  # its process died, with other episodes in it


@dataclass(frozen=True, slots=True)
class Topology:
    """How trainer ranks divide a model: those of a tensor group are neighbours, then come the data-parallel ranks of a
    stage, then the next stage. Topology(ranks=8, tensor=2, pipeline=2): ranks 0, 1, 4 and 5 have the same samples."""

    ranks: int
    tensor: int = 1  # ranks that split each matrix
    pipeline: int = 1  # stages that divide the layers
    virtual: int = 1  # parts of the layers per stage
    expert: int = 1  # data-parallel ranks that divide the experts

    @property
    def data_parallel(self) -> int:
        """Copies of the model that train on different samples."""
        return self.ranks // self.tensor // self.pipeline

    def data_rank(self, rank: int) -> int:
        return rank // self.tensor % self.data_parallel

    def ranks_of(self, data_rank: int) -> list[int]:
        """The ranks that compute the samples of a data-parallel rank together."""
        return [rank for rank in range(self.ranks) if self.data_rank(rank) == data_rank]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt(id=70, row=6, messages=({"role": "user", "content": "27+58="},), content=Tokens(...), columns={...})"""

    id: int  # number in the global prompt order of the run: unique across epochs; also the key of the sampling noise
    row: int  # row of the dataset
    messages: tuple[Message, ...]
    text: str  # after the chat template
    content: Content  # input of the policy's engine: for language models Tokens
    columns: Mapping[str, Any] = field(default_factory=dict)  # the row's other columns, for rewards


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """SamplingParams(max_tokens=8, temperature=1.0)"""

    max_tokens: int  # 0: generate nothing; the completion has the logprobs of the steps that the content has
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    stop_tokens: tuple[int, ...] = ()
    keep_mask: bool = False  # also return the tokens that top-k and top-p allow, with logprobs normalized over them
    keep_experts: bool = False  # also return the experts that each token used, of a mixture of experts

    def after(self, num_steps: int) -> SamplingParams:
        """The parameters for the rest of a request of which `num_steps` steps are done."""
        return replace(self, max_tokens=self.max_tokens - num_steps)

    def override(self, given: Mapping[str, Any], what: str) -> SamplingParams:
        """With the fields of `given` replaced. `what`: the method that a workflow called with them, for the message."""
        names = [field.name for field in fields(self)]
        for name in given:
            if name not in names:
                near = PARAM_SYNONYMS.get(name) or next(iter(difflib.get_close_matches(name, names, 1)), None)
                hint = f"; did you mean {near}?" if near else f"; expected some of {names}"
                raise UserError(f"{what} has no parameter {name!r}{hint} (key: workflow)")
        return replace(self, **given)


@dataclass(frozen=True, slots=True)
class Request:
    """Input of an engine: content to continue. Request(Tokens([1, 6, 11]), params=..., noise_key=2**63 + 5)"""

    content: Content
    params: SamplingParams
    noise_key: int  # 64 bits from (seed, prompt id, sibling): see generation/noise.py
    priority: int = 0  # queues serve lower numbers first, equal ones in order of arrival. Results do not depend on it

    @property
    def position(self) -> int:
        """Number of steps of the sample before this request. Noise depends on the position, so it never repeats."""
        return self.content.num_steps

    def after(self, piece: Completion) -> Request:
        """The rest of this request after `piece` was generated: the same sample, continued at the end of the piece."""
        content, params = self.content.extended(piece.content), self.params.after(piece.content.num_steps)
        return replace(self, content=content, params=params)


@dataclass(frozen=True, slots=True)
class Completion:
    """Output of an engine. Completion(Tokens.steps([12, 9]), logprobs_S=[-.1, -.7], versions_S=[3, 3], "stop")"""

    content: Content  # only the new steps
    logprobs_S: Floats  # as the trainer computes them: temperature applied, before top-k and top-p (or with their mask)
    versions_S: Ints  # version of the policy's weights at each step: they may change while a sample is generated
    finish: Finish

    @property
    def nbytes(self) -> int:
        return self.content.nbytes + self.logprobs_S.nbytes + self.versions_S.nbytes

    def joined(self, later: Completion) -> Completion:
        """This completion followed by the steps of `later`."""
        return Completion(
            self.content.extended(later.content),
            np.concatenate([self.logprobs_S, later.logprobs_S]),
            np.concatenate([self.versions_S, later.versions_S]),
            later.finish,
        )


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished sample of a prompt. Rollout(prompt=Prompt(id=70, ...), sibling=3, content=..., output="85")"""

    prompt: Prompt
    sibling: int
    content: Content  # of the prompt, with all steps
    logprobs_S: Floats
    mask_S: Bools  # True where the policy decided; False for steps of tools or feedback
    output: Any  # what rewards score and people read: for language models the text of the response
    versions_S: Ints
    finish: Finish
    temperature: float = 1.0  # of the sampling; the trainer computes logprobs at the same temperature
    turn: Any = ""  # the output of the last turn alone
    segments: tuple[Rollout, ...] = ()  # of the same trajectory: what its agent said in other conversations
    shared: int = 0  # steps at the beginning that another segment has too, and that are trained there

    @property
    def text(self) -> str:
        if not isinstance(self.output, str):
            raise UserError(f"the output is {type(self.output).__name__}, not text (keys: rewards, workflow)")
        return self.output

    @property
    def num_steps(self) -> int:
        return len(self.mask_S)

    @property
    def trajectory(self) -> tuple[Rollout, ...]:
        """All segments; this one, which rewards score, is the first."""
        return (self, *self.segments)

    @property
    def length(self) -> int:
        """Steps of the trajectory, each counted once."""
        return sum(segment.num_steps - segment.shared for segment in self.trajectory)

    @property
    def version(self) -> int:
        """The oldest policy version among the steps of the trajectory."""
        return min(int(segment.versions_S.min()) for segment in self.trajectory)


@dataclass(frozen=True, slots=True)
class Scored:
    """Scored(rollout=Rollout(...), reward=1.0, parts={"exact": 1.0}, notes={"grader": ["Right. Score: 9"]})"""

    rollout: Rollout
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # answers of judges, for people to read
    baseline: float | None = None  # reward of a greedy response to the prompt, if the estimator needs it (ReMax)
    step_rewards_S: Floats | None = None  # of teachers and of turns, per step: they are added to the advantages
    segment_rewards: Sequence[float] = ()  # of each segment of rollout.trajectory; empty: all have `reward`


@dataclass(frozen=True, slots=True)
class Sample:
    """Input of a trainer rank. Its advantage comes later, in the TrainBatch: the score may need logprobs of the rank.

    Sample(prompt_id=70, sibling=3, content=Tokens(...), mask_S=[True, True], rollout_logprobs_S=[-.1, -.7])
    """

    prompt_id: int
    sibling: int
    content: Content
    mask_S: Bools
    rollout_logprobs_S: Floats
    temperature: float = 1.0
    reward: float | None = None  # by the rewards of the recipe; None for demonstrations
    step_rewards_S: Floats | None = None  # of teachers
    trajectory: int | None = None  # sibling number of the first segment of its trajectory; None: it has no others
    trajectory_actions: int = 0  # of all segments; 0: those of this sample

    @property
    def key(self) -> Key:
        return (self.prompt_id, self.sibling)

    @property
    def num_steps(self) -> int:
        return len(self.mask_S)


@dataclass(frozen=True, slots=True)
class SampleWork:
    """What a trainer rank computes for a content; cost/workload.py prices it. SampleWork(9, media=(("image", 256),))"""

    length: int  # tokens of one pass of the network: the size of the content
    passes: int = 1  # over these tokens: 1 for a sequence; of a denoiser, the steps that are trained
    media: tuple[tuple[str, int], ...] = ()  # that towers encode: the kind of each, and its size, such as pixels
    prefix: tuple[int, bytes] = (0, b"")  # tokens at the beginning that are equal for equal bytes


@dataclass(frozen=True, slots=True)
class SampleMeta:
    """The metadata of a sample, which collectives exchange. SampleMeta(70, sibling=3, work=SampleWork(9), actions=3)"""

    prompt_id: int
    sibling: int
    work: SampleWork
    actions: int  # steps that count in the loss
    digest: bytes = b""  # of the steps, for samples_digest
    steps: int = 0  # all of them: the head of a network predicts each
    trajectory: int | None = None  # as in Sample

    @property
    def key(self) -> tuple[int, int]:
        return (self.prompt_id, self.sibling)

    @property
    def trajectory_key(self) -> Key:
        """Equal for the segments of a trajectory."""
        return (self.prompt_id, self.sibling if self.trajectory is None else self.trajectory)

    @property
    def length(self) -> int:
        return self.work.length


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of packed samples. rows[i] lists the samples of row i in order, by key. A row is `width` tokens wide.

    `context`: number of neighbouring data-parallel ranks that compute this micro-batch together, each a part of every
    sequence. Data-parallel rank d belongs to group d // context; all ranks of a group have the same MicroBatch at the
    same position, and at one position `context` is the same on all ranks.
    """

    rows: tuple[tuple[tuple[int, int], ...], ...]
    width: int
    context: int = 1
    shares: bool = False  # a prefix that neighbours in a row have in common is there once


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One optimizer step of one rank. The denominators are global: the same on every rank, for any number of ranks."""

    micro_batches: tuple[MicroBatch, ...]
    num_actions: int  # loss steps in the whole mini-batch, over all ranks
    num_samples: int  # samples in the whole mini-batch, over all ranks; the segments of a trajectory are one


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The work of one trainer rank in one training step. Samples are named by key; the rank received them before."""

    step: int
    mini_batches: tuple[MiniBatch, ...]
    objective: ObjectiveName = "policy"
    advantages: Mapping[Key, float] = field(default_factory=dict)  # one per sample, from its controller

    @property
    def keys(self) -> list[Key]:
        return [key for mini in self.mini_batches for micro in mini.micro_batches for row in micro.rows for key in row]


class FileEntry(TypedDict):
    """A file of a checkpoint: {"bytes": 120, "sha256": "9f86d0..."}"""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Written:
    """What one process wrote of a checkpoint: Written({"weights/0-0.safetensors": {...}}, waited_s=0.0, ...)"""

    files: Mapping[str, FileEntry]
    waited_s: float = 0.0  # computation waited for the copy
    copied_s: float = 0.0
    written_s: float = 0.0
    error: str = ""  # why nothing complete was written
