"""Rows -> prompts, in one global order.

    rows ──measure (one part per controller)──> kept ──PromptSource.at(cursor)──> Prompt

The order is a function of (seed, epoch, kept rows) only: a cursor is the same prompt in every controller, for any
number of controllers, and after a restart.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gcore.config.data import Data, Dataset
from gcore.config.tree import Config
from gcore.content.answers import answer_steps, render, scored_conversation
from gcore.content.families import KINDS
from gcore.content.media import BadMedia
from gcore.content.processor import MediaProcessor
from gcore.content.tokens import Tokens
from gcore.prompts.answers import ANSWERS, load_answered
from gcore.prompts.media import COLUMNS, MediaReader, messages_with_media
from gcore.prompts.rows import (
    answer_of,
    check_media,
    check_numbers,
    load_rows,
    prompt_column,
    prompt_of,
    reward_columns,
)
from gcore.prompts.stored import media_folder
from gcore.prompts.tokenizer import no_template
from gcore.types import Bools, Message, Prompt, UserError

Row = Mapping[str, Any]
MAX_CHECKED = 200  # rows per dataset


class Templater:
    """Row -> messages -> text -> tokens, for one of the datasets of `data`. `eval_set`: its name, of several.
    `processor`: of a model that takes media. Of answers to train on, `stops` are the tokens that end one; `scored`:
    they are whole conversations, for a reward model."""

    def __init__(
        self,
        tokenizer: Any,
        data: Data,
        split: Literal["train", "eval"] = "train",
        eval_set: str = "",
        processor: MediaProcessor | None = None,
        stops: Sequence[int] = (),
        scored: bool = False,
    ):
        self.tokenizer = tokenizer
        self.spec: Dataset = data.train if split == "train" else data.eval_sets[eval_set]
        self.key = f"data.{split}" + (f".{eval_set}" if eval_set else "")
        self.system_prompt = data.system_prompt
        self._alphabet = frozenset(getattr(tokenizer, "alphabet", ""))
        self._chat = bool(tokenizer.chat_template)
        self._stops, self._scored = stops, scored
        self._processor, self._reader = processor, MediaReader(data.media, media_folder(self.spec))
        self.media = processor.kinds if processor is not None else frozenset[str]()  # of prompts
        if data.system_prompt is not None and not self._chat:
            raise no_template("data.system_prompt")

    def messages(self, row: Row) -> tuple[Message, ...]:
        """A string becomes a user message after the system prompt; messages are unchanged."""
        prompt = prompt_of(row, self.spec, self.key)
        if not isinstance(prompt, str):
            return tuple(prompt)
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt is not None else []
        return (*system, {"role": "user", "content": prompt})

    def content(self, row: Row) -> tuple[tuple[Message, ...], str, Tokens]:
        """Messages, text and content of the model's input.

        With a chat template: the rendered text and its tokens, without more special tokens (the template contains
        them). Without a template: the unchanged string, with the special tokens that the tokenizer prepends, such as
        bos. With media: messages have them as parts without content. Raises BadMedia if one cannot be used.
        """
        messages = self.messages(row)
        if self._processor is None:
            check_media(row, self.key)
        else:
            messages, values = messages_with_media(row, messages)
            if values and not self._chat:
                raise no_template(f"{self.key}: a prompt with media")
        if self._processor is not None and self._chat:
            text = self._text(messages)
            try:
                return messages, text, self._processor.content(text, self._reader.read(values))
            except BadMedia:
                raise
            except UserError as error:
                raise BadMedia(f"{self.key}: {error}") from None
        if self._chat:
            text = self._text(messages)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            text, ids = self._plain(row)
        return messages, text, Tokens(np.asarray(ids, dtype=np.int32))

    def _text(self, messages: Sequence[Message]) -> str:
        self._check_alphabet([text for m in messages for text in _texts(m.get("content"))])
        try:
            return render(self.tokenizer, messages, add_generation_prompt=True)
        except UserError as error:
            raise UserError(f"{self.key}: {error} (change model.chat_template or data.system_prompt)") from None

    def _plain(self, row: Row) -> tuple[str, list[int]]:
        text = prompt_of(row, self.spec, self.key)
        if not isinstance(text, str):
            raise no_template(f"{self.key}: column {prompt_column(row, self.spec, self.key)!r} holds messages")
        self._check_alphabet([text])
        ids: list[int] = self.tokenizer(text)["input_ids"]
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if bos is not None and ids[:2] == [bos, bos]:  # the text contains bos too
            ids = ids[1:]
        if ids and ids[-1] == eos and not text.endswith(str(self.tokenizer.eos_token)):
            ids = ids[:-1]  # some tokenizers append eos, but the response continues this text
        if not ids:
            raise UserError(f"{self.key}: an empty prompt has no tokens; expected text")
        return text, ids

    def demonstration(self, row: Row) -> Tokens:
        """The response to imitate, then eos: the column `demonstration` if not null, else the reference answer."""
        answer = row["demonstration"] if row.get("demonstration") is not None else answer_of(row, self.spec)
        if answer is None:
            raise UserError(f"{self.key}: no answer to demonstrate in this row (set {self.key}.answer_column)")
        self._check_alphabet([str(answer)])
        return answer_steps(self.tokenizer, (), (), str(answer))[0]

    def answers(self, row: Row) -> list[tuple[Tokens, Bools]]:
        """The answers of a row of prompts/answers.py: the steps of each one, or the whole conversations, and which of
        the steps count in the loss."""
        answers, messages = [], self.messages(row)
        for answer in row[ANSWERS]:
            self._check_alphabet([answer] if isinstance(answer, str) else [m.get("content") for m in answer])
            try:
                if self._scored:
                    answers.append(scored_conversation(self.tokenizer, messages, answer))
                else:
                    answers.append(answer_steps(self.tokenizer, self._stops, messages, answer))
            except UserError as error:
                raise UserError(f"{self.key}: {error}") from None
        return answers

    def prompt(self, row: Row, index: int, cursor: int) -> Prompt:
        """The row as a Prompt. `columns["prompt"]` is the prompt as in the dataset: rewards receive this form."""
        messages, text, content = self.content(row)
        columns = reward_columns(row, self.spec, self.key)
        if content.media:  # references instead of bytes
            columns = {name: value for name, value in columns.items() if name not in COLUMNS}
            columns["prompt"] = list(messages)
            for medium in content.media:
                columns.setdefault(KINDS[medium.kind].rewards, []).append(medium.array)
        return Prompt(id=cursor, row=index, messages=messages, text=text, content=content, columns=columns)

    def length(self, prompt: Prompt) -> int:
        """In the unit of data.max_prompt_length."""
        return prompt.content.size

    def _check_alphabet(self, contents: Sequence[Any]) -> None:
        if self._alphabet:  # of a model built from scratch: unknown characters would silently become <unk>
            missing = {c for content in contents if isinstance(content, str) for c in content} - self._alphabet
            if missing:
                unknown = "".join(sorted(missing))
                raise UserError(
                    f"{self.key}: no token for the characters {unknown!r} (add them to model.build.alphabet)"
                )


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [str(part["text"]) for part in content or () if isinstance(part, Mapping) and "text" in part]


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured(kept=[0, 2, 3], too_long=[1], digest=0x9f86...): row indices of the dataset, ascending"""

    kept: list[int]
    too_long: list[int]
    equal: list[int] = field(default_factory=list)  # pairs whose two answers are equal: neither is preferred
    digest: int = 0  # of the content of the kept rows; those of parts are added
    bad: dict[int, str] = field(default_factory=dict)  # rows whose media cannot be used, and why
    with_media: int = 0  # of the kept rows


