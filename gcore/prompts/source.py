"""Rows -> prompts, in one global order.

    rows ──measure (one part per controller)──> kept ──PromptSource.at(cursor)──> Prompt

The order is a function of (seed, epoch, kept rows) only: a cursor is the same prompt in every controller, for any
number of controllers, and after a restart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gcore.config.tree import Data, Dataset
from gcore.content.tokens import Tokens
from gcore.prompts.rows import answer_of, check_media, prompt_column, prompt_of
from gcore.prompts.tokenizer import no_template
from gcore.types import Ints, Message, Prompt, UserError

Row = Mapping[str, Any]


class Templater:
    """Row -> messages -> text -> tokens, for one of the datasets of `data`."""

    def __init__(self, tokenizer: Any, data: Data, split: Literal["train", "eval"] = "train"):
        spec = data.train if split == "train" else data.eval
        if spec is None:
            raise UserError("data.eval: not set; expected a dataset of held-out prompts")
        self.tokenizer = tokenizer
        self.spec: Dataset = spec
        self.key = f"data.{split}"
        self.system_prompt = data.system_prompt
        self._alphabet = frozenset(getattr(tokenizer, "alphabet", ""))
        self._chat = bool(tokenizer.chat_template)
        if data.system_prompt is not None and not self._chat:
            raise no_template("data.system_prompt")

    def messages(self, row: Row) -> tuple[Message, ...]:
        """A string becomes a user message after the system prompt; messages are unchanged."""
        prompt = prompt_of(row, self.spec, self.key)
        if not isinstance(prompt, str):
            return tuple(prompt)
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt is not None else []
        return (*system, {"role": "user", "content": prompt})

    def render(self, row: Row) -> tuple[tuple[Message, ...], str, Ints]:
        """Messages, text and tokens of the model's input.

        With a chat template: the rendered text and its tokens, without more special tokens (the template contains
        them). Without a template: the unchanged string, with the special tokens that the tokenizer prepends, such as
        bos.
        """
        from jinja2 import TemplateError

        check_media(row, self.key)
        messages = self.messages(row)
        if not self._chat:
            return messages, *self._plain(row)
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError) as error:  # an unknown role, content that is not text, ...
            raise UserError(
                f"{self.key}: the chat template rejects messages of roles {[m['role'] for m in messages]}: "
                f"{' '.join(str(error).split())} (change model.chat_template or data.system_prompt)"
            ) from None
        return messages, text, self._tokens(text, [m.get("content") for m in messages])

    def _plain(self, row: Row) -> tuple[str, Ints]:
        text = prompt_of(row, self.spec, self.key)
        if not isinstance(text, str):
            raise no_template(f"{self.key}: column {prompt_column(row, self.spec, self.key)!r} holds messages")
        self._check_alphabet([text])
        tokens: list[int] = self.tokenizer(text)["input_ids"]
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if bos is not None and tokens[:2] == [bos, bos]:  # the text contains bos too
            tokens = tokens[1:]
        if tokens and tokens[-1] == eos and not text.endswith(str(self.tokenizer.eos_token)):
            tokens = tokens[:-1]  # some tokenizers append eos, but the response continues this text
        if not tokens:
            raise UserError(f"{self.key}: an empty prompt has no tokens; expected text")
        return text, np.asarray(tokens, dtype=np.int32)

    def demonstration(self, row: Row) -> Tokens:
        """The response to imitate, then eos: the column `demonstration` if not null, else the reference answer."""
        answer = row.get("demonstration")
        if answer is None:
            answer = answer_of(row, self.spec)
        if answer is None:
            raise UserError(f"{self.key}: no answer to demonstrate in this row (set {self.key}.answer_column)")
        tokens = self._tokens(str(answer), [str(answer)])
        return Tokens.steps(np.append(tokens, np.int32(self.tokenizer.eos_token_id)))

    def prompt(self, row: Row, index: int, cursor: int) -> Prompt:
        """The row as a Prompt. `columns["prompt"]` is the prompt as in the dataset: rewards receive this form."""
        messages, text, tokens = self.render(row)
        column = prompt_column(row, self.spec, self.key)
        columns = {name: value for name, value in row.items() if name != column}
        columns["prompt"] = prompt_of(row, self.spec, self.key)
        answer = answer_of(row, self.spec)
        if answer is not None:
            columns["answer"] = answer
        return Prompt(id=cursor, row=index, messages=messages, text=text, content=Tokens(tokens), columns=columns)

    def _tokens(self, text: str, contents: Sequence[Any]) -> Ints:
        self._check_alphabet(contents)
        return np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def _check_alphabet(self, contents: Sequence[Any]) -> None:
        if self._alphabet:  # of a model built from scratch: unknown characters would silently become <unk>
            missing = {c for content in contents if isinstance(content, str) for c in content} - self._alphabet
            if missing:
                unknown = "".join(sorted(missing))
                raise UserError(
                    f"{self.key}: no token for the characters {unknown!r} (add them to model.build.alphabet)"
                )


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured(kept=[0, 2, 3], too_long=[1], digest=0x9f86...): row indices of the dataset, ascending"""

    kept: list[int]
    too_long: list[int]
    digest: int = 0  # of the content of the kept rows; those of parts are added


def add_digests(parts: Iterable[int]) -> str:
    """Of the content of a dataset; the same for any number of parts."""
    return f"{sum(parts) % 2**256:064x}"


def _digest(index: int, row: Row, tokens: Ints) -> int:
    """Of all that a run uses of a row: the tokens of the prompt, and the columns that rewards and the warm start read.
    Values that are no JSON (images) count by their type."""
    columns = json.dumps(dict(row), sort_keys=True, default=lambda value: type(value).__name__)
    content = hashlib.sha256(f"{index} {columns} ".encode())
    content.update(tokens.tobytes())
    return int.from_bytes(content.digest(), "big")


def measure(rows: Sequence[Row], templater: Templater, max_length: int, part: int = 0, parts: int = 1) -> Measured:
    """The rows that have at most `max_length` tokens after templating. A controller measures i % parts == part."""
    kept, too_long, digest = list[int](), list[int](), 0
    for index in range(part, len(rows), parts):
        try:
            _, _, tokens = templater.render(rows[index])
        except UserError as error:
            raise UserError(f"row {index}: {error}") from None
        if len(tokens) <= max_length:
            kept.append(index)
            digest += _digest(index, rows[index], tokens)
        else:
            too_long.append(index)
    return Measured(kept, too_long, digest)


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
        if not len(self.kept):
            raise UserError(
                f"{templater.key}: none of the {len(rows)} prompts fits; expected at least one (raise "
                f"data.max_prompt_length, or see {templater.key}.prompt_column)"
            )
        self.rows, self.templater, self.seed, self.shuffle, self.digest = rows, templater, seed, shuffle, digest
        self._orders: dict[int, npt.NDArray[np.int64]] = {}  # of the last two epochs: requests may span both

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
        epoch, position = divmod(cursor, len(self.kept))
        return int(self.kept[self._order(epoch)[position]]) if self.shuffle else int(self.kept[position])

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Ranks of raw Philox numbers. Generator.permutation may change between numpy releases."""
        if epoch not in self._orders:
            key = np.array([self.seed % 2**64, epoch], dtype=np.uint64)
            raw = np.random.Philox(key=key).random_raw(len(self.kept))
            while len(self._orders) >= 2:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = np.argsort(raw, kind="stable")
        return self._orders[epoch]
