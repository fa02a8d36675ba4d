"""A generative judge: another language model reads a response and writes a verdict.

    response ──JudgePrompt──> messages ──JudgeBackend──> text ──make_parser──> number ──mean──> reward
                                 ^                 │
                                 └── new sampling noise, while no verdict can be parsed

pointwise   a task is one response
pairwise    a task is two responses in an order; each pair is judged in both orders, so that a judge that prefers the
            first response gives both the same

Requests and their sampling noise depend only on the group: rewards do not depend on the order of the answers.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any, TypeVar

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gcore.config.judges import VerdictJudge
from gcore.rewarding.judge_backend import JudgeBackend, Key
from gcore.rewarding.source import Answer, Source, is_finite, scalar, short
from gcore.types import Message, Prompt, RewardError, Rollout, SamplingParams, UserError
from gcore.user_files import load_function, template_text

T = TypeVar("T")

RESPONSES = {"pointwise": ("response",), "pairwise": ("response_a", "response_b")}
NOTE_LENGTH = 4000  # characters kept of a verdict's text
FUNCTION = re.compile(r"[^\s:\\(){}|*+?]+:[A-Za-z_]\w*")  # package.module:f, file.py:f; not a regex with a group
WORDS = re.compile(r"(?:[^\\(]|\\.|\(\?(?!P<))*\((?:\?P<\w+>)?[A-Za-z|\[\] ]+\)")  # the first group has only letters


@dataclass(frozen=True, slots=True)
class JudgeResult:
    """Of a task. JudgeResult(verdicts=[1.0, 0.0], unparsed="'Hm': no match of ([AB])", texts=["A.", "B."])"""

    verdicts: list[float]  # the parsed ones, in the order of the repeats
    unparsed: str  # the last text that could not be parsed, and why
    texts: list[str]  # the texts of the verdicts


class JudgeSource(Source):
    """`backend` generates the texts: an engine of this run, a server, or a test's script. Retries are made here, per
    verdict; the rewarder would repeat the parsed verdicts too."""

    def __init__(self, spec: VerdictJudge, backend: JudgeBackend, key: str = "rewards.judges.0"):
        super().__init__(spec.name, spec.weight)
        self.spec, self.backend, self.key, self.counts = spec, backend, key, backend.counts
        self._params = SamplingParams(spec.max_response_length, temperature=spec.temperature, top_p=spec.top_p)
        self._prompt, self._parse = JudgePrompt(spec, backend, key), make_parser(spec, key)

    def check(self, columns: Collection[str]) -> None:
        self._prompt.check(columns)

    async def reach(self) -> None:
        await self.backend.reach()

    def close(self) -> None:
        self.backend.close()

    async def answer(self, group: Sequence[Rollout]) -> Answer:
        """One request per verdict, all at once. A prompt that is too long fails before any request is sent. A task is
        named by the places of its responses in the group."""
        n = len(group)
        if self.spec.mode == "pointwise":
            tasks: list[tuple[int, ...]] = [(i,) for i in range(n)]
        elif n == 1:  # an evaluation's greedy response: there is no other response to compare it with
            return Answer([None])
        else:
            tasks = [order for i, j in pairs(n, self.spec.opponents) for order in ((i, j), (j, i))]
        rollouts = [[group[place] for place in places] for places in tasks]
        questions = [self._question(judged) for judged in rollouts]
        keys = [(judged[0].prompt.id, *(rollout.sibling for rollout in judged)) for judged in rollouts]
        results = dict(zip(tasks, await _gather_or_cancel(map(self._judge, questions, keys)), strict=True))
        return Answer(
            [self._reward(group, i, results) for i in range(n)],
            [_spread(i, results) for i in range(n)] if self.spec.repeats > 1 else [],
            [_notes(group, i, results) for i in range(n)],
        )

    def preview(self, group: Sequence[Rollout]) -> str:
        """The judge's prompt for the first response of the group (pairwise: for the first two). Raises RewardError."""
        rollouts = group[: len(RESPONSES[self.spec.mode])]
        self._question(rollouts)  # raises if the prompt is too long
        return self.backend.text(self._messages(rollouts))

    async def ask(self, messages: Sequence[Message], key: Key, **params: Any) -> str:
        """The judge's answer to the caller's messages. `params` override fields of SamplingParams."""
        question = self.backend.question(messages, f"judge {self.name!r}")
        return await self.backend.answer(question, self._params.override(params, "ctx.ask"), (self.name, "say", *key))

    def _question(self, rollouts: Sequence[Rollout]) -> Any:
        where = f"reward {self.name!r}, prompt {rollouts[0].prompt.id}"
        return self.backend.question(self._messages(rollouts), where)

    def _messages(self, rollouts: Sequence[Rollout]) -> list[Message]:
        """A judge that sees gets the images of the prompt, then the responses that are images."""
        if not self.backend.sees:
            return self._prompt.messages(rollouts[0].prompt, [rollout.text for rollout in rollouts])
        made = [None if isinstance(rollout.output, str) else rollout.output for rollout in rollouts]
        texts = [rollout.text if image is None else "[image]" for rollout, image in zip(rollouts, made, strict=True)]
        given = rollouts[0].prompt.columns.get("images") or ()
        return self._prompt.messages(rollouts[0].prompt, texts, [*given, *(i for i in made if i is not None)])

    async def _judge(self, question: Any, key: Key) -> JudgeResult:
        """`key`: prompt id, siblings."""
        verdicts = await _gather_or_cancel(self._verdict(question, (*key, i)) for i in range(self.spec.repeats))
        parsed = [verdict for verdict in verdicts if not isinstance(verdict, str)]
        unparsed = [verdict for verdict in verdicts if isinstance(verdict, str)]
        return JudgeResult(
            [value for value, _ in parsed], unparsed[-1] if unparsed else "", [text for _, text in parsed]
        )

    async def _verdict(self, question: Any, key: Key) -> tuple[float, str] | str:
        """One verdict and its text, with retries until it can be parsed. Otherwise the last text, and why it was not
        parsed."""
        unparsed = ""
        for retry in range(self.spec.attempts):
            self.counts["verdicts"] += 1
            text = await self.backend.answer(question, self._params, (self.name, *key, retry))
            try:
                return self._parse(text), text
            except UnparsedVerdict as error:
                self.counts["unparsed"] += 1
                if isinstance(error, VerdictFunctionError):
                    self.counts["verdict_errors"] += 1
                end = text if len(text) <= 100 else f"...{text[-100:]}"  # verdicts are at the end
                unparsed = f"{short(end)}: {error}"
        return unparsed

    def _reward(self, group: Sequence[Rollout], place: int, results: Mapping[tuple[int, ...], JudgeResult]) -> float:
        """The mean over a response's tasks. Both orders of a pair count or none: one alone would be biased."""
        judged = [(places, result) for places, result in results.items() if place in places]
        values = [
            fmean(result.verdicts) if places[0] == place else 1.0 - fmean(result.verdicts)
            for places, result in judged
            if result.verdicts and results[places[::-1]].verdicts
        ]
        if values:
            return fmean(values)
        unparsed = [result.unparsed for _, result in judged if not result.verdicts]
        rollout, num = group[place], len(judged) * self.spec.repeats
        per_verdict = f" for each of {num} verdicts" if num > 1 else ""
        raise RewardError(
            f"reward {self.name!r}, prompt {rollout.prompt.id}: no verdict on sibling {rollout.sibling} could be "
            f"parsed in {self.spec.attempts} attempts{per_verdict}; the judge's last answer was {unparsed[-1]} "
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
    return {"spread": fmean(spreads)} if spreads else {}


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
    """The judge's input: a prompt and responses -> messages. The template is compiled here, before the run."""

    def __init__(self, spec: VerdictJudge, backend: JudgeBackend, key: str):
        self.spec, self.backend, self.key = spec, backend, key
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        text = template_text(spec.template, f"{key}.template")
        try:
            self._tree, self._template = environment.parse(text), environment.from_string(text)
        except TemplateError as error:
            line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise UserError(f"{key}.template: not a valid Jinja template: {line}{error.message}") from None

    def check(self, columns: Collection[str]) -> None:
        """The template uses only known names, and contains the responses."""
        responses, names = RESPONSES[self.spec.mode], meta.find_undeclared_variables(self._tree)
        known = {*columns, "prompt", "messages", *responses}
        if unknown := sorted(names - known):
            raise UserError(
                f"{self.key}.template: unknown name {', '.join(unknown)}; expected names among "
                f"{', '.join(sorted(known))} (mode: {self.spec.mode})"
            )
        for name in responses:
            if name not in names:
                raise UserError(f"{self.key}.template: expected {{{{ {name} }}}} in it, the text to judge")
        own = "".join(data.data for data in self._tree.find_all(nodes.TemplateData))
        self.backend.check({"template": own, "system_prompt": self.spec.system_prompt or ""}, self._conversation("x"))

    def messages(self, prompt: Prompt, responses: Sequence[str], images: Sequence[Any] = ()) -> list[Message]:
        """The rendered template as a user message, after the images. Our own names override columns of the same
        name."""
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


def _prompt_text(prompt: Prompt) -> str:
    """The prompt as in the dataset; for messages, their text."""
    raw = prompt.columns.get("prompt", prompt.messages)
    return raw if isinstance(raw, str) else "\n".join(_content(message.get("content")) for message in raw)


def _content(content: Any) -> str:
    """A message's text; for a list of parts (text, images), the text parts."""
    if isinstance(content, list | tuple):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)
    return str(content or "")