def add_digests(parts: Iterable[int]) -> str:
    """Of the content of a dataset; the same for any number of parts."""
    return f"{sum(parts) % 2**256:064x}"


def sample_of(num_rows: int, most: int = MAX_CHECKED) -> tuple[int, ...]:
    """Rows to check: all, or `most` of them, evenly from the first to the last. sample_of(9, 3) == (0, 4, 8)"""
    if num_rows <= most:
        return tuple(range(num_rows))
    return tuple(i * (num_rows - 1) // (most - 1) for i in range(most))


def sample_digest(rows: Sequence[Row]) -> str:
    """Of the columns of a sample: tells most other datasets apart, without templates, and in a moment."""
    return add_digests(_digest(index, rows[index], b"") for index in sample_of(len(rows)))


def _digest(index: int, row: Row, context: bytes) -> int:
    """Of all that a run uses of a row: the context (tokens and images of the prompt), and the columns that rewards and
    the warm start read. Values that are no JSON (images) count by their type."""
    columns = json.dumps(dict(row), sort_keys=True, default=lambda value: type(value).__name__)
    content = hashlib.sha256(f"{index} {columns} ".encode())
    content.update(context)
    return int.from_bytes(content.digest(), "big")


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """Of rows with answers to train on. AnswerLimits(longest=256, pairs=True)"""

    longest: int  # tokens of one
    pairs: bool = False  # the two of a row differ


def rows_of(
    config: Config, split: Literal["train", "eval"], templater: Templater
) -> tuple[Sequence[Row], AnswerLimits | None]:
    """The rows of a dataset, and the limits of their answers, if they have answers to train on."""
    dataset, key, needs = templater.spec, templater.key, config.needs
    if not config.trains_on_answers(split):
        return load_rows(dataset, key, templater.media), None
    longest = config.generation.max_response_length
    if config.objective == "reward_model":  # its answers are whole conversations
        longest += config.data.max_prompt_length
    return load_answered(dataset, needs, key), AnswerLimits(longest, needs.pairs and not needs.labels)


def measure(
    rows: Sequence[Row],
    templater: Templater,
    max_length: int,
    part: int = 0,
    parts: int = 1,
    answers: AnswerLimits | None = None,
    check_columns: Callable[[Collection[str]], None] | None = None,
) -> Measured:
    """The rows that have at most `max_length` tokens after templating. A controller measures i % parts == part.
    `answers`: those to train on are short enough too. `check_columns`: raises UserError if the rewards need other
    columns than a row has."""
    kept, too_long, equal, digest, bad, with_media = list[int](), list[int](), list[int](), 0, dict[int, str](), 0
    checked = set[frozenset[str]]()
    for index in range(part, len(rows), parts):
        row = rows[index]
        try:
            check_numbers(row, templater.key)
            names = frozenset(reward_columns(row, templater.spec, templater.key))
            if check_columns is not None and names not in checked:
                check_columns(names)
                checked.add(names)
            _, _, content = templater.content(row)
            own = [answer for answer, _ in templater.answers(row)] if answers is not None else []
        except BadMedia as error:
            bad[index] = str(error)
            continue
        except UserError as error:
            raise UserError(f"row {index}: {error}") from None
        if answers is not None and answers.pairs and len({(a.context_bytes(), a.digest()) for a in own}) == 1:
            equal.append(index)
        elif content.size > max_length or (answers is not None and any(a.size > answers.longest for a in own)):
            too_long.append(index)
        else:
            kept.append(index)
            with_media += bool(content.media)
            digest += _digest(index, row, content.context_bytes())
    return Measured(kept, too_long, equal, digest, bad, with_media)


def check_bad_rows(bad: Mapping[int, str], num_rows: int, limit: int, key: str) -> str | None:
    """The message about rows whose media cannot be used; None: there are none. Raises UserError above the limit."""
    if not bad:
        return None
    shown = "; ".join(f"row {index}: {bad[index]}" for index in sorted(bad)[:3])
    text = f"{key}: {len(bad)} of {num_rows} rows have media that cannot be used: {shown}"
    if len(bad) > limit:
        raise UserError(f"{text} (at most {limit} may be dropped: data.media.max_bad_rows)")
    return f"{text} (dropped, data.media.max_bad_rows={limit})"


class PromptSource:
    """The infinite global order of prompts: `at(cursor)`. Each epoch contains every kept row once. `digest`: of their
    content."""

    def __init__(
        self,
        rows: Sequence[Row],
        kept: Iterable[int],
        templater: Templater,
        seed: int,
        shuffle: bool = True,
        digest: str = "",
    ):
        self.kept = np.unique(np.asarray(list(kept), dtype=np.int64))  # sorted: parts may arrive in any order
        self.rows, self.templater, self.seed, self.shuffle, self.digest = rows, templater, seed, shuffle, digest
        self._given: tuple[int, npt.NDArray[np.int64]] | None = None  # of a curriculum: its first cursor, and rows

    def __len__(self) -> int:
        """Prompts per epoch."""
        return len(self.kept)

    def at(self, cursor: int) -> Prompt:
        index = self.row(cursor)
        return self.templater.prompt(self.rows[index], index, cursor)

    def demonstration(self, cursor: int) -> Tokens:
        return self.templater.demonstration(self.rows[self.row(cursor)])

    def row(self, cursor: int) -> int:
        """The index of the dataset's row at a cursor."""
        if cursor < 0:
            raise ValueError(f"cursor: expected 0 or more, got {cursor}")
        if self._given is not None:
            first, rows = self._given
            assert cursor >= first, f"prompt {cursor} is of an earlier step; this one began with {first}"
            return int(rows[(cursor - first) % len(rows)])
        epoch, position = divmod(cursor, len(self.kept))
        return int(self.kept[epoch_order(self.seed, epoch, len(self.kept))[position] if self.shuffle else position])

    def give_order(self, first: int, rows: npt.NDArray[np.int64]) -> None:
        """From the cursor `first` on, prompts have these rows, over and over."""
        self._given = first, rows


@functools.lru_cache(maxsize=2)  # requests may span two epochs
def epoch_order(seed: int, epoch: int, number: int) -> npt.NDArray[np.int64]:
    """Ranks of raw Philox numbers. Generator.permutation may change between numpy releases."""
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(number), kind="stable")
