"""The content of language models: the tokens of a prompt, the tokens of the steps after it, and images in the prompt.

This module joins, splits, hashes and saves tokens. The rows of a micro-batch are made in training/micro.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gcore.content.media import ArrayRef
from gcore.types import Finish, Ints, Pixels, UserError

if TYPE_CHECKING:
    from gcore.content.base import Content
    from gcore.types import SamplingParams

NO_TOKENS: Ints = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """The tokens that top-k and top-p allowed at each step. A count of 0: all tokens were allowed.

    Two steps, {4, 9} and all tokens: SamplingMask(ids_K=[4, 9], counts_S=[2, 0])
    """

    ids_K: Ints
    counts_S: Ints

    @staticmethod
    def joined(*parts: tuple[SamplingMask | None, int]) -> SamplingMask | None:
        """The mask of consecutive parts, each given as (mask, number of steps); None if no part has a mask."""
        if not any(mask for mask, _ in parts):
            return None
        ids = [mask.ids_K if mask else NO_TOKENS for mask, _ in parts]
        counts = [mask.counts_S if mask else np.zeros(length, np.int32) for mask, length in parts]
        return SamplingMask(np.concatenate(ids), np.concatenate(counts))


@dataclass(frozen=True, slots=True)
class Tokens:
    """Implements content.base.Content. Tokens(tokens_P=[1, 6, 11], tokens_S=[12, 9])"""

    tokens_P: Ints  # the prompt
    tokens_S: Ints = field(default_factory=lambda: NO_TOKENS)  # the steps
    sampling_mask: SamplingMask | None = None  # logprobs are normalized over these tokens
    images: tuple[Pixels | ArrayRef, ...] = ()  # one per placeholder token in tokens_P, in order

    @staticmethod
    def steps(tokens_S: Ints, sampling_mask: SamplingMask | None = None) -> Tokens:
        """New steps without their context, as an engine returns them."""
        return Tokens(NO_TOKENS, tokens_S, sampling_mask)

    @staticmethod
    def split(tokens_T: Ints, num_steps: int) -> Tokens:
        """A whole sequence whose last `num_steps` tokens are the steps."""
        first = len(tokens_T) - num_steps
        return Tokens(tokens_T[:first], tokens_T[first:])

    @property
    def tokens_T(self) -> Ints:
        """The whole sequence. It is concatenated at every call: call it once per request or sample."""
        return np.concatenate([self.tokens_P, self.tokens_S]) if len(self.tokens_S) else self.tokens_P

    @property
    def num_steps(self) -> int:
        return len(self.tokens_S)

    @property
    def size(self) -> int:
        return len(self.tokens_P) + len(self.tokens_S)

    @property
    def passes(self) -> int:
        return 1

    @property
    def image_pixels(self) -> tuple[int, ...]:
        return tuple(image.shape[0] * image.shape[1] for image in self.images)

    @property
    def nbytes(self) -> int:
        mask = self.sampling_mask
        pixels = sum(image.nbytes for image in self.images if not isinstance(image, ArrayRef))
        masked = mask.ids_K.nbytes + mask.counts_S.nbytes if mask else 0
        return self.tokens_P.nbytes + self.tokens_S.nbytes + masked + pixels

    def extended(self, *pieces: Tokens) -> Tokens:
        parts = [part for part in (self, *pieces) if part.num_steps]
        if not parts:
            return self
        tokens_S = parts[0].tokens_S if len(parts) == 1 else np.concatenate([part.tokens_S for part in parts])
        mask = SamplingMask.joined(*((part.sampling_mask, part.num_steps) for part in parts))
        return replace(self, tokens_S=tokens_S, sampling_mask=mask)

    def end(self, params: SamplingParams) -> Finish | None:
        if self.num_steps and self.tokens_S[-1] in params.stop_tokens:
            return "stop"
        return "length" if self.num_steps >= params.max_tokens else None

    def digest(self) -> bytes:
        return hashlib.blake2b(self.tokens_S.astype("<i4").tobytes(), digest_size=16).digest()

    def step_arrays(self) -> dict[str, np.ndarray]:
        mask = self.sampling_mask
        masks = {"sampling_mask_ids": mask.ids_K, "sampling_mask_counts": mask.counts_S} if mask else {}
        return {"tokens": self.tokens_S, **masks}

    def with_steps(self, arrays: Mapping[str, np.ndarray]) -> Tokens:
        mask = None
        if "sampling_mask_counts" in arrays:
            mask = SamplingMask(arrays["sampling_mask_ids"], arrays["sampling_mask_counts"])
        return replace(self, tokens_S=arrays["tokens"], sampling_mask=mask)

    def reward_columns(self) -> dict[str, Any]:
        return {"completion_ids": self.tokens_S}


def tokens_of(content: Content) -> Tokens:
    """The content as tokens, for engines and trainers of language models."""
    if not isinstance(content, Tokens):
        raise UserError(f"a language model got {type(content).__name__}; expected Tokens (keys: model, workflow)")
    return content
