"""The interface of content: the data of a sample that an engine continues and a trainer rank trains on.

    Prompt.content ──Request──> engine ──Completion.content (new steps)──> Rollout ──> Sample.content ──> trainer

Only engines and trainers read content. Other stages pass it on unread; they use the arrays over steps (`logprobs_S`,
`mask_S`, `versions_S`), a size, a digest and an output. Each modality implements `Content` as one frozen type in one
module, and `Modality` for the code that makes it:

    tokens.py   the tokens of a language model, and its images
    text.py     tokenizer and chat template; decoding.py: tokens to text
    latents.py  the latents of a diffusion model

Large parts of content can be references (media.py), which the engine or the trainer rank resolves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from gcore.types import Bools, Finish, SampleWork, SamplingParams


class Content(Protocol):
    """A context (the prompt) and the steps after it. Immutable."""

    @property
    def num_steps(self) -> int: ...

    @property
    def actions_S(self) -> Bools:
        """Of an engine's steps, those in which the policy decided: all tokens, the stochastic denoising steps."""
        ...

    @property
    def size(self) -> int:
        """Length of context and steps as a trainer rank computes them: the unit of costs and row widths."""
        ...

    @property
    def work(self) -> SampleWork:
        """What a trainer rank computes for it, `size` among it."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes to send. A reference counts as 0."""
        ...

    def extended(self, *pieces: Self) -> Self:
        """This content with the steps of the pieces appended. The contexts of the pieces are ignored."""
        ...

    def end(self, params: SamplingParams) -> Finish | None:
        """Why a turn with these steps, sampled with `params`, is finished; None: it is not finished."""
        ...

    def digest(self) -> bytes:
        """Hash of the steps: equal steps, equal hash."""
        ...

    def step_arrays(self) -> dict[str, np.ndarray]:
        """The steps as named one-dimensional arrays, to save in a file. `with_steps` is the inverse."""
        ...

    def with_steps(self, arrays: Mapping[str, np.ndarray]) -> Self:
        """The same context with the steps that `step_arrays` returned."""
        ...

    def reward_columns(self) -> dict[str, Any]:
        """Columns that a reward function can have as arguments, in addition to the output."""
        ...


@runtime_checkable
class Shareable(Protocol):
    """Content whose beginning a trainer rank can compute once for several samples."""

    def common(self, other: Any) -> tuple[int, int]:
        """What both begin with and a network computes alike: tokens, and entries of `work.media` in them. Zeros, if it
        is too short to be computed once."""
        ...

    def order(self) -> bytes:
        """Contents that begin alike are neighbours in this order."""
        ...


class Modality(Protocol):
    """Converts between what a workflow sees and content. One implementation per kind of policy."""

    def params(self, given: Mapping[str, Any], *, greedy: bool) -> SamplingParams:
        """Parameters of the first turn of a sample: those of the recipe, with the fields in `given` replaced."""
        ...

    def next_params(
        self, given: Mapping[str, Any], *, greedy: bool, temperature: float, num_steps: int
    ) -> SamplingParams | None:
        """Parameters of a later turn, after `num_steps` steps sampled at `temperature`. None: the length limit is
        reached."""
        ...

    def between_turns(self, content: Content, feedback: Any) -> Content:
        """The steps of the feedback, between the policy's last step and its next turn."""
        ...

    async def outputs(self, contents: Sequence[Content]) -> Sequence[Any]:
        """What rewards score and people read, for each content: for language models the text of all steps. Must not
        block the event loop."""
        ...

    def hidden_steps(self, content: Content, output: Any) -> list[tuple[int, str]]:
        """Steps that the output leaves out, such as special tokens: their places in it, and names. For people."""
        ...