class UnparsedVerdict(ValueError):
    """No verdict can be parsed from a text; the message gives the reason."""


class VerdictFunctionError(UnparsedVerdict):
    """The user's function raised."""


def make_parser(spec: VerdictJudge, key: str) -> Callable[[str], float]:
    """Converts the text of a verdict to a number, by regular expression or by function. Raises UnparsedVerdict."""
    expected = "a finite number"
    if spec.mode == "pairwise":  # the second response gets 1 minus the value
        expected = "a number between 0 and 1 (mode: pairwise)"

    def is_valid(value: Any) -> bool:
        return is_finite(value) and (spec.mode == "pointwise" or 0 <= value <= 1)

    for word, value in spec.values.items():
        if not is_valid(value):
            raise UserError(f"{key}.values.{word}: got {value}; expected {expected}")
    read = _by_function(spec, key) if FUNCTION.fullmatch(spec.verdict) else _by_pattern(spec, key)

    def parse(text: str) -> float:
        value = read(text)
        if not is_valid(value):
            raise UnparsedVerdict(f"parsed as {short(value)}; expected {expected}")
        return float(value)

    return parse


def _by_function(spec: VerdictJudge, key: str) -> Callable[[str], Any]:
    if spec.values:
        raise UserError(f"{key}.values: expected none, because the function {spec.verdict} returns numbers")
    function = load_function(spec.verdict, f"{key}.verdict")
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{key}.verdict: {spec.verdict} is async; expected a plain function of the text")

    def read(text: str) -> Any:
        try:
            return scalar(function(text))
        except Exception as error:
            raise VerdictFunctionError(f"{spec.verdict} raised {short(error)}") from error

    return read


