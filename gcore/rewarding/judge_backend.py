"""Where a judge's model runs: on an engine of this run, or on a server behind a URL. Input: messages. Output: text.

messages ──question──> ──answer──> text
             │             ├── EngineBackend: a replica generates tokens, which are decoded
             │             └── RemoteBackend: POST URL/chat/completions, with retries
             └── checked and prepared once, sent once per repeat and attempt
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gcore.config.judges import RemoteJudge, ServedJudge
from gcore.content.answers import render
from gcore.content.decoding import Detokenizer
from gcore.content.media import ArrayRef, png_url, resolve
from gcore.content.processor import MediaProcessor
from gcore.content.tokens import Tokens, tokens_of
from gcore.rewarding.http import JsonClient
from gcore.rewarding.source import BadAnswer, short
from gcore.types import Completion, Message, Pixels, RewardError, SamplingParams, UserError

Key = tuple[object, ...]  # seeds the sampling noise
Ask = Callable[[Tokens, SamplingParams, Key], Awaitable[Completion]]

OWN = {  # parameters that `extra` must not set, and why
    "messages": "made from template and system_prompt",
    "model": "set by served_model",
    "max_tokens": "set by max_response_length",
    "temperature": "set by the judge's key temperature",
    "top_p": "set by the judge's key top_p",
    "seed": "set by seeds",
    "stream": "streaming is not supported",
    "n": "set by repeats",
}
# special tokens of common chat templates: <|im_end|>, <｜User｜>, </s>, <end_of_turn>, [/INST]
SPECIAL_TOKENS = re.compile(
    r"<[|｜][^<>\n]{1,64}[|｜]>|</?(?:s|bos|eos|pad|unk)>|<(?:start|end)_of_turn>|\[/?(?:INST|SYSTEM_PROMPT)\]"
)


class JudgeBackend:
    def __init__(self, sees: bool) -> None:
        self.sees = sees  # messages may have image parts: {"type": "image", "image": array or ArrayRef}
        self.counts: Counter[str] = Counter()

    def check(self, texts: Mapping[str, str], messages: Sequence[Message]) -> None:
        """Before the run: raises UserError if the model cannot take these texts of the recipe (by key) or messages of
        these roles."""
        raise NotImplementedError

    async def reach(self) -> None:
        """Before the run: raises UserError if the model does not answer. Replicas of this run start later."""

    def escape(self, response: str) -> str:
        """Breaks up special tokens. With them, a policy's response could end its turn and write the verdict itself."""
        raise NotImplementedError

    def question(self, messages: Sequence[Message], where: str) -> Any:
        """Prepares messages for `answer`. Raises RewardError, beginning with `where`, if they cannot be sent."""
        raise NotImplementedError

    def text(self, messages: Sequence[Message]) -> str:
        """The conversation as the model reads it, as far as this process knows the chat template."""
        raise NotImplementedError

    async def answer(self, question: Any, params: SamplingParams, key: Key) -> str:
        raise NotImplementedError

    def close(self) -> None:
        """Ends connections."""


