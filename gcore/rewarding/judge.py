"""A generative judge: another language model reads a response and writes a verdict.

    response ──JudgePrompt──> messages ──JudgeBackend──> text ──VerdictParser──> number ──mean──> reward
                                 ^                 │
                                 └── new sampling noise, while no verdict can be parsed

pointwise   a judge task is one response
pairwise    a judge task is two responses in an order; each pair is judged in both orders, so that a judge that prefers
            the first response gives both the same

Requests and their sampling noise depend only on the group: rewards do not depend on the order of the answers.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import pstdev
from typing import Any, TypeVar

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gcore import user_files
from gcore.config.judges import VerdictJudge
from gcore.rewarding.functions import load_function
from gcore.rewarding.judge_backend import JudgeBackend, Key
from gcore.rewarding.source import Answer, is_finite, scalar, short
from gcore.types import Message, Prompt, RewardError, Rollout, SamplingParams, UserError

T = TypeVar("T")

RESPONSES = {"pointwise": ("response",), "pairwise": ("response_a", "response_b")}
NOTE_LENGTH = 4000  # characters kept of a verdict's text
FUNCTION = re.compile(r"[^\s:\\(){}|*+?]+:[A-Za-z_]\w*")  # package.module:f, file.py:f; not a regex with a group
WORDS = re.compile(r"(?:[^\\(]|\\.|\(\?(?!P<))*\((?:\?P<\w+>)?[A-Za-z|\[\] ]+\)")  # the first group has only letters


@dataclass(frozen=True, slots=True)
class JudgeTask:
    """One response, or two in an order, to judge. JudgeTask(places=(0, 2), key=(70, 0, 2), question=[1, 6, ...])"""

    places: tuple[int, ...]  # indices in the group
    key: Key  # prompt id, siblings
    question: Any  # from JudgeBackend.question


@dataclass(frozen=True, slots=True)
class JudgeResult:
    """The result of a task.

    JudgeResult(verdicts=[1.0, 0.0], unparsed="'Hm': no match of ([AB])", texts=["A.", "B."])
    """

    verdicts: list[float]  # the parsed ones, in the order of the repeats
    unparsed: str  # the last text that could not be parsed, and why
    texts: list[str]  # the texts of the verdicts

    @property
    def mean(self) -> float:
        return math.fsum(self.verdicts) / len(self.verdicts)


class JudgeSource:
    """Implements source.Source. `backend` generates the texts: an engine of this run, a server, or a test's script."""

    attempts = 1  # retries are made here, per verdict; the rewarder would repeat the parsed verdicts too

    def __init__(self, spec: VerdictJudge, backend: JudgeBackend, key: str = "rewards.judges.0"):
        self.spec, self.backend, self.key = spec, backend, key
        self.name, self.weight = spec.name, spec.weight
        self.counts: Counter[str] = backend.counts
        self._params = SamplingParams(spec.max_response_length, temperature=spec.temperature, top_p=spec.top_p)
        self._prompt, self._parser = JudgePrompt(spec, backend, key), VerdictParser(spec, key)

    def check(self, columns: Collection[str]) -> None:
        self._prompt.check(columns)
        self._parser.check()

    async def reach(self) -> None:
        await self.backend.reach()

    def close(self) -> None:
        self.backend.close()

    async def answer(self, group: Sequence[Rollout], attempt: int) -> Answer:
        """One request per verdict, all at once. A prompt that is too long fails before any request is sent."""
        n = len(group)
        if self.spec.mode == "pointwise":
            orders: list[tuple[int, ...]] = [(i,) for i in range(n)]
        elif n == 1:  # an evaluation's greedy response: there is no other response to compare it with
            return Answer([None])
        else:
            orders = [order for i, j in pairs(n, self.spec.opponents) for order in ((i, j), (j, i))]
        tasks = [self._task(group, places) for places in orders]
        judged = await _gather_or_cancel(self._judge(task, attempt) for task in tasks)
        results = dict(zip(orders, judged, strict=True))
        return Answer(
            [self._reward(group, i, results) for i in range(n)],
            [_spread(i, results) for i in range(n)] if self.spec.repeats > 1 else [],
            [_notes(group, i, results) for i in range(n)],
        )

    def preview(self, group: Sequence[Rollout]) -> str:
        """The judge's prompt for the first response of the group (pairwise: for the first two). Raises RewardError."""
        rollouts = group[: len(RESPONSES[self.spec.mode])]
        self._task(group, tuple(range(len(rollouts))))  # raises if the prompt is too long
        return self.backend.text(self._messages(rollouts))

    async def ask(self, messages: Sequence[Message], key: Key, **params: Any) -> str:
        """The judge's answer to the caller's messages. `params` override fields of SamplingParams."""
        question = self.backend.question(messages, f"judge {self.name!r}")
        return await self.backend.answer(question, self._params.override(params, "ctx.ask"), (self.name, "say", *key))

    def _task(self, group: Sequence[Rollout], places: tuple[int, ...]) -> JudgeTask:
        rollouts = [group[place] for place in places]
        prompt = rollouts[0].prompt
        question = self.backend.question(self._messages(rollouts), f"reward {self.name!r}, prompt {prompt.id}")
        return JudgeTask(places, (prompt.id, *(rollout.sibling for rollout in rollouts)), question)

    def _messages(self, rollouts: Sequence[Rollout]) -> list[Message]:
        """A judge that sees gets the images of the prompt, then the responses that are images."""
        if not self.backend.sees:
            return self._prompt.messages(rollouts[0].prompt, [rollout.text for rollout in rollouts])
        made = [None if isinstance(rollout.output, str) else rollout.output for rollout in rollouts]
        texts = [rollout.text if image is None else "[image]" for rollout, image in zip(rollouts, made, strict=True)]
        given = rollouts[0].prompt.columns.get("images") or ()
        return self._prompt.messages(rollouts[0].prompt, texts, [*given, *(i for i in made if i is not None)])

    async def _judge(self, task: JudgeTask, attempt: int) -> JudgeResult:
        verdicts = await _gather_or_cancel(self._verdict(task, repeat, attempt) for repeat in range(self.spec.repeats))
        parsed = [verdict for verdict in verdicts if not isinstance(verdict, str)]
        unparsed = [verdict for verdict in verdicts if isinstance(verdict, str)]
        return JudgeResult(
            [value for value, _ in parsed], unparsed[-1] if unparsed else "", [text for _, text in parsed]
        )

    async def _verdict(self, task: JudgeTask, repeat: int, attempt: int) -> tuple[float, str] | str:
        """One verdict and its text, with retries until it can be parsed. Otherwise the last text, and why it was not
        parsed."""
        unparsed = ""
        for retry in range(self.spec.attempts):
            self.counts["verdicts"] += 1
            key = (self.name, *task.key, repeat, attempt * self.spec.attempts + retry)
            text = await self.backend.answer(task.question, self._params, key)
            try:
                return self._parser.parse(text), text
            except UnparsedVerdict as error:
                self.counts["unparsed"] += 1
                if isinstance(error, VerdictFunctionError):
                    self.counts["verdict_errors"] += 1
                end = text if len(text) <= 100 else f"...{text[-100:]}"  # verdicts are at the end
                unparsed = f"{short(end)}: {error}"
        return unparsed

    def _reward(self, group: Sequence[Rollout], place: int, results: Mapping[tuple[int, ...], JudgeResult]) -> float:
        """The mean over a response's tasks. Both orders of a pair count or none: one alone would be biased."""
        own = [(places, result) for places, result in results.items() if place in places]
        values = [
            result.mean if places[0] == place else 1.0 - result.mean
            for places, result in own
            if result.verdicts and results[places[::-1]].verdicts
        ]
        if values:
            return math.fsum(values) / len(values)
        num, unparsed = len(own) * self.spec.repeats, [result.unparsed for _, result in own if not result.verdicts]
        rollout = group[place]
        each = f" for each of {num} verdicts" if num > 1 else ""
        raise RewardError(
            f"reward {self.name!r}, prompt {rollout.prompt.id}: no verdict on sibling {rollout.sibling} could be "
            f"parsed in {self.spec.attempts} attempts{each}; the judge's last answer was {unparsed[-1]} "
            f"(see {self.key}: verdict, template)"
        )