def _by_pattern(spec: VerdictJudge, key: str) -> Callable[[str], float]:
    """The first group of the last match, as a number or looked up in `values`."""
    try:
        pattern = re.compile(spec.verdict)
    except re.error as error:
        raise UserError(f"{key}.verdict: {spec.verdict!r} is not a regular expression: {error}") from None
    if not pattern.groups:
        raise UserError(
            f"{key}.verdict: got {spec.verdict!r}; expected a regular expression with a group in it, "
            "package.module:function or file.py:function"
        )
    if not spec.values and WORDS.match(spec.verdict):
        raise UserError(f"{key}.values: not set, but {spec.verdict!r} matches words; expected a number per word")
    by_word = {word.strip().casefold(): value for word, value in spec.values.items()}
    if len(by_word) < len(spec.values):
        raise UserError(f"{key}.values: got {', '.join(spec.values)}; expected each word once (case is ignored)")

    def read(text: str) -> float:
        words = [match[1] for match in pattern.finditer(text)]
        if not words or words[-1] is None:
            raise UnparsedVerdict(f"no match of {pattern.pattern}")
        word = words[-1].strip()
        if by_word and word.casefold() not in by_word:
            raise UnparsedVerdict(f"{word!r} is none of {', '.join(spec.values)}")
        try:
            return by_word[word.casefold()] if by_word else float(word)
        except ValueError:
            raise UnparsedVerdict(f"{word!r} is not a number") from None

    return read
