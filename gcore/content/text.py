"""The text modality of the policy: sampling parameters, the tokens between two turns, the text of a response.

Tokens that an engine generated are never tokenised again. Only the turn that a tool or a judge adds is tokenised, so
the policy trains on exactly the tokens that it sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gcore.config.tree import Generation
from gcore.content.base import Content
from gcore.content.decoding import TextDecoder
from gcore.content.tokens import Tokens, tokens_of
from gcore.types import Message, SamplingParams, UserError

MARK = "\u00a7"  # position marker in the rendered template; any text without special tokens would do
PROBE = ({"role": "user", "content": "?"}, {"role": "assistant", "content": MARK})


class TextModality:
    """Implements content.base.Modality for language models."""

    def __init__(self, generation: Generation, tokenizer: Any, stop_tokens: tuple[int, ...]) -> None:
        self._tokenizer, self._max_tokens = tokenizer, generation.max_response_length
        self._decoder = TextDecoder(tokenizer)
        self._params = SamplingParams(
            generation.max_response_length,
            generation.temperature,
            generation.top_p,
            generation.top_k,
            stop_tokens,
            generation.keep_sampling_mask,
        )

    def params(self, given: Mapping[str, Any], *, greedy: bool) -> SamplingParams:
        return self._override(given, None, greedy)

    def next_params(
        self, given: Mapping[str, Any], *, greedy: bool, temperature: float, num_steps: int
    ) -> SamplingParams | None:
        """A sample keeps its temperature. Greedy samples have temperature 0 in requests and 1 in training."""
        room = self._max_tokens - num_steps
        if room < 1:
            return None
        same = 0.0 if greedy or not self._params.temperature else temperature
        params = self._override({"temperature": same, **given}, room, greedy)
        if (params.temperature or 1.0) != temperature:
            raise UserError(
                f"temperature={params.temperature} in a later turn; expected {temperature} as in the first turn: the "
                "logprobs of a sample are computed at one temperature (key: workflow)"
            )
        return params

    def between_turns(self, content: Content, feedback: str | Sequence[Message]) -> Tokens:
        """A string is used as it is. Messages are rendered with the chat template, after the end of the last turn."""
        text = feedback if isinstance(feedback, str) else self._end_of_turn() + self._rendered_turns(feedback)
        tokens = self._encode(text)
        generated = tokens_of(content).tokens_S
        if not isinstance(feedback, str) and len(tokens) and tokens[0] == generated[-1]:
            tokens = tokens[1:]  # the policy generated the end-of-turn token itself
        return Tokens.steps(tokens)

    async def outputs(self, contents: Sequence[Content]) -> list[str]:
        return await self._decoder.texts([tokens_of(content).tokens_S for content in contents])

    def _override(self, given: Mapping[str, Any], room: int | None, greedy: bool) -> SamplingParams:
        fields = {**given, **({"temperature": 0.0} if greedy else {})}
        stop = fields.pop("stop", ())
        params = self._params.override(fields, "ctx.generate")
        words = [stop] if isinstance(stop, str) else stop
        stop_tokens = (*params.stop_tokens, *map(self._stop_token, words))
        max_tokens = params.max_tokens if room is None else min(params.max_tokens, room)
        return dataclasses.replace(params, stop_tokens=stop_tokens, max_tokens=max_tokens)

    def _stop_token(self, text: str) -> int:
        tokens = self._encode(text).tolist()
        if len(tokens) != 1:
            raise UserError(f"stop={text!r} is {len(tokens)} tokens of this tokenizer; expected one (key: workflow)")
        return int(tokens[0])

    def _encode(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def _end_of_turn(self) -> str:
        """The text that the chat template puts after the content of an assistant's message."""
        rendered = self._render(PROBE)
        return rendered[rendered.rindex(MARK) + 1 :]

    def _rendered_turns(self, messages: Sequence[Message]) -> str:
        before, after = self._render(PROBE), self._render((*PROBE, *messages), add_generation_prompt=True)
        if not after.startswith(before):
            raise UserError(
                "ctx.proceed: the chat template changes earlier turns when messages are added, so their tokens would "
                "change; pass a string instead of messages (or change model.chat_template)"
            )
        return after[len(before) :]

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        if not self._tokenizer.chat_template:
            raise UserError(
                "ctx.proceed: the tokenizer has no chat template for messages; pass a string (or set "
                "model.chat_template)"
            )
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text
