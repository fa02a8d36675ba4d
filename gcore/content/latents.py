"""The content of diffusion and flow models: a prompt, and the latents after each denoising step, by reference.

    engine ──stores the latents of a piece, and the picture──> files <──reads── trainer rank, reward worker
       └──Latents: references──> controllers ──> trainer rank

A step is a denoising step. Steps inside the window are stochastic: the policy decides there, and training uses them.
The others follow an ODE. Controllers hold names of files, never latents or pixels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gcore.config.generation import Generation
from gcore.content.media import ArrayRef
from gcore.types import Bools, Finish, Pixels, SampleWork, SamplingParams, UserError

if TYPE_CHECKING:
    from gcore.content.base import Content

DEMONSTRATION_DRAWS = 4  # random times at which one demonstration is denoised


@dataclass(frozen=True, slots=True)
class Latents:
    """Implements content.base.Content. Latents("7", tokens=16, window=(0, 9), pieces=(ArrayRef(...),), ...)

    A piece is what an engine made without interruption: (steps + 1) x shape of the latents, with those before the first
    step. A demonstration has pixels instead; its steps are denoised at random times.
    """

    prompt: str
    tokens: int  # of one pass of the network
    window: tuple[int, int]  # stochastic steps: the first, and the one after the last
    start_key: int | None = None  # of the noise that all siblings start from; None: each has its own
    pieces: tuple[ArrayRef, ...] = ()
    last: bytes = b""  # hash of the latents after the last step
    picture: ArrayRef | None = None  # of a finished sample: height x width x 3, or frames first
    condition: tuple[tuple[str, ArrayRef], ...] = ()  # embeddings of the prompt
    demonstration: Pixels | None = None

    @property
    def num_steps(self) -> int:
        if self.demonstration is not None:
            return DEMONSTRATION_DRAWS
        return sum(piece.shape[0] - 1 for piece in self.pieces)

    @property
    def actions_S(self) -> Bools:
        if self.demonstration is not None:
            return np.ones(self.num_steps, np.bool_)
        steps = np.arange(self.num_steps)
        return (self.window[0] <= steps) & (steps < self.window[1])

    @property
    def size(self) -> int:
        return self.tokens

    @property
    def work(self) -> SampleWork:
        return SampleWork(self.tokens, passes=max(1, int(self.actions_S.sum())))

    @property
    def nbytes(self) -> int:
        demonstration = 0 if self.demonstration is None else self.demonstration.nbytes
        return len(self.prompt) + len(self.last) + demonstration

    def extended(self, *pieces: Latents) -> Latents:
        found = self
        for piece in pieces:
            if piece.demonstration is not None:
                found = replace(found, demonstration=piece.demonstration)
            elif piece.pieces:
                condition = piece.condition or found.condition
                joined = (*found.pieces, *piece.pieces)
                found = replace(found, pieces=joined, last=piece.last, picture=piece.picture, condition=condition)
        return found

    def end(self, params: SamplingParams) -> Finish | None:
        return "stop" if self.num_steps >= params.max_tokens else None

    def digest(self) -> bytes:
        if self.demonstration is not None:
            return hashlib.blake2b(self.demonstration.tobytes(), digest_size=16).digest()
        return self.last

    def step_arrays(self) -> dict[str, np.ndarray]:
        about = {
            "pieces": [asdict(piece) for piece in self.pieces],
            "last": self.last.hex(),
            "picture": None if self.picture is None else asdict(self.picture),
            "condition": [[name, asdict(ref)] for name, ref in self.condition],
        }
        return {"latents": np.frombuffer(json.dumps(about).encode(), np.uint8)}

    def with_steps(self, arrays: Mapping[str, np.ndarray]) -> Latents:
        about = json.loads(bytes(arrays["latents"]).decode())
        return replace(
            self,
            pieces=tuple(map(ref_of, about["pieces"])),
            last=bytes.fromhex(about["last"]),
            picture=None if about["picture"] is None else ref_of(about["picture"]),
            condition=tuple((name, ref_of(ref)) for name, ref in about["condition"]),
        )

    def reward_columns(self) -> dict[str, Any]:
        return {"images": self.picture}

    def states(self) -> np.ndarray:
        """The latents before the first step and after each step. For engines and trainers: it reads the files."""
        parts = [piece.read() for piece in self.pieces]
        return np.concatenate([parts[0], *(part[1:] for part in parts[1:])])


def ref_of(fields: Mapping[str, Any]) -> ArrayRef:
    return ArrayRef(fields["path"], tuple(fields["shape"]), fields["dtype"])


def latents_of(content: Content) -> Latents:
    """The content as latents, for engines and trainers of diffusion models."""
    if not isinstance(content, Latents):
        raise UserError(
            f"a diffusion model got {type(content).__name__}; expected Latents (keys: generation.denoising, workflow)"
        )
    return content


class LatentModality:
    """Implements content.base.Modality for diffusion models. The output is a reference to the picture."""

    def __init__(self, generation: Generation) -> None:
        assert generation.denoising is not None
        self._steps = generation.denoising.steps

    def params(self, given: Mapping[str, Any], *, greedy: bool) -> SamplingParams:
        if given:
            raise UserError(
                f"ctx.generate has no parameter {next(iter(given))!r} for a diffusion model; expected none (key: "
                "workflow; generation.denoising configures the sampler)"
            )
        return SamplingParams(self._steps, 0.0 if greedy else 1.0)

    def next_params(
        self, given: Mapping[str, Any], *, greedy: bool, temperature: float, num_steps: int
    ) -> SamplingParams | None:
        return None  # a picture has no next turn

    def between_turns(self, content: Content, feedback: Any) -> Latents:
        raise UserError("ctx.proceed: a picture has no next turn; expected only ctx.generate (key: workflow)")

    def hidden_steps(self, content: Content, output: Any) -> list[tuple[int, str]]:
        return []

    async def outputs(self, contents: Sequence[Content]) -> list[ArrayRef | None]:
        return [latents_of(content).picture for content in contents]