def pairs(num: int, opponents: int) -> list[tuple[int, int]]:
    """Pairs each response with the next `opponents` in a ring, each pair once.

    pairs(4, 1) == [(0, 1), (1, 2), (2, 3), (0, 3)]
    """
    paired = ((i, (i + step) % num) for step in range(1, min(opponents, num - 1) + 1) for i in range(num))
    return list(dict.fromkeys((min(pair), max(pair)) for pair in paired))


async def _gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all at once. If one fails, the group has no reward: the others are cancelled, since some cost money."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _spread(place: int, results: Mapping[tuple[int, ...], JudgeResult]) -> dict[str, float]:
    """Standard deviation over the repeats of a task: the mean over a response's tasks with two or more verdicts."""
    spreads = [pstdev(r.verdicts) for places, r in results.items() if place in places and len(r.verdicts) > 1]
    return {"spread": math.fsum(spreads) / len(spreads)} if spreads else {}


def _notes(group: Sequence[Rollout], place: int, results: Mapping[tuple[int, ...], JudgeResult]) -> list[str]:
    """The judge's texts on a response, cut to their ends, where verdicts are. In a pair, also the response's place."""
    notes = []
    for places, result in results.items():
        if place in places:
            other = [group[p].sibling for p in places if p != place]
            shown = f"[{'first' if places[0] == place else 'second'}, against sibling {other[0]}] " if other else ""
            ends = (text if len(text) <= NOTE_LENGTH else f"... {text[-NOTE_LENGTH:]}" for text in result.texts)
            notes += [shown + text.strip() for text in ends]
    return notes


