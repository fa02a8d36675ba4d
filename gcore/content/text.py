"""The text modality of the policy: sampling parameters, the tokens between two turns, the text of a response.

Tokens that an engine generated are never tokenised again. Only the turn that a tool or a judge adds is tokenised, so
the policy trains on exactly the tokens that it sampled.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Collection, Mapping, Sequence
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

MARK = "zqMARKqz"  # position marker in rendered messages; any text that no message has would do
ASKED = {"role": "user", "content": "?"}
PLAIN: dict[str, Any] = {"role": "assistant", "content": MARK}
TAIL = 12  # tokens before a turn, to see whether the chat template opens a thought


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
        self._rendered: dict[tuple[Any, bool], str] = {}  # of `_plain`
        self._stops: dict[str, int | None] = {}  # of `_first_stop`
        self._params = SamplingParams(
            generation.max_response_length,
            generation.temperature,
            generation.top_p,
            generation.top_k,
            stop_tokens,
            generation.keep_sampling_mask,
            keep_experts,
        )

    @property
    def chats(self) -> bool:
        """There is a chat template for messages."""
        return bool(self._tokenizer.chat_template)

    def is_full(self, num_steps: int) -> bool:
        """Whether a sample of this many steps has reached the length limit."""
        return num_steps >= self._max_tokens

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
        """A string is used as it is. Messages are rendered with the chat template, after the end of the last turn: what
        the template does to earlier turns, such as leaving out thoughts, changes no token of the sample.

        The first message may be the assistant's that the others answer: only its tool calls are used. Messages may have
        images of tools: parts {"type": "image", "image": pixels}, as arrays or references to arrays."""
        generated = tokens_of(content).tokens_S
        images = [] if isinstance(feedback, str) else self._images(feedback)
        text, said = feedback if isinstance(feedback, str) else "", 0  # tokens that the policy has sampled itself
        if not isinstance(feedback, str):
            text, said = self._after_turn(feedback, ended=generated[-1] in self._params.stop_tokens)
        seen = self._with_images(text, images)
        tokens, media = (self._encode(text), ()) if seen is None else (seen.tokens_P, seen.media)
        if not isinstance(feedback, str) and len(tokens) > said and tokens[said] == generated[-1]:
            said += 1  # it ends its turn with the first token of the next one
        return Tokens.steps(tokens[said:], media=tuple(medium.moved(-said) for medium in media))

    @property
    def chat_template(self) -> str | Mapping[str, str] | None:
        template: str | Mapping[str, str] | None = getattr(self._tokenizer, "chat_template", None)
        return template

    def turn_text(self, content: Content, own: int, clean: str, special: Sequence[str], thought: str) -> str:
        """The text of the last `own` steps, a turn of the policy, with these special tokens except the one that ended
        it; `clean`: without them. It begins with `thought`, the mark of a thought, if the template has put it there."""
        whole = tokens_of(content)
        said = whole.tokens_S[whole.num_steps - own :]
        ended = said[:-1] if own and said[-1] in self._params.stop_tokens else said
        text = self._decoder.with_special(ended, special)
        end = whole.num_steps - own
        tail = whole.tokens_S[max(0, end - TAIL) : end] if end else whole.tokens_P[-TAIL:]
        opened = any(thought in template for template in self._templates) and self._tokenizer.decode(
            tail.tolist(), skip_special_tokens=False
        ).rstrip().endswith(thought)
        return (thought if opened else "") + (clean if text is None else text)

    @property
    def _templates(self) -> Collection[str]:
        template = self.chat_template or ""
        return (template,) if isinstance(template, str) else template.values()

    def rewrites(self, history: Sequence[Message], feedback: Sequence[Message]) -> bool:
        """Whether the chat template writes the history, with the turns of the policy as it said them, differently when
        the feedback follows. If it writes such messages at all: what the policy says need not be what it expects."""
        try:
            before = self._render(list(map(_with_thought, history)))
            after = self._render([*map(_with_thought, history), *feedback], add_generation_prompt=True)
        except UserError:
            return False
        ends = before, before.removesuffix(self._tokenizer.eos_token or "")  # some end a whole conversation with it
        return not after.startswith(ends)

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

    def _after_turn(self, feedback: Sequence[Message], ended: bool) -> tuple[str, int]:
        """What the template puts after a turn of the assistant, from the last argument of its calls or the end of its
        content on, and the number of tokens of it that the policy has sampled itself: the rest of the calls, and the
        end of the turn if it has `ended` it, perhaps by another token than the template's."""
        given = feedback[0] if feedback and feedback[0].get("role") == "assistant" else None
        results = list(feedback if given is None else feedback[1:])
        calls = _calls_answered((given or {}).get("tool_calls") or (), results)
        turns = [{"role": "assistant", "content": "", "tool_calls": some} for some in (calls, calls[-1:]) if some]
        error = UserError(
            "ctx.proceed: the chat template leaves out what the assistant says (key: model.chat_template)"
        )
        # the template may know no calls, or one per turn, or want tools, or be several templates, one for tools
        given_tools: tuple[list[Any] | None, ...] = (
            ([],) if calls and isinstance(self.chat_template, Mapping) else (None, [])
        )
        for tools, turn in itertools.product(given_tools, (*turns, PLAIN)):
            try:
                alone = self._plain(tools) if turn is PLAIN else self._render([ASKED, turn], tools=tools)
                whole = self._render([ASKED, turn, *results], add_generation_prompt=True, tools=tools)
            except UserError as rejected:
                error = rejected
                continue
            if MARK in alone and MARK in whole:
                break
        else:
            raise error
        end, text = _after_mark(alone), _after_mark(whole)
        bare = end.removesuffix(self._tokenizer.eos_token or "")  # some end a whole conversation with eos
        stop = self._first_stop(bare if bare and text.startswith(bare) and not text.startswith(end) else end)
        if stop is not None and ended:
            return text, stop + 1
        if turn is PLAIN:
            return text, 0
        if stop is not None:
            return text, stop
        return text.removeprefix(end.removesuffix(_after_mark(self._plain(tools)))), 0

    def _first_stop(self, end: str) -> int | None:
        """Where the tokens of the end of a turn have a stop token."""
        if end not in self._stops:
            (found,) = np.nonzero(np.isin(self._encode(end), self._params.stop_tokens))
            self._stops[end] = int(found[0]) if len(found) else None
        return self._stops[end]

    def _plain(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """An answer without calls, rendered once."""
        key = tuple(self._templates), tools is None
        if key not in self._rendered:
            self._rendered[key] = self._render([ASKED, PLAIN], tools=tools)
        return self._rendered[key]

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
        given = {"add_generation_prompt": add_generation_prompt, **({} if tools is None else {"tools": list(tools)})}
        causes = list[Exception]()
        for as_text in (False, True):
            form = _with_arguments(messages, as_text)
            try:
                text: str = self._tokenizer.apply_chat_template(form, tokenize=False, **given)
            except Exception as error:  # templates raise errors of their own about roles, their order and arguments
                causes.append(error)
            else:
                return text
        raise UserError(
            f"the chat template cannot write these messages: {causes[0]} (keys: workflow, model.chat_template)"
        ) from causes[0]


class ConversationModality(TextModality):
    """For the training of reward models: an answer is a whole conversation of one step."""

    def answer(self, prompt: Prompt, answer: str | Sequence[Message]) -> tuple[Tokens, Bools]:
        return scored_conversation(self._tokenizer, prompt.messages, answer)

    async def outputs(self, contents: Sequence[Content]) -> list[str]:
        return await self._decoder.texts([tokens_of(content).tokens_T for content in contents])


def last_turn(mask_S: Bools) -> int:
    """The number of steps of the policy's last turn."""
    others = np.flatnonzero(~mask_S[::-1])
    return int(others[0]) if len(others) else len(mask_S)


def _after_mark(text: str) -> str:
    return text.partition(MARK)[2]


def _calls_answered(given: Sequence[Mapping[str, Any]], feedback: list[Message]) -> list[dict[str, Any]]:
    """Calls for the results of tools at the beginning of the feedback, as templates want them: with the names of those
    `given`, and with ids, which results without one get too. The last one has the mark."""
    calls: list[dict[str, Any]] = []
    for i, message in enumerate(feedback):
        if message.get("role") != "tool":
            break
        call = given[i] if i < len(given) else {}
        name = (call.get("function") or {}).get("name") or message.get("name") or "tool"
        number = message.get("tool_call_id") or call.get("id") or f"call{i:05}"
        feedback[i] = {**message, "tool_call_id": number}
        calls.append({"id": number, "type": "function", "function": {"name": name, "arguments": {}}})
    if calls:
        calls[-1]["function"]["arguments"] = {"x": MARK}
    return calls


def _with_arguments(messages: Sequence[Mapping[str, Any]], as_text: bool) -> list[dict[str, Any]]:
    """Arguments of tool calls as objects or as JSON: most templates want objects, some text."""

    def written(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not as_text and isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
        return {**call, "function": {**function, "arguments": arguments}}

    return [
        {**m, **({"tool_calls": list(map(written, m["tool_calls"]))} if m.get("tool_calls") else {})} for m in messages
    ]


def _with_thought(message: Message) -> Message:
    """By both names that templates have for it."""
    thought = message.get("reasoning_content")
    return {**message, "thinking": thought} if thought else message


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
