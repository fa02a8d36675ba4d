"""A generative judge: another language model reads a response and writes a verdict.

    response ──Form──> messages ──JudgeBackend──> text ──Verdict──> number ──mean──> reward
                          ^                 │
                          └── fresh noise ──┘ while no verdict can be read

pointwise   a case is one response
pairwise    a case is two responses in an order; each pair is heard in both, so that a judge who prefers whoever comes
            first gives each of them the same

What is asked, and with which noise, follows from the group alone: rewards do not depend on who answers first.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import pstdev
from typing import Any, TypeVar

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gcore.config.tree import Judge
from gcore.rewarding.functions import load_function
from gcore.rewarding.judge_backend import JudgeBackend, Key
from gcore.rewarding.source import Answer, is_finite, scalar, short
from gcore.types import Message, Prompt, RewardError, Rollout, SamplingParams, UserError

T = TypeVar("T")

RESPONSES = {"pointwise": ("response",), "pairwise": ("response_a", "response_b")}
NOTE_LENGTH = 4000  # of a verdict's text, in characters
FUNCTION = re.compile(r"[^\s:\\(){}|*+?]+:[A-Za-z_]\w*")  # package.module:f, file.py:f; no expression with a group
WORDS = re.compile(r"(?:[^\\(]|\\.|\(\?(?!P<))*\((?:\?P<\w+>)?[A-Za-z|\[\] ]+\)")  # its first group is letters alone


@dataclass(frozen=True, slots=True)
class Case:
    """A response, or two in an order, to be judged. Case(places=(0, 2), key=(70, 0, 2), question=[1, 6, ...])"""

    places: tuple[int, ...]  # in the group
    key: Key  # prompt id, siblings
    question: Any  # as the backend takes it


@dataclass(frozen=True, slots=True)
class Hearing:
    """What came of a case. Hearing(verdicts=[1.0, 0.0], unread="'Hm': no match of ([AB])", said=["A.", "B."])"""

    verdicts: list[float]  # those that could be read, in the order of the repeats
    unread: str  # the last that could not be, and why
    said: list[str]  # the texts of the verdicts

    @property
    def mean(self) -> float:
        return math.fsum(self.verdicts) / len(self.verdicts)


class JudgeSource:
    """Implements source.Source. Who speaks is `backend`: an engine of this run, a server, or a script in a test."""

    attempts = 1  # verdicts are asked for again here, one by one; the blend would ask for those that were read, too

    def __init__(self, spec: Judge, backend: JudgeBackend, key: str = "rewards.judges.0"):
        self.spec, self.backend, self.key = spec, backend, key
        self.name, self.weight = spec.name, spec.weight
        self.counts: Counter[str] = backend.counts
        self._params = SamplingParams(spec.max_response_length, temperature=spec.temperature, top_p=spec.top_p)
        self._form, self._verdict = Form(spec, backend, key), Verdict(spec, key)

    def check(self, columns: Collection[str]) -> None:
        self._form.check(columns)
        self._verdict.check()

    async def reach(self) -> None:
        await self.backend.reach()

    def close(self) -> None:
        self.backend.close()

    async def answer(self, group: Sequence[Rollout], attempt: int) -> Answer:
        """Every verdict is a request of its own, all at once. A prompt that is too long fails before any is sent."""
        n = len(group)
        if self.spec.mode == "pointwise":
            orders: list[tuple[int, ...]] = [(i,) for i in range(n)]
        elif n == 1:  # an evaluation's greedy response: there is nobody to compare it with
            return Answer([None])
        else:
            orders = [order for i, j in pairs(n, self.spec.opponents) for order in ((i, j), (j, i))]
        cases = [self._case(group, places) for places in orders]
        heard = await _together(self._hear(case, attempt) for case in cases)
        hearings = dict(zip(orders, heard, strict=True))
        return Answer(
            [self._reward(group, i, hearings) for i in range(n)],
            [_spread(i, hearings) for i in range(n)] if self.spec.repeats > 1 else [],
            [_notes(group, i, hearings) for i in range(n)],
        )

    def preview(self, group: Sequence[Rollout]) -> str:
        """What the judge would be shown of the first of the group (pairwise: of the first two). Raises RewardError."""
        rollouts = group[: len(RESPONSES[self.spec.mode])]
        self._case(group, tuple(range(len(rollouts))))  # is it short enough?
        return self.backend.text(self._form.messages(rollouts[0].prompt, [rollout.text for rollout in rollouts]))

    async def ask(self, messages: Sequence[Message], key: Key, **params: Any) -> str:
        """What the judge says to a conversation of the caller's own. `params` override fields of SamplingParams."""
        question = self.backend.question(messages, f"judge {self.name!r}")
        return await self.backend.answer(question, self._params.override(params, "ctx.ask"), (self.name, "say", *key))

    def _case(self, group: Sequence[Rollout], places: tuple[int, ...]) -> Case:
        rollouts = [group[place] for place in places]
        prompt = rollouts[0].prompt
        messages = self._form.messages(prompt, [rollout.text for rollout in rollouts])
        question = self.backend.question(messages, f"reward {self.name!r}, prompt {prompt.id}")
        return Case(places, (prompt.id, *(rollout.sibling for rollout in rollouts)), question)

    async def _hear(self, case: Case, attempt: int) -> Hearing:
        results = await _together(self._settle(case, repeat, attempt) for repeat in range(self.spec.repeats))
        read = [result for result in results if not isinstance(result, str)]
        unread = [result for result in results if isinstance(result, str)]
        return Hearing([value for value, _ in read], unread[-1] if unread else "", [text for _, text in read])

    async def _settle(self, case: Case, repeat: int, attempt: int) -> tuple[float, str] | str:
        """One verdict and its text, asked for until it can be read; or what was said at the last try, and why it is
        none."""
        unread = ""
        for turn in range(self.spec.attempts):
            self.counts["verdicts"] += 1
            key = (self.name, *case.key, repeat, attempt * self.spec.attempts + turn)
            text = await self.backend.answer(case.question, self._params, key)
            try:
                return self._verdict.read(text), text
            except Unread as error:
                self.counts["unparsed"] += 1
                if isinstance(error, Broken):
                    self.counts["verdict_errors"] += 1
                end = text if len(text) <= 100 else f"...{text[-100:]}"  # verdicts stand at the end
                unread = f"{short(end)}: {error}"
        return unread

    def _reward(self, group: Sequence[Rollout], place: int, hearings: Mapping[tuple[int, ...], Hearing]) -> float:
        """The mean over a response's cases. Of a pair both orders count or none: one alone would favour a place."""
        mine = [(places, hearing) for places, hearing in hearings.items() if place in places]
        worths = [
            hearing.mean if places[0] == place else 1.0 - hearing.mean
            for places, hearing in mine
            if hearing.verdicts and hearings[places[::-1]].verdicts
        ]
        if worths:
            return math.fsum(worths) / len(worths)
        num, unread = len(mine) * self.spec.repeats, [hearing.unread for _, hearing in mine if not hearing.verdicts]
        rollout = group[place]
        raise RewardError(
            f"reward {self.name!r}, prompt {rollout.prompt.id}: no verdict on sibling {rollout.sibling} could be read "
            f"in {self.spec.attempts} tries{f' of each of {num}' if num > 1 else ''}; the judge said last {unread[-1]} "
            f"(see {self.key}: verdict, template)"
        )