class JudgePrompt:
    """The judge's input: a prompt and responses -> messages."""

    def __init__(self, spec: VerdictJudge, backend: JudgeBackend, key: str):
        self.spec, self.backend, self.key = spec, backend, key
        self._environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        self._template: Template | None = None

    def check(self, columns: Collection[str]) -> None:
        """Checks that the template compiles, uses only known names, and contains the responses."""
        self._template = self._compile()
        responses = RESPONSES[self.spec.mode]
        tree = self._environment.parse(self._text())
        names = meta.find_undeclared_variables(tree)
        known = {*columns, "prompt", "messages", *responses}
        if unknown := sorted(names - known):
            raise UserError(
                f"{self.key}.template: unknown name {', '.join(unknown)}; expected names among "
                f"{', '.join(sorted(known))} (mode: {self.spec.mode})"
            )
        for name in responses:
            if name not in names:
                raise UserError(f"{self.key}.template: expected {{{{ {name} }}}} in it, the text to judge")
        own = "".join(data.data for data in tree.find_all(nodes.TemplateData))
        self.backend.check({"template": own, "system_prompt": self.spec.system_prompt or ""}, self._conversation("x"))

    def messages(self, prompt: Prompt, responses: Sequence[str], images: Sequence[Any] = ()) -> list[Message]:
        """The rendered template as a user message, after the images. Our own names override columns of the same
        name."""
        if self._template is None:
            self._template = self._compile()
        shown = zip(RESPONSES[self.spec.mode], map(self.backend.escape, responses), strict=True)
        own = {"prompt": _prompt_text(prompt), "messages": list(prompt.messages), **dict(shown)}
        try:
            return self._conversation(self._template.render({**prompt.columns, **own}), images)
        except Exception as error:  # a template can fail in any way on columns of any type
            raise RewardError(
                f"reward {self.spec.name!r}, prompt {prompt.id}: {self.key}.template does not render: {short(error)}"
            ) from error

    def _conversation(self, text: str, images: Sequence[Any] = ()) -> list[Message]:
        system = self.spec.system_prompt
        first = [{"role": "system", "content": system}] if system is not None else []
        parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
        return [*first, {"role": "user", "content": parts if images else text}]

    def _text(self) -> str:
        """The template itself, or the content of the file that the key names. A template contains a brace."""
        if "{" in self.spec.template:
            return self.spec.template
        file = user_files.find(self.spec.template)
        if not file.is_file():
            raise UserError(f"{self.key}.template: no such file: {file} (expected a path, or a Jinja template)")
        return file.read_text(encoding="utf-8")

    def _compile(self) -> Template:
        try:
            return self._environment.from_string(self._text())
        except TemplateError as error:
            line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise UserError(f"{self.key}.template: not a valid Jinja template: {line}{error.message}") from None


