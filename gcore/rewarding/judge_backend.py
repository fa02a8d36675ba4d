"""Who speaks for a judge: an engine of this run, or a server behind a URL. A conversation goes in, text comes out.

messages ──question──> ──answer──> text
             │             ├── EngineBackend: a replica's tokens, decoded
             │             └── RemoteBackend: POST URL/chat/completions, tried again where that helps
             └── checked and prepared once, asked as often as there are repeats and tries
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from jinja2 import TemplateError

from gcore.config.tree import Judge
from gcore.content.tokens import Tokens, tokens_of
from gcore.rewarding.client import REACH_S, JsonClient, Pauses
from gcore.rewarding.source import BadAnswer, short
from gcore.types import Completion, Message, RewardError, SamplingParams, UserError

Key = tuple[object, ...]  # names the noise
Ask = Callable[[Tokens, SamplingParams, Key], Awaitable[Completion]]

OWN = {  # not for `extra`, and why
    "messages": "made from template and system_prompt",
    "model": "that is served_model",
    "max_tokens": "that is max_response_length",
    "temperature": "a key of the judge itself",
    "top_p": "a key of the judge itself",
    "seed": "see seeds",
    "stream": "answers are read as a whole",
    "n": "that is repeats",
}
# what common chat templates are made of: <|im_end|>, <｜User｜>, </s>, <end_of_turn>, [/INST]
MARKS = re.compile(
    r"<[|｜][^<>\n]{1,64}[|｜]>|</?(?:s|bos|eos|pad|unk)>|<(?:start|end)_of_turn>|\[/?(?:INST|SYSTEM_PROMPT)\]"
)


class JudgeBackend(Protocol):
    counts: Counter[str]

    def check(self, texts: Mapping[str, str], messages: Sequence[Message]) -> None:
        """Before the run: can it be shown these texts of the recipe (by key), in such a conversation? UserError."""
        ...

    async def reach(self) -> None:
        """Before the run: is anybody there? Raises UserError."""
        ...

    def plain(self, response: str) -> str:
        """A policy that spells out the judge's special tokens could end its own turn and write the verdict itself."""
        ...

    def question(self, messages: Sequence[Message], where: str) -> Any:
        """What `answer` takes. Raises RewardError, which begins with `where`, when it cannot be asked."""
        ...

    def text(self, messages: Sequence[Message]) -> str:
        """The conversation as the model reads it, as far as that is known here."""
        ...

    async def answer(self, question: Any, params: SamplingParams, key: Key) -> str: ...

    def close(self) -> None: ...


class EngineBackend:
    """A model that this run serves, with a tokenizer and chat template of its own. `ask` asks one of its replicas."""

    def __init__(self, spec: Judge, tokenizer: Any, stop_tokens: tuple[int, ...], ask: Ask, key: str):
        self.spec, self.tokenizer, self.stop_tokens, self.ask, self.key = spec, tokenizer, stop_tokens, ask, key
        self.counts: Counter[str] = Counter()
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._special = re.compile("|".join(re.escape(text) for text in sorted(special, key=len)[::-1]) or r"(?!)")

    def check(self, texts: Mapping[str, str], messages: Sequence[Message]) -> None:
        """A built model reads characters it lacks as <unk>. A response may have such; the recipe's texts may not."""
        alphabet, place = set(getattr(self.tokenizer, "alphabet", "")), f"{self.key}.model.build.alphabet"
        for name, text in texts.items():
            if alphabet and (lacks := "".join(sorted(set(text) - alphabet))):
                raise UserError(f"{self.key}.{name}: no token for the characters {lacks!r} (add them to {place})")
        try:
            self._render(messages)
        except (TemplateError, TypeError) as error:
            raise UserError(
                f"{self.key}: the chat template refuses messages of roles {[m['role'] for m in messages]}: "
                f"{' '.join(str(error).split())} (change {self.key}.system_prompt or model.chat_template)"
            ) from None

    async def reach(self) -> None:
        """Its replicas are started later."""

    def plain(self, response: str) -> str:
        return _defused(self._special, response)

    def question(self, messages: Sequence[Message], where: str) -> Tokens:
        """Exactly the text of the chat template: it wrote its special tokens itself."""
        text = self._render(messages)
        tokens = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
        if len(tokens) > self.spec.max_prompt_length:
            raise RewardError(
                f"{where}: the judge's prompt has {len(tokens)} tokens; expected at most "
                f"{self.spec.max_prompt_length} (key: {self.key}.max_prompt_length)"
            )
        return Tokens(tokens)

    def text(self, messages: Sequence[Message]) -> str:
        return self._render(messages)

    async def answer(self, question: Tokens, params: SamplingParams, key: Key) -> str:
        params = replace(params, stop_tokens=params.stop_tokens or self.stop_tokens)
        completion = await self.ask(question, params, key)
        if completion.finish == "abort":  # half a verdict is none: a 1 may have been on its way to 10
            raise RewardError(f"judge {self.spec.name!r} was aborted while it spoke")
        return str(self.tokenizer.decode(tokens_of(completion.content).tokens_S, skip_special_tokens=True))

    def close(self) -> None:
        pass

    def _render(self, messages: Sequence[Message]) -> str:
        text: str = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return text


