"""The tokens of an answer that a dataset has, after the tokens of its prompt, and which of them the assistant wrote.

    prompt, "131"                                 ──> 1 3 1 <eos>
    prompt, [assistant, user, assistant]          ──> the turns of the conversation; those of the user are masked

Each turn is tokenised on its own, so the prompt has the same tokens as in a rollout (content/text.py adds turns in the
same way). A reward model reads the whole conversation, rendered and tokenised at once, in training and in serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gcore.content.tokens import Tokens
from gcore.types import Bools, Ints, Message, UserError


def answer_steps(
    tokenizer: Any, stop_tokens: Sequence[int], prompt: Sequence[Message], answer: str | Sequence[Message]
) -> tuple[Tokens, Bools]:
    """The steps, and a mask that is True for the assistant's turns. A turn ends with its stop token: what the template
    adds after it belongs to the next turn."""
    if isinstance(answer, str):
        tokens = np.append(_encode(tokenizer, answer), np.int32(tokenizer.eos_token_id))
        return Tokens.steps(tokens), np.ones(len(tokens), np.bool_)
    parts: list[tuple[Ints, bool]] = []
    conversation, text = [*prompt], _render(tokenizer, prompt, True)
    for message in answer:
        if message["role"] == "assistant":
            before = _render(tokenizer, conversation, True)
            parts.append((_encode(tokenizer, _added(text, before)), False))
            conversation.append(message)
            text = _render(tokenizer, conversation, False)
            own, rest = _turn(_encode(tokenizer, _added(before, text)), stop_tokens)
            parts += [(own, True), (rest, False)]
        else:
            conversation.append(message)
    while parts and not parts[-1][1]:
        parts.pop()  # what follows the last turn
    if not parts:
        raise UserError("an answer has no message of the assistant (keys: data.train, model.chat_template)")
    if not np.isin(parts[-1][0][-1:], stop_tokens).any():  # the template does not end turns, or the turn is empty
        parts.append((np.array([tokenizer.eos_token_id], np.int32), True))
    tokens = np.concatenate([part for part, _ in parts])
    return Tokens.steps(tokens), np.concatenate([np.full(len(part), own, np.bool_) for part, own in parts])


def scored_conversation(
    tokenizer: Any, prompt: Sequence[Message], answer: str | Sequence[Message]
) -> tuple[Tokens, Bools]:
    """What a reward model scores. Its only step is the last token: see training/logprob_model.py."""
    turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    try:
        (tokens,) = tokens_of(tokenizer, [render(tokenizer, [*prompt, *turns])])
    except ValueError as error:
        raise UserError(f"{error} (set model.chat_template)") from None
    return Tokens.split(tokens, 1), np.ones(1, np.bool_)


def render(tokenizer: Any, messages: Sequence[Message]) -> str:
    """A whole conversation as text. Raises ValueError if the template rejects it."""
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=False)
    except (TemplateError, TypeError) as error:  # an unknown role, content that is not text, ...
        roles = [message.get("role") for message in messages]
        cause = " ".join(str(error).split())
        raise ValueError(f"the chat template rejects messages of roles {roles}: {cause}") from None
    return text


def tokens_of(tokenizer: Any, texts: Sequence[str]) -> list[Ints]:
    """Tokens of rendered conversations. No special tokens are added: the template contains them."""
    ids = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [np.asarray(text, dtype=np.int32) for text in ids]


def _turn(tokens: Ints, stop_tokens: Sequence[int]) -> tuple[Ints, Ints]:
    """The turn with its stop token, and what the template adds after it: ("131<|im_end|>", "\\n")."""
    (stops,) = np.nonzero(np.isin(tokens, stop_tokens))
    end = int(stops[-1]) + 1 if len(stops) else len(tokens)
    return tokens[:end], tokens[end:]


def _added(before: str, after: str) -> str:
    if not after.startswith(before):
        raise UserError(
            "the chat template changes earlier turns when messages are added, so the tokens to train on are not those "
            "of a dialogue; set model.chat_template to a template that keeps them"
        )
    return after[len(before) :]


def _encode(tokenizer: Any, text: str) -> Ints:
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


def _render(tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool) -> str:
    if not tokenizer.chat_template:
        raise UserError("answers are messages, but the tokenizer has no chat template (set model.chat_template)")
    text: str = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return text