class UnparsedVerdict(ValueError):
    """No verdict can be parsed from a text; the message gives the reason."""


class VerdictFunctionError(UnparsedVerdict):
    """The user's function raised."""


class VerdictParser:
    """Converts a text to a number, by regular expression or by function."""

    def __init__(self, spec: VerdictJudge, key: str):
        self.spec, self.key = spec, key
        self._parse: Callable[[str], Any] | None = None
        pairwise = spec.mode == "pairwise"  # the second response gets 1 minus the value
        self._expected = "a number between 0 and 1 (mode: pairwise)" if pairwise else "a finite number"

    def check(self) -> None:
        self._parse = self._make_parser()

    def parse(self, text: str) -> float:
        if self._parse is None:
            self._parse = self._make_parser()
        value = self._parse(text)
        if not self._is_valid(value):
            raise UnparsedVerdict(f"parsed as {short(value)}; expected {self._expected}")
        return float(value)

    def _is_valid(self, value: Any) -> bool:
        return is_finite(value) and (self.spec.mode == "pointwise" or 0 <= value <= 1)

    def _make_parser(self) -> Callable[[str], Any]:
        key, verdict, values = f"{self.key}.verdict", self.spec.verdict, self.spec.values
        if FUNCTION.fullmatch(verdict):
            if values:
                raise UserError(f"{self.key}.values: expected none, because the function {verdict} returns numbers")
            return self._by_function(load_function(verdict, key))
        try:
            pattern = re.compile(verdict)
        except re.error as error:
            raise UserError(f"{key}: {verdict!r} is not a regular expression: {error}") from None
        if not pattern.groups:
            raise UserError(
                f"{key}: got {verdict!r}; expected a regular expression with a group in it, package.module:function "
                "or file.py:function"
            )
        if not values and WORDS.match(verdict):
            raise UserError(f"{self.key}.values: not set, but {verdict!r} matches words; expected a number per word")
        return self._by_pattern(pattern, values)

    def _by_pattern(self, pattern: re.Pattern[str], values: Mapping[str, float]) -> Callable[[str], float]:
        """The first group of the last match, as a number or looked up in `values`."""
        by_word = {word.strip().casefold(): value for word, value in values.items()}
        if len(by_word) < len(values):
            raise UserError(f"{self.key}.values: got {', '.join(values)}; expected each word once (case is ignored)")
        for word, value in values.items():
            if not self._is_valid(value):
                raise UserError(f"{self.key}.values.{word}: got {value}; expected {self._expected}")

        def parse(text: str) -> float:
            found = [match[1] for match in pattern.finditer(text)]
            if not found or found[-1] is None:
                raise UnparsedVerdict(f"no match of {pattern.pattern}")
            word = found[-1].strip()
            if by_word and word.casefold() not in by_word:
                raise UnparsedVerdict(f"{word!r} is none of {', '.join(values)}")
            try:
                return by_word[word.casefold()] if by_word else float(word)
            except ValueError:
                raise UnparsedVerdict(f"{word!r} is not a number") from None

        return parse

    def _by_function(self, function: Callable[..., Any]) -> Callable[[str], Any]:
        if inspect.iscoroutinefunction(function):
            raise UserError(f"{self.key}.verdict: {self.spec.verdict} is async; expected a plain function of the text")

        def parse(text: str) -> Any:
            try:
                return scalar(function(text))
            except Exception as error:
                raise VerdictFunctionError(f"{self.spec.verdict} raised {short(error)}") from error

        return parse


def _prompt_text(prompt: Prompt) -> str:
    """The prompt as in the dataset; for messages, their text."""
    raw = prompt.columns.get("prompt", prompt.messages)
    return raw if isinstance(raw, str) else "\n".join(_content(message.get("content")) for message in raw)


def _content(content: Any) -> str:
    """A message's text; for a list of parts (text, images), the text parts."""
    if isinstance(content, list | tuple):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)
    return str(content or "")