def pairs(num: int, opponents: int) -> list[tuple[int, int]]:
    """Each meets the next `opponents` in the circle; no pair twice. pairs(4, 1) == [(0, 1), (1, 2), (2, 3), (0, 3)]"""
    met = ((i, (i + step) % num) for step in range(1, min(opponents, num - 1) + 1) for i in range(num))
    return list(dict.fromkeys((min(pair), max(pair)) for pair in met))


async def _together(asked: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All at once. When one fails the group has no reward: nobody needs the others' answers, and some cost money."""
    tasks = [asyncio.ensure_future(one) for one in asked]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _spread(place: int, hearings: Mapping[tuple[int, ...], Hearing]) -> dict[str, float]:
    """How far the repeats of a case lie apart: the mean over a response's cases that have two or more."""
    spreads = [pstdev(h.verdicts) for places, h in hearings.items() if place in places and len(h.verdicts) > 1]
    return {"spread": math.fsum(spreads) / len(spreads)} if spreads else {}


def _notes(group: Sequence[Rollout], place: int, hearings: Mapping[tuple[int, ...], Hearing]) -> list[str]:
    """What was said of a response: the ends of the texts, where verdicts stand. Of a pair, which of the two it was."""
    notes = []
    for places, hearing in hearings.items():
        if place in places:
            other = [group[p].sibling for p in places if p != place]
            shown = f"[{'first' if places[0] == place else 'second'}, against sibling {other[0]}] " if other else ""
            ends = (text if len(text) <= NOTE_LENGTH else f"... {text[-NOTE_LENGTH:]}" for text in hearing.said)
            notes += [shown + text.strip() for text in ends]
    return notes


class Form:
    """What the judge is shown: a prompt and responses -> messages."""

    def __init__(self, spec: Judge, backend: JudgeBackend, key: str):
        self.spec, self.backend, self.key = spec, backend, key
        self._environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        self._template: Template | None = None

    def check(self, columns: Collection[str]) -> None:
        """The template compiles, names nothing that is not there, and shows the judge what is to be judged."""
        self._template = self._compile()
        responses = RESPONSES[self.spec.mode]
        tree = self._environment.parse(self._text())
        names = meta.find_undeclared_variables(tree)
        known = {*columns, "prompt", "messages", *responses}
        if unknown := sorted(names - known):
            raise UserError(
                f"{self.key}.template: nothing is called {', '.join(unknown)}; there are {', '.join(sorted(known))} "
                f"(mode: {self.spec.mode})"
            )
        for name in responses:
            if name not in names:
                raise UserError(f"{self.key}.template: expected {{{{ {name} }}}} in it: it is what is to be judged")
        own = "".join(data.data for data in tree.find_all(nodes.TemplateData))
        self.backend.check({"template": own, "system_prompt": self.spec.system_prompt or ""}, self._conversation("x"))

    def messages(self, prompt: Prompt, responses: Sequence[str]) -> list[Message]:
        """The template's text as the user's message. The row's columns stand below the names of our own."""
        if self._template is None:
            self._template = self._compile()
        shown = zip(RESPONSES[self.spec.mode], map(self.backend.plain, responses), strict=True)
        own = {"prompt": _prompt_text(prompt), "messages": list(prompt.messages), **dict(shown)}
        try:
            return self._conversation(self._template.render({**prompt.columns, **own}))
        except Exception as error:  # a template is a program over columns of any type
            raise RewardError(
                f"reward {self.spec.name!r}, prompt {prompt.id}: {self.key}.template does not render: {short(error)}"
            ) from error

    def _conversation(self, text: str) -> list[Message]:
        system = self.spec.system_prompt
        first = [{"role": "system", "content": system}] if system is not None else []
        return [*first, {"role": "user", "content": text}]

    def _text(self) -> str:
        """The template itself, or the content of the file it names. Only a template has braces."""
        if "{" in self.spec.template:
            return self.spec.template
        file = Path(self.spec.template).expanduser()
        if not file.is_file():
            raise UserError(f"{self.key}.template: no such file: {file} (expected a path, or a Jinja template)")
        return file.read_text(encoding="utf-8")

    def _compile(self) -> Template:
        try:
            return self._environment.from_string(self._text())
        except TemplateError as error:
            line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise UserError(f"{self.key}.template: no Jinja template: {line}{error.message}") from None


class Unread(ValueError):
    """No verdict can be read from a text; the message says why."""


class Broken(Unread):
    """The user's function raised."""


class Verdict:
    """A text -> what it is worth, by regular expression or by function."""

    def __init__(self, spec: Judge, key: str):
        self.spec, self.key = spec, key
        self._reader: Callable[[str], Any] | None = None
        pairwise = spec.mode == "pairwise"  # the second gets 1 minus it
        self._expected = "a number between 0 and 1 (mode: pairwise)" if pairwise else "a finite number"

    def check(self) -> None:
        self._reader = self._find()

    def read(self, text: str) -> float:
        if self._reader is None:
            self._reader = self._find()
        value = self._reader(text)
        if not self._is_worth(value):
            raise Unread(f"read as {short(value)}; expected {self._expected}")
        return float(value)

    def _is_worth(self, value: Any) -> bool:
        return is_finite(value) and (self.spec.mode == "pointwise" or 0 <= value <= 1)

    def _find(self) -> Callable[[str], Any]:
        key, verdict, values = f"{self.key}.verdict", self.spec.verdict, self.spec.values
        if FUNCTION.fullmatch(verdict):
            if values:
                raise UserError(f"{self.key}.values: expected none: the function {verdict} returns numbers itself")
            return self._by_function(load_function(verdict, key))
        try:
            pattern = re.compile(verdict)
        except re.error as error:
            raise UserError(f"{key}: {verdict!r} is no regular expression: {error}") from None
        if not pattern.groups:
            raise UserError(
                f"{key}: got {verdict!r}; expected a regular expression with a group in it, package.module:function "
                "or file.py:function"
            )
        if not values and WORDS.match(verdict):
            raise UserError(f"{self.key}.values: not set, but {verdict!r} finds words; expected what each is worth")
        return self._by_pattern(pattern, values)

    def _by_pattern(self, pattern: re.Pattern[str], values: Mapping[str, float]) -> Callable[[str], float]:
        """The first group of the last match, as a number or by what the word is worth."""
        worth = {word.strip().casefold(): value for word, value in values.items()}
        if len(worth) < len(values):
            raise UserError(f"{self.key}.values: got {', '.join(values)}; expected each word once, whatever its case")
        for word, value in values.items():
            if not self._is_worth(value):
                raise UserError(f"{self.key}.values.{word}: got {value}; expected {self._expected}")

        def read(text: str) -> float:
            found = [match[1] for match in pattern.finditer(text)]
            if not found or found[-1] is None:
                raise Unread(f"no match of {pattern.pattern}")
            word = found[-1].strip()
            if worth and word.casefold() not in worth:
                raise Unread(f"{word!r} is none of {', '.join(values)}")
            try:
                return worth[word.casefold()] if worth else float(word)
            except ValueError:
                raise Unread(f"{word!r} is no number") from None

        return read

    def _by_function(self, function: Callable[..., Any]) -> Callable[[str], Any]:
        if inspect.iscoroutinefunction(function):
            raise UserError(f"{self.key}.verdict: {self.spec.verdict} is async; expected a plain function of the text")

        def read(text: str) -> Any:
            try:
                return scalar(function(text))
            except Exception as error:
                raise Broken(f"{self.spec.verdict} raised {short(error)}") from error

        return read


def _prompt_text(prompt: Prompt) -> str:
    """The prompt as the dataset has it; of messages, what they say."""
    raw = prompt.columns.get("prompt", prompt.messages)
    return raw if isinstance(raw, str) else "\n".join(_content(message.get("content")) for message in raw)


def _content(content: Any) -> str:
    """A message's text; of a list of parts (text, images), its text."""
    if isinstance(content, list | tuple):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)
    return str(content or "")
