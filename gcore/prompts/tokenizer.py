"""The tokenizer, checked before anything starts: what is missing is named here, not found mid-run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gcore import hub
from gcore.config.tree import Model
from gcore.types import UserError

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHAR_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
# tokens that exist to fill space, or that no text contains, in the order in which they are taken for padding
PADS = ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|reserved_special_token_0|>", "<|endoftext|>")


def load_tokenizer(model: Model, key: str = "model", *, chat: bool = False) -> Any:
    """A model's tokenizer, with an eos token; `chat`: and with a chat template. UserError where one is missing.

    `key`: where the model stands in the recipe. A policy needs no template for prompts that are strings, and no pad
    token: training packs, and engines know their lengths.
    """
    if model.build is not None:
        tokenizer, place = build_char_tokenizer(model.build.alphabet), f"{key}.build"
    else:
        folder, place = hub.tokenizer_folder(model, key)
        tokenizer = _from_folder(folder, place, model.trust_remote_code)
    if model.chat_template is not None:
        tokenizer.chat_template = _template_text(model.chat_template)
        _probe(tokenizer)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{place}: the tokenizer has no eos token (set eos_token in its tokenizer_config.json, "
            f"or set {key}.tokenizer to one that has it)"
        )
    if chat and not tokenizer.chat_template:
        raise no_template(place, key)
    return tokenizer


def no_template(what: str, key: str = "model") -> UserError:
    return UserError(
        f"{what}: the tokenizer has no chat template for messages (set {key}.chat_template to the path of a Jinja "
        f"file, or {key}.tokenizer to a tokenizer that has one)"
    )


def with_padding(tokenizer: Any, model: Model) -> Any:
    """The tokenizer of a scorer. Where it has no pad token it gets one that is never a stop token and that no text ends
    with, if there is such a token: scorers look for the last token that is not padding, and pad = eos would hide the
    end of a conversation."""
    if tokenizer.pad_token_id is None:
        stops, vocabulary = stop_tokens(model, tokenizer), tokenizer.get_vocab()
        names = (*PADS, tokenizer.bos_token, tokenizer.unk_token)
        tokenizer.pad_token = next((name for name in names if vocabulary.get(name, stops[0]) not in stops), None)
    return tokenizer


def stop_tokens(model: Model, tokenizer: Any) -> tuple[int, ...]:
    """What ends a response: the tokenizer's eos, and those of the model's generation_config.json (chat models end turns
    with another token than texts)."""
    found = {tokenizer.eos_token_id}
    if model.path is not None and (file := hub.model_folder(model) / "generation_config.json").is_file():
        eos = json.loads(file.read_text()).get("eos_token_id")
        found |= set(eos if isinstance(eos, list) else [eos]) - {None}
    return tuple(sorted(found))


def build_char_tokenizer(alphabet: str) -> Any:
    """One token a character: 4 special tokens, then the alphabet in its order. "27+58=" -> <bos> 2 7 + 5 8 ="""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if not alphabet:
        raise UserError("model.build.alphabet: empty, expected the characters of the task, for example 0123456789+=")
    if twice := sorted({c for c in alphabet if alphabet.count(c) > 1}):
        raise UserError(f"model.build.alphabet: each character once, got {''.join(twice)!r} twice")
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()  # join without spaces
    fast: Any = PreTrainedTokenizerFast  # its constructor is untyped
    tokenizer = fast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAR_TEMPLATE
    tokenizer.alphabet = alphabet  # lets the templater name the characters it lacks
    return tokenizer


def _from_folder(folder: Path, key: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    # transformers builds an empty tokenizer from config.json alone, so the files are looked for first
    if not hub.has_vocabulary(folder) and not (trust_remote_code and any(folder.glob("*.py"))):
        raise UserError(f"{key}: no tokenizer in {folder} (expected tokenizer.json or the like; set model.tokenizer)")
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ... for files it cannot read
        cause = " ".join(str(error).split())[:300]
        raise UserError(f"{key}: the tokenizer in {folder} does not load: {cause} (or set model.tokenizer)") from error


def _template_text(value: str) -> str:
    """The template itself, or the content of the file it names. Only a template has braces."""
    if "{" in value:
        return value
    file = Path(value)
    if not file.is_file():
        raise UserError(f"model.chat_template: no such file: {value} (expected a path, or a Jinja template)")
    return file.read_text()


def _probe(tokenizer: Any) -> None:
    """A template the user brought is tried once, so that a slip of syntax is reported by its key."""
    from jinja2 import TemplateError

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        cause = " ".join(str(error).split())
        raise UserError(f"model.chat_template: does not render a user message: {cause}") from error
