"""The content of language models: the tokens of a prompt, the tokens of the steps after it, and media.

This module joins, splits, hashes and saves tokens. The rows of a micro-batch are made in training/logprob_model.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gcore.content.media import Media
from gcore.types import Bools, Finish, Ints, SampleWork, UserError

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
    media: tuple[Media, ...] = ()  # in the order of their places; of the prompt, then of the steps
    short_P: Ints | None = None  # the prompt with one token per medium, for engines that expand it themselves
    own_context: bool = False  # tokens_P are not those of the sample's Prompt: a workflow has made them
    # [tokens, routers, k], 8 or 16 bits: which experts the engine used, of the first tokens of prompt and steps. The
    # last token of a sample has none: no engine reads it. In the steps of an engine: of the tokens after those that the
    # request had.
    experts: np.ndarray | None = None

    @staticmethod
    def steps(
        tokens_S: Ints,
        sampling_mask: SamplingMask | None = None,
        media: tuple[Media, ...] = (),
        experts: np.ndarray | None = None,
    ) -> Tokens:
        """New steps without their context, as an engine returns them. Places of media count from the first step."""
        return Tokens(NO_TOKENS, tokens_S, sampling_mask, media, experts=experts)

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
    def short_T(self) -> Ints:
        """The whole sequence with one token per image of the prompt."""
        return self.tokens_T if self.short_P is None else np.concatenate([self.short_P, self.tokens_S])

    @property
    def num_steps(self) -> int:
        return len(self.tokens_S)

    @property
    def actions_S(self) -> Bools:
        return np.ones(self.num_steps, np.bool_)

    @property
    def size(self) -> int:
        return len(self.tokens_P) + len(self.tokens_S)

    @property
    def work(self) -> SampleWork:
        context = hashlib.blake2b(self.context_bytes(), digest_size=8).digest()
        media = tuple(each for medium in self.media for each in medium.work)
        return SampleWork(self.size, media=media, prefix=(len(self.tokens_P), context))

    @property
    def nbytes(self) -> int:
        mask = self.sampling_mask
        masked = mask.ids_K.nbytes + mask.counts_S.nbytes if mask else 0
        short = self.short_P.nbytes if self.short_P is not None else 0
        media = sum(medium.nbytes for medium in self.media)
        experts = self.experts.nbytes if self.experts is not None else 0
        return self.tokens_P.nbytes + self.tokens_S.nbytes + masked + media + short + experts

    @property
    def step_media(self) -> tuple[Media, ...]:
        """The media of the steps: of tools, in later turns."""
        return tuple(medium for medium in self.media if medium.places.size and medium.places[0] >= len(self.tokens_P))

    def context_bytes(self) -> bytes:
        """Equal for equal contexts: the tokens and the media of the prompt."""
        later = len(self.step_media)
        keys = [medium.key for medium in self.media[: len(self.media) - later]]
        return self.tokens_P.astype("<i4").tobytes() + "/".join(keys).encode()

    def prefix_key(self) -> bytes:
        """Equal for sequences whose keys and values are equal up to their last token."""
        return self.tokens_T[:-1].tobytes() + "/".join(medium.key for medium in self.media).encode()

    def extended(self, *pieces: Tokens) -> Tokens:
        parts = [part for part in (self, *pieces) if part.num_steps]
        if not parts:
            return self
        tokens_S = parts[0].tokens_S if len(parts) == 1 else np.concatenate([part.tokens_S for part in parts])
        mask = SamplingMask.joined(*((part.sampling_mask, part.num_steps) for part in parts))
        media = self.media
        if any(piece.media for piece in pieces):
            end = self.size
            for piece in pieces:
                media += tuple(medium.moved(end - len(piece.tokens_P)) for medium in piece.step_media)
                end += piece.num_steps
        chosen = [part.experts for part in (self, *pieces) if part.experts is not None]
        experts = chosen[0] if len(chosen) == 1 else np.concatenate(chosen) if chosen else None
        return replace(self, tokens_S=tokens_S, sampling_mask=mask, media=media, experts=experts)

    def end(self, params: SamplingParams) -> Finish | None:
        if self.num_steps and self.tokens_S[-1] in params.stop_tokens:
            return "stop"
        return "length" if self.num_steps >= params.max_tokens else None

    def digest(self) -> bytes:
        seen = "/".join(medium.key for medium in self.step_media).encode()
        return hashlib.blake2b(self.tokens_S.astype("<i4").tobytes() + seen, digest_size=16).digest()

    def step_arrays(self) -> dict[str, np.ndarray]:
        mask = self.sampling_mask
        masks = {"sampling_mask_ids": mask.ids_K, "sampling_mask_counts": mask.counts_S} if mask else {}
        own = self.media if self.own_context else self.step_media  # places count from the first step
        later = [medium.moved(-len(self.tokens_P)).as_json() for medium in own]
        media = {"media": np.frombuffer(json.dumps(later).encode(), np.uint8)} if later else {}
        context = {"context": self.tokens_P} if self.own_context else {}
        if self.own_context and self.short_P is not None:
            context["short_context"] = self.short_P
        experts: dict[str, np.ndarray] = {}
        if self.experts is not None:
            shape = np.array(self.experts.shape[1:], np.int32)
            experts = {"experts": self.experts.astype(np.uint16).reshape(-1), "experts_shape": shape}
        return {"tokens": self.tokens_S, **masks, **media, **context, **experts}

    def with_steps(self, arrays: Mapping[str, np.ndarray]) -> Tokens:
        mask = None
        if "sampling_mask_counts" in arrays:
            mask = SamplingMask(arrays["sampling_mask_ids"], arrays["sampling_mask_counts"])
        experts = None
        if "experts" in arrays:
            experts = compact_experts(arrays["experts"].reshape(-1, *arrays["experts_shape"].tolist()))
        start = self
        if "context" in arrays:
            start = Tokens(arrays["context"], short_P=arrays.get("short_context"), own_context=True)
        later = json.loads(arrays["media"].tobytes()) if "media" in arrays else []
        media = tuple(Media.from_json(data).moved(len(start.tokens_P)) for data in later)
        context = start.media[: len(start.media) - len(start.step_media)]
        media = (*context, *media)
        return replace(start, tokens_S=arrays["tokens"], sampling_mask=mask, media=media, experts=experts)

    def reward_columns(self) -> dict[str, Any]:
        return {"completion_ids": self.tokens_S}


def compact_experts(numbers: np.ndarray, num_experts: int = 1 << 16) -> np.ndarray:
    """In as few bits as the number of experts needs."""
    return numbers.astype(np.uint8 if num_experts <= 1 << 8 else np.uint16)


def tokens_of(content: Content) -> Tokens:
    """The content as tokens, for engines and trainers of language models."""
    if not isinstance(content, Tokens):
        raise UserError(f"a language model got {type(content).__name__}; expected Tokens (keys: model, workflow)")
    return content
