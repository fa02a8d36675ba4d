"""Tokens to text in a thread: the same text as the tokenizer's own `decode`, and the event loop does not wait."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gcore.content import decoding
from gcore.content.decoding import Detokenizer
from gcore.prompts.tokenizer import build_char_tokenizer

TEXTS = ["zwölf Äpfel, 12 €", "x = x + 1  # 猫\n", "the quick brown fox, the quick brown dog ."]


def byte_pairs(kind: type[Any] = PreTrainedTokenizerFast, **options: Any) -> Any:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(TEXTS, trainer)
    return kind(tokenizer_object=library, eos_token="<eos>", **options)


def word_pieces() -> Any:
    words = ["[UNK]", "do", "n't", "stop", ".", "##ping", "n", "'", "t"]
    library = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=library, unk_token="[UNK]", clean_up_tokenization_spaces=True)


class Shouting(PreTrainedTokenizerFast):
    def _decode(self, *args: Any, **options: Any) -> str:
        return super()._decode(*args, **options).upper()


@pytest.mark.parametrize(
    ("tokenizer", "by_batch"),
    [
        (byte_pairs(clean_up_tokenization_spaces=False), True),
        (build_char_tokenizer("0123456789+="), True),
        (byte_pairs(Shouting, clean_up_tokenization_spaces=False), False),
        (word_pieces(), False),
    ],
    ids=["byte pairs", "characters", "its own decode", "cleans up spaces"],
)
def test_the_text_is_that_of_the_tokenizer(tokenizer: Any, by_batch: bool) -> None:
    """Random tokens split characters of several bytes, and contain special tokens."""
    rng, size = np.random.default_rng(0), len(tokenizer)
    sequences = [rng.integers(0, size, length).astype(np.int32) for length in (0, 1, 7, 200)]
    sequences.append(np.arange(size, dtype=np.int32))
    expected = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in sequences]
    assert asyncio.run(Detokenizer(tokenizer).texts(sequences)) == expected
    assert (decoding._without_lock(tokenizer) is not None) == by_batch


class Waits:
    """A tokenizer that decodes only after `proceed` is set."""

    def __init__(self) -> None:
        self.proceed, self.order = threading.Event(), list[int]()

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        assert self.proceed.wait(60), "the event loop waits for the decoder"
        self.order.append(ids[0])
        return str(ids[0])


def test_the_event_loop_runs_while_text_is_decoded() -> None:
    async def main() -> None:
        tokenizer = Waits()
        decoder = Detokenizer(tokenizer)
        long = decoding.INLINE_TOKENS
        pairs = [[np.full(long, i), np.full(long, i + 10)] for i in range(3)]
        calls = [asyncio.ensure_future(decoder.texts(pair)) for pair in pairs]
        await asyncio.sleep(0)
        tokenizer.proceed.set()
        assert await asyncio.gather(*calls) == [["0", "10"], ["1", "11"], ["2", "12"]]
        assert tokenizer.order == [0, 10, 1, 11, 2, 12]

    asyncio.run(main())


def test_special_tokens_that_a_text_leaves_out_have_places() -> None:
    tokenizer = build_char_tokenizer("0123456789+=")
    decoder, eos, pad = Detokenizer(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id
    digits = tokenizer("12", add_special_tokens=False)["input_ids"]
    tokens = np.array([eos, *digits, pad, pad, pad, digits[0], eos], np.int32)
    names = tokenizer.convert_ids_to_tokens([eos, pad])
    assert decoder.decode(tokens.tolist()) == "121"
    assert decoder.hidden(tokens, "121") == [(0, names[0]), (2, f"{names[1]} x 3"), (3, names[0])]
    assert decoder.hidden(np.array(digits, np.int32), "12") == decoder.hidden(np.zeros(0, np.int32), "") == []
    assert decoder.hidden(tokens, "what a workflow wrote") == []  # not the text of the tokens


def test_places_in_texts_whose_parts_depend_on_what_is_before_them() -> None:
    """WordPiece joins `##ping` to the word before it, and a clean-up removes spaces."""
    tokenizer = word_pieces()
    tokens = np.array([1, 2, 0, 3, 5, 4], np.int32)  # do n't [UNK] stop ##ping .
    decoder = Detokenizer(tokenizer)
    text = decoder.decode(tokens.tolist())
    ((place, name),) = decoder.hidden(tokens, text)
    assert (text[:place], name) == (decoder.decode([1, 2]), "[UNK]")