@dataclass(frozen=True, slots=True)
class Question:
    """Question(messages=[{"role": "user", "content": "1+1= 2 good?"}], where="reward 'wise', prompt 70")"""

    messages: list[Message]
    where: str


class RemoteBackend:
    """A model that somebody else serves, asked as OpenAI's chat completions are. It has its own tokenizer: how long a
    conversation may be is for the server to say."""

    def __init__(self, spec: Judge, seed_of: Callable[[Key], int], key: str, pauses: Pauses | None = None):
        self.spec, self.seed_of, self.key = spec, seed_of, key
        self.counts: Counter[str] = Counter()
        versioned = re.search(r"/v\d", spec.url or "") is not None
        self.client = JsonClient(
            spec.url or "",
            key,
            path="chat/completions",
            tries=1 + spec.retries,
            timeout_s=spec.timeout_s,
            max_concurrent=spec.max_concurrent,
            token_env=spec.token_env,
            counts=self.counts,
            hint=f"see {key}: url{'' if versioned else ' (most end in /v1)'}, served_model, seeds, extra",
            pauses=pauses,
        )

    def check(self, texts: Mapping[str, str], messages: Sequence[Message]) -> None:
        self.client.check()
        if self.client.url.partition("?")[0].rstrip("/").endswith("/chat/completions"):
            raise UserError(f"{self.key}.url: expected what stands before /chat/completions, often http://HOST:PORT/v1")
        for name, value in self.spec.extra.items():
            key = f"{self.key}.extra.{name}"
            if name in OWN and (value is not None or name == "messages"):
                raise UserError(f"{key}: {OWN[name]}; expected other parameters, or null to leave it out")
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise UserError(f"{key}: cannot be sent as JSON: {error}") from None
            if value == "<redacted>":  # by config/load.py, in the copy that a run's folder has
                raise UserError(f"{key}: was not kept in this file; expected its value (give it again: {key}=...)")

    async def reach(self) -> None:
        """One GET of URL/models. Not every server has that; a refusal of the token, and silence, would last."""
        reply = await self.client.reach("models", REACH_S)
        address = self.client.address("models").partition("?")[0]
        said = f"{address} answered {self.client.quoted(reply)}"
        if reply.status in (401, 403):
            token = f"the token in {self.spec.token_env}" if self.spec.token_env else "a token, and none is set"
            raise UserError(f"{self.key}.token_env: {said} (expected {token})")
        if 300 <= reply.status < 400 or (reply.status >= 500 and reply.status != 501):
            raise UserError(f"{self.key}.url: {said}")

    def plain(self, response: str) -> str:
        return _defused(MARKS, response)

    def question(self, messages: Sequence[Message], where: str) -> Question:
        return Question(list(messages), where)

    def text(self, messages: Sequence[Message]) -> str:
        """The server has the chat template."""
        return "\n".join(f"[{message['role']}]\n{message['content']}" for message in messages)

    async def answer(self, question: Question, params: SamplingParams, key: Key) -> str:
        if params.stop_tokens:
            raise UserError(f"{self.key}.url: got stop_tokens; expected none: a server's tokens are its own")
        body = self._body(question.messages, params, key)

        async def once() -> str:
            return _spoken(await self.client.post(body))

        return await self.client.tried(once, question.where)

    def close(self) -> None:
        self.client.close()

    def _body(self, messages: list[Message], params: SamplingParams, key: Key) -> dict[str, Any]:
        """`extra` goes on top: null there takes a parameter away that a server does not know."""
        own: dict[str, Any] = {
            "model": self.spec.served_model,
            "messages": messages,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or None,  # not OpenAI's, but vLLM's and SGLang's
            "seed": self.seed_of(key) % 2**31 if self.spec.seeds is not False else None,
        }
        return {name: value for name, value in (own | self.spec.extra).items() if value is not None}


def _spoken(said: Any) -> str:
    """The text of the first choice. Nothing at all (a refusal, thoughts without end) is a verdict nobody can read."""
    match said:
        case {"choices": [{"message": {"content": content}, **rest}, *_]}:
            pass
        case _:
            raise BadAnswer(f"returned {short(said)}; expected choices[0].message.content")
    finish = rest.get("finish_reason")
    if finish in ("abort", "error", "content_filter"):  # half a verdict is none
        raise BadAnswer(f"ended the answer with finish_reason {finish!r}; expected stop or length")
    if isinstance(content, list):
        content = "".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    if not isinstance(content, str | None):
        raise BadAnswer(f"returned {short(content)} as content; expected text")
    return content or ""


def _defused(marks: re.Pattern[str], text: str) -> str:
    return marks.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
