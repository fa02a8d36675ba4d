"""Tokens to text, in a thread: the event loop of a controller serves thousands of workflows and must not wait for it.

    await Detokenizer(tokenizer).texts([tokens, ...]) ──> [text, ...]        one thread per process

A transformers tokenizer holds Python's lock while its library decodes a sequence, so a thread alone would not help: the
event loop would still wait for every sequence. The library's batch method releases the lock. It is used where it gives
the same text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, groupby, pairwise
from typing import Any

from gcore.types import Ints

INLINE_TOKENS = 4096  # less than a millisecond of work
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="text")  # starts at its first use


class Detokenizer:
    """Special tokens are left out of the text. Other threads may encode with the same tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.decode = _without_lock(tokenizer) or (lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)))
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {
            *getattr(tokenizer, "all_special_ids", ()),
            *(i for i, token in added.items() if token.special),
        }
        self._names: Callable[[int], str] = lambda number: str(tokenizer.convert_ids_to_tokens(number))

    async def texts(self, sequences: Sequence[Ints]) -> list[str]:
        """The text of each sequence, in the same order. A few are decoded at once: a thread would take longer."""
        if sum(map(len, sequences)) <= INLINE_TOKENS:
            return self._all(sequences)
        return await asyncio.get_running_loop().run_in_executor(_THREAD, self._all, sequences)

    def _all(self, sequences: Sequence[Ints]) -> list[str]:
        return [self.decode(tokens.tolist()) for tokens in sequences]

    def with_special(self, tokens: Ints, kept: Sequence[str]) -> str | None:
        """The text with these special tokens; None: they are not among the tokens."""
        ids: list[int] = tokens.tolist()
        kept_ids = {i for i in self._special.intersection(ids) if self._names(i) in kept}
        if not kept_ids:
            return None
        runs = groupby((i for i in ids if i in kept_ids or i not in self._special), kept_ids.__contains__)
        pieces = ("".join(map(self._names, run)) if special else self.decode(list(run)) for special, run in runs)
        return "".join(pieces)

    def hidden(self, tokens: Ints, text: str) -> list[tuple[int, str]]:
        """The special tokens that `text`, the text of the tokens, leaves out: the place in the text, and the token.
        Equal ones in a row are one entry."""
        ids: list[int] = tokens.tolist()
        runs = [(special, list(run)) for special, run in groupby(ids, self._special.__contains__)]
        pieces = ["" if special else self.decode(run) for special, run in runs]
        if "".join(pieces) != text:  # the text of a piece depends on what is before it
            ends = accumulate(len(run) for _, run in runs)
            wholes = [self.decode(ids[:end]) for end in ends]
            if not wholes or wholes[-1] != text:
                return []
            pieces = [whole[len(before) :] for before, whole in pairwise(["", *wholes])]
        found, place = list[tuple[int, str]](), 0
        for (special, run), piece in zip(runs, pieces, strict=True):
            if special:
                equal = ((number, len(list(same))) for number, same in groupby(run))
                found += [(place, self._names(n) + (f" x {count}" if count > 1 else "")) for n, count in equal]
            place += len(piece)
        return found


def _without_lock(tokenizer: Any) -> Callable[[list[int]], str] | None:
    """What `tokenizer.decode` does if its class changes nothing and no spaces are cleaned up, by the library's batch
    method; else None."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    is_plain = (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is PreTrainedTokenizerFast._decode
        and not tokenizer.clean_up_tokenization_spaces
    )
    if not is_plain:
        return None
    library = tokenizer.backend_tokenizer

    def decode(ids: list[int]) -> str:
        text: str = library.decode_batch([ids], skip_special_tokens=True)[0]
        return text

    return decode
