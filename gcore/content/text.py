"""The text modality of the policy: sampling parameters, the tokens between two turns, the text of a response.

Tokens that an engine generated are never tokenised again. Only the turn that a tool or a judge adds is tokenised, so
the policy trains on exactly the tokens that it sampled.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gcore.config.data import MediaData
from gcore.config.generation import Generation
from gcore.content.answers import answer_steps, scored_conversation
from gcore.content.base import Content, Modality
from gcore.content.decoding import Detokenizer
from gcore.content.families import KINDS, kind_module
from gcore.content.media import BadMedia, resolve
from gcore.content.processor import MediaProcessor
from gcore.content.tokens import Tokens, tokens_of
from gcore.types import Bools, Message, Pixels, Prompt, Rollout, SamplingParams, UserError

TAIL = 8  # tokens before a turn, to see how the chat template opens it
MARK = "\u00a7"  # position marker in the rendered template; any text without special tokens would do
PROBE = ({"role": "user", "content": "?"}, {"role": "assistant", "content": MARK})


class PromptTooLong(UserError):
    """The context of a sample that a workflow has made is too long."""


class _DataUrl:
    """Implements content.families.MediaSource."""

    limits = MediaData()

    def load(self, kind: str, value: Any) -> bytes:
        try:
            return base64.b64decode(str(value).partition(",")[2], validate=True)
        except ValueError:
            raise BadMedia(f"a data URL of an {kind} whose data are not base64") from None


class RewritesHistory(UserError):
    """The chat template writes earlier turns differently when messages follow: it strips thoughts, for example."""


class TextModality:
    """Implements content.base.Modality for language models."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: Any,
        stop_tokens: tuple[int, ...],
        max_prompt_length: int = 2**31,
        processor: MediaProcessor | None = None,
        keep_experts: bool = False,
    ) -> None:
        self._tokenizer, self._max_tokens, self._processor = tokenizer, generation.max_response_length, processor
        self._max_prompt_tokens = max_prompt_length
        self._decoder = Detokenizer(tokenizer)
        self._probe: tuple[str, str] | None = None  # a chat template, and PROBE rendered with it
        self._params = SamplingParams(
            generation.max_response_length,
            generation.temperature,
            generation.top_p,
            generation.top_k,
            stop_tokens,
            generation.keep_sampling_mask,
            keep_experts,
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

    def opening(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        has_history: bool = False,
    ) -> Tokens:
        """Messages are rendered with the chat template, as prompts are; a string is used as it is, after bos.
        `has_history`: turns of the policy are among them, so they may be as long as a prompt with its response."""
        opened = self.context(messages, tools)
        tokens = opened.tokens_P
        if has_history and self.excess(opened) >= self._max_tokens:
            raise PromptTooLong(
                f"the messages are {len(tokens)} tokens; expected less than data.max_prompt_length + "
                f"generation.max_response_length={self._max_prompt_tokens + self._max_tokens}"
            )
        if self.excess(opened) and not has_history:
            raise PromptTooLong(
                f"the messages are {len(tokens)} tokens; expected at most data.max_prompt_length="
                f"{self._max_prompt_tokens} before the first response"
            )
        return opened

    def context(
        self, messages: Sequence[Mapping[str, Any]] | str, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Tokens:
        """As `opening`, of any length. Messages may have images: parts {"type": "image", "image": pixels}."""
        if isinstance(messages, str):
            self._check_alphabet([messages])
            return Tokens(np.asarray(self._tokenizer(messages)["input_ids"], dtype=np.int32), own_context=True)
        self._check_alphabet([message.get("content") for message in messages])
        images = self._images(messages)
        text = self._render(messages, add_generation_prompt=True, tools=tools)
        seen = self._with_images(text, images)
        return dataclasses.replace(Tokens(self._encode(text)) if seen is None else seen, own_context=True)

    def image(self, url: str) -> Pixels:
        """Of a data URL."""
        found: Pixels = kind_module("image").read("image", url, None, _DataUrl())
        return found

    def excess(self, content: Content) -> int:
        """Tokens of the context beyond data.max_prompt_length: the response has this many less."""
        return max(0, len(tokens_of(content).tokens_P) - self._max_prompt_tokens)

    def answer(self, prompt: Prompt, answer: str | Sequence[Message]) -> tuple[Tokens, Bools]:
        """The prompt with an answer that was not generated, and which of its steps the assistant wrote."""
        steps, mask_S = answer_steps(self._tokenizer, self._params.stop_tokens, prompt.messages, answer)
        return tokens_of(prompt.content).extended(steps), mask_S

    def between_turns(self, content: Content, feedback: str | Sequence[Message]) -> Tokens:
        """A string is used as it is. Messages are rendered with the chat template, after the end of the last turn. They
        may have images of tools: parts {"type": "image", "image": pixels}, as arrays or references to arrays."""
        text = feedback if isinstance(feedback, str) else self._end_of_turn() + self._rendered_turns(feedback)
        images = [] if isinstance(feedback, str) else self._images(feedback)
        seen = self._with_images(text, images)
        tokens, media = (self._encode(text), ()) if seen is None else (seen.tokens_P, seen.media)
        generated = tokens_of(content).tokens_S
        if not isinstance(feedback, str) and len(tokens) and tokens[0] == generated[-1]:
            tokens, media = tokens[1:], tuple(medium.moved(-1) for medium in media)  # the policy said it itself
        return Tokens.steps(tokens, media=media)

    def opens(self, content: Content, num_steps: int, mark: str) -> bool:
        """Whether the chat template has written `mark` right before the last `num_steps` steps."""
        if mark not in (self._tokenizer.chat_template or ""):
            return False
        whole = tokens_of(content)
        end = whole.num_steps - num_steps
        tail = whole.tokens_S[max(0, end - TAIL) : end] if end else whole.tokens_P[-TAIL:]
        return str(self._tokenizer.decode(tail.tolist())).rstrip().endswith(mark)

    def rewrites(self, history: Sequence[Message], feedback: Sequence[Message]) -> bool:
        """Whether the chat template writes the history, with the turns of the policy as it said them, differently when
        the feedback follows."""
        after = self._render((*history, *feedback), add_generation_prompt=True)
        return not after.startswith(self._render(history))

    def beginning(self, rollout: Rollout, num_steps: int, sibling: int) -> Rollout:
        """Its first steps, as another sibling. Nothing is copied."""
        return dataclasses.replace(
            rollout,
            sibling=sibling,
            content=tokens_of(rollout.content).beginning(num_steps),
            logprobs_S=rollout.logprobs_S[:num_steps],
            mask_S=rollout.mask_S[:num_steps],
            versions_S=rollout.versions_S[:num_steps],
            output="",
            turn="",
            finish="stop",
        )

    def step_texts(self, content: Content) -> list[str]:
        """The text of every token."""
        return [self._tokenizer.decode([token]) for token in tokens_of(content).tokens_S.tolist()]

    def hidden_steps(self, content: Content, output: str) -> list[tuple[int, str]]:
        return self._decoder.hidden(tokens_of(content).tokens_S, output)

    def _with_images(self, text: str, images: Sequence[tuple[str, Pixels]]) -> Tokens | None:
        """None: there are no images."""
        return self._processor.content(text, images) if images and self._processor is not None else None

    def _images(self, messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, Pixels]]:
        images = _images(messages)
        if images and self._processor is None:
            raise UserError("an image for a model that takes none (keys: workflow, model)")
        return images

    def _check_alphabet(self, texts: Sequence[Any]) -> None:
        alphabet = frozenset(getattr(self._tokenizer, "alphabet", ""))  # of a model built from scratch
        if unknown := alphabet and {c for text in texts if isinstance(text, str) for c in text} - alphabet:
            raise UserError(
                f"no token for the characters {''.join(sorted(unknown))!r} (add them to model.build.alphabet)"
            )

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
        rendered = self._probed()
        return rendered[rendered.rindex(MARK) + 1 :]

    def _probed(self) -> str:
        template = self._tokenizer.chat_template
        if self._probe is None or self._probe[0] != template:
            self._probe = template, self._render(PROBE)
        return self._probe[1]

    def _rendered_turns(self, messages: Sequence[Message]) -> str:
        before, after = self._probed(), self._render((*PROBE, *messages), add_generation_prompt=True)
        if not after.startswith(before):
            raise RewritesHistory(
                "ctx.proceed: the chat template changes earlier turns when messages are added, so their tokens would "
                "change; pass a string instead of messages (or change model.chat_template)"
            )
        return after[len(before) :]

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        if not self._tokenizer.chat_template:
            raise UserError(
                "ctx.proceed: the tokenizer has no chat template for messages; pass a string (or set "
                "model.chat_template)"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **({"tools": list(tools)} if tools else {}),
            )
        except Exception as error:  # templates raise errors of their own about roles and their order
            raise UserError(
                f"the chat template cannot write these messages: {error} (keys: workflow, model.chat_template)"
            ) from error
        return text


class ConversationModality(TextModality):
    """For the training of reward models: an answer is a whole conversation of one step."""

    def answer(self, prompt: Prompt, answer: str | Sequence[Message]) -> tuple[Tokens, Bools]:
        return scored_conversation(self._tokenizer, prompt.messages, answer)

    async def outputs(self, contents: Sequence[Content]) -> list[str]:
        return await self._decoder.texts([tokens_of(content).tokens_T for content in contents])


def _images(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, Pixels]]:
    parts = [p for m in messages if isinstance(m.get("content"), list | tuple) for p in m["content"]]
    if others := [kind for part in parts if (kind := part.get("type")) in KINDS and kind != "image"]:
        raise UserError(f"ctx.proceed: {KINDS[others[0]].one} of a tool; expected images (key: workflow)")
    return [("image", resolve(part["image"])) for part in parts if part.get("type") == "image"]


def text_modality(modality: Modality, what: str) -> TextModality:
    """`what`: the call of a workflow that only language models have."""
    if not isinstance(modality, TextModality):
        raise UserError(f"{what}: only for language models (key: workflow)")
    return modality