class EngineBackend(JudgeBackend):
    """A model served by this run, with its own tokenizer and chat template. `ask` sends to one of its replicas."""

    def __init__(
        self,
        spec: ServedJudge,
        tokenizer: Any,
        stop_tokens: tuple[int, ...],
        ask: Ask,
        key: str,
        processor: MediaProcessor | None = None,
    ):
        takes_images = processor is not None and "image" in processor.kinds
        if spec.images is True and not takes_images:
            raise UserError(f"{key}.images=true: its model takes no images; expected a vision-language model")
        super().__init__(sees=takes_images and spec.images is not False)
        self.spec, self.tokenizer, self.stop_tokens, self.ask, self.key = spec, tokenizer, stop_tokens, ask, key
        self._processor = processor
        self._decoder = Detokenizer(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._special = re.compile("|".join(re.escape(text) for text in sorted(special, key=len)[::-1]) or r"(?!)")

    def check(self, texts: Mapping[str, str], messages: Sequence[Message]) -> None:
        """A model built from scratch maps unknown characters to <unk>. This is allowed in responses, but not in the
        recipe's texts."""
        alphabet, key = set(getattr(self.tokenizer, "alphabet", "")), f"{self.key}.model.build.alphabet"
        for name, text in texts.items():
            if alphabet and (unknown := "".join(sorted(set(text) - alphabet))):
                raise UserError(f"{self.key}.{name}: no token for the characters {unknown!r} (add them to {key})")
        try:
            self.text(messages)
        except UserError as error:
            raise UserError(f"{self.key}: {error} (change {self.key}.system_prompt or model.chat_template)") from None

    def escape(self, response: str) -> str:
        return _break_up(self._special, response)

    def question(self, messages: Sequence[Message], where: str) -> Tokens:
        """Tokens of the rendered chat template, without more special tokens: the template contains them."""
        try:
            text = self.text(messages)
            if self._processor is not None:
                content = self._processor.content(text, _media(messages))
            else:
                ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
                content = Tokens(np.asarray(ids, dtype=np.int32))
        except UserError as error:
            raise RewardError(f"{where}: {error}") from error
        if content.size > self.spec.max_prompt_length:
            raise RewardError(
                f"{where}: the judge's prompt has {content.size} tokens; expected at most "
                f"{self.spec.max_prompt_length} (key: {self.key}.max_prompt_length)"
            )
        return content

    def text(self, messages: Sequence[Message]) -> str:
        return render(self.tokenizer, messages, add_generation_prompt=True)

    async def answer(self, question: Tokens, params: SamplingParams, key: Key) -> str:
        params = replace(params, stop_tokens=params.stop_tokens or self.stop_tokens)
        completion = await self.ask(question, params, key)
        if completion.finish == "abort":  # a cut verdict is wrong: "1" may be the beginning of "10"
            raise RewardError(f"judge {self.spec.name!r}: the request was aborted during generation")
        return (await self._decoder.texts([tokens_of(completion.content).tokens_S]))[0]


class RemoteBackend(JudgeBackend):
    """A model on another server, called by OpenAI's chat completions API. The server has the tokenizer, so it enforces
    the maximum length of a conversation."""

    def __init__(self, spec: RemoteJudge, seed_of: Callable[[Key], int], key: str):
        super().__init__(sees=spec.images is True)
        self.spec, self.seed_of, self.key = spec, seed_of, key
        versioned = re.search(r"/v\d", spec.url) is not None
        hint = f"see {key}: url{'' if versioned else ' (most end in /v1)'}, served_model, seeds, extra"
        self.client = JsonClient(spec, key, 1 + spec.retries, self.counts, "chat/completions", hint)

    def check(self, texts: Mapping[str, str], messages: Sequence[Message]) -> None:
        self.client.check()
        if self.spec.url.partition("?")[0].rstrip("/").endswith("/chat/completions"):
            raise UserError(
                f"{self.key}.url: got a URL that ends in /chat/completions; expected the part before it, often "
                "http://HOST:PORT/v1"
            )
        for name, value in self.spec.extra.items():
            key = f"{self.key}.extra.{name}"
            if name in OWN and (value is not None or name == "messages"):
                raise UserError(f"{key}: {OWN[name]}; expected other parameters, or null to omit it")
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise UserError(f"{key}: cannot be sent as JSON: {error}") from None
            if value == "<redacted>":  # by config/load.py, in the copy of the config in the run's folder
                raise UserError(f"{key}: got <redacted>; expected its value, which a run does not save (set {key}=...)")

    async def reach(self) -> None:
        """One GET of URL/models. Not every server has this path; only a rejected token, a redirect, a server error
        and no answer are errors."""
        reply = await self.client.reach("models")
        address = self.client.address("models").partition("?")[0]
        answered = f"{address} answered {self.client.quote(reply)}"
        if reply.status in (401, 403):
            expected = f"a valid token in {self.spec.token_env}" if self.spec.token_env else "a token, but none is set"
            raise UserError(f"{self.key}.token_env: {answered} (expected {expected})")
        if 300 <= reply.status < 400 or (reply.status >= 500 and reply.status != 501):
            raise UserError(f"{self.key}.url: {answered}")

    def escape(self, response: str) -> str:
        return _break_up(SPECIAL_TOKENS, response)

    def question(self, messages: Sequence[Message], where: str) -> tuple[list[Message], str]:
        return [_with_data_urls(message) for message in messages], where

    def text(self, messages: Sequence[Message]) -> str:
        """Roles and contents: the chat template is on the server."""
        return "\n".join(f"[{message['role']}]\n{_shown(message['content'])}" for message in messages)

    async def answer(self, question: tuple[list[Message], str], params: SamplingParams, key: Key) -> str:
        messages, where = question
        if params.stop_tokens:
            raise UserError(f"{self.key}.url: got stop_tokens; expected none: a server's token ids are unknown here")
        return await self.client.post(self._body(messages, params, key), _content_of, where)

    def close(self) -> None:
        self.client.close()

    def _body(self, messages: list[Message], params: SamplingParams, key: Key) -> dict[str, Any]:
        """`extra` overrides the other parameters. Null removes a parameter that a server does not support."""
        own: dict[str, Any] = {
            "model": self.spec.served_model,
            "messages": messages,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or None,  # not OpenAI's, but vLLM's and SGLang's
            "seed": self.seed_of(key) % 2**31 if self.spec.seeds else None,
        }
        return {name: value for name, value in (own | self.spec.extra).items() if value is not None}


def _media(messages: Sequence[Message]) -> list[tuple[str, Pixels | ArrayRef]]:
    """(kind, pixels) of the image parts. A picture of a diffusion model stays a reference; several frames are a
    video."""
    parts = (part for m in messages if not isinstance(m.get("content"), str) for part in m.get("content") or ())
    images = [part["image"] for part in parts if part.get("type") == "image"]
    return [("video" if len(image.shape) == 4 else "image", image) for image in images]


def _with_data_urls(message: Message) -> Message:
    """Image parts as in OpenAI's API: PNG inside a data URL."""
    if isinstance(message["content"], str):
        return message

    def sent(part: Mapping[str, Any]) -> Mapping[str, Any]:
        if part.get("type") != "image":
            return part
        if len(part["image"].shape) == 4:
            raise UserError("a video; expected images: judges get no videos (key: rewards.judges.N.images)")
        return {"type": "image_url", "image_url": {"url": png_url(resolve(part["image"]))}}

    return {**message, "content": [sent(part) for part in message["content"]]}


def _content_of(answer: Any) -> str:
    """The text of the first choice; "" without a text (a refusal, an unfinished chain of thought)."""
    match answer:
        case {"choices": [{"message": {"content": content}, **rest}, *_]}:
            pass
        case _:
            raise BadAnswer(f"returned {short(answer)}; expected choices[0].message.content")
    finish = rest.get("finish_reason")
    if finish in ("abort", "error", "content_filter"):  # a cut verdict may be wrong
        raise BadAnswer(f"ended the answer with finish_reason {finish!r}; expected stop or length")
    if isinstance(content, list):
        content = "".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    if not isinstance(content, str | None):
        raise BadAnswer(f"returned {short(content)} as content; expected text")
    return content or ""


def _shown(content: Any) -> str:
    return content if isinstance(content, str) else "".join(str(p.get("text", f"[{p['type']}]")) for p in content)


def _break_up(special: re.Pattern[str], text: str) -> str:
    """Inserts a space after the first character of each special token."""
    return special.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
