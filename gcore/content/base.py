"""The interface of content: what an engine continues and a trainer rank trains on, in a form of their own.

    Prompt.content ──Request──> engine ──Completion.content (new steps)──> Rollout ──> Sample.content ──> trainer

Stages that are neither an engine nor a trainer see the columns of the steps (`logprobs_S`, `mask_S`, `versions_S`), a
size, a digest and an output. They hold content and pass it on, and never look inside. Each modality implements this
interface as one frozen type in one module:

    tokens.py   the tokens of a language model, and its images        (text.py: tokenizer and chat template)

Large parts of content can be a reference (media.py) that the engine or the trainer rank reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

if TYPE_CHECKING:
    from gcore.types import Finish, SamplingParams


class Content(Protocol):
    """A context (the prompt), and the steps taken since. Immutable."""

    @property
    def num_steps(self) -> int: ...

    @property
    def size(self) -> int:
        """Length of what a trainer rank computes, context and steps: the unit of costs and of row widths."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that are sent when the content is sent; a reference counts as nothing."""
        ...

    def extended(self, *pieces: Self) -> Self:
        """With the steps of these pieces after its own. The contexts of the pieces are ignored."""
        ...

    def end(self, params: SamplingParams) -> Finish | None:
        """Whether these steps, sampled with `params`, end a turn; None: more steps could follow."""
        ...

    def digest(self) -> bytes:
        """Hash of the steps: equal for equal samples."""
        ...

    def step_arrays(self) -> dict[str, np.ndarray]:
        """The steps as named one-dimensional arrays, for a file. `with_steps` is the inverse."""
        ...

    def with_steps(self, arrays: Mapping[str, np.ndarray]) -> Self:
        """The same context with the steps that `step_arrays` returned."""
        ...

    def reward_columns(self) -> dict[str, Any]:
        """What a reward function may ask for by name, besides the output."""
        ...


class Modality(Protocol):
    """Makes content of what a workflow says, and an output of content. One per kind of policy."""

    def params(self, given: Mapping[str, Any], *, greedy: bool) -> SamplingParams:
        """Of the first turn of a sample: the recipe's, with the fields that the workflow gives."""
        ...

    def next_params(
        self, given: Mapping[str, Any], *, greedy: bool, temperature: float, num_steps: int
    ) -> SamplingParams | None:
        """Of a later turn, after `num_steps` steps sampled at `temperature`. None: no room for another step."""
        ...

    def between_turns(self, content: Content, said: Any) -> Content:
        """The steps that stand between the policy's last step and its next turn."""
        ...

    def output(self, content: Content) -> Any:
        """What rewards judge, and people read: for language models the text of all steps."""
        ...
