"""The tokenizer, checked before anything starts: a missing pad token or template is named here, not found mid-run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gcore.config.tree import Model
from gcore.types import UserError

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHAR_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
# transformers builds an empty tokenizer from config.json alone, so the files are looked for first
VOCABULARIES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken")


def load_tokenizer(model: Model) -> Any:
    """The policy's tokenizer, with a pad token, an eos token and a chat template; UserError where one is missing."""
    if model.build is not None:
        tokenizer, key = build_char_tokenizer(model.build.alphabet), "model.build"
    else:
        folder, key = _folder(model)
        tokenizer = _from_folder(folder, key, model.trust_remote_code)
    if model.chat_template is not None:
        tokenizer.chat_template = _template_text(model.chat_template)
        _probe(tokenizer)
    _check(tokenizer, key)
    return tokenizer


def stop_tokens(model: Model, tokenizer: Any) -> tuple[int, ...]:
    """What ends a response: the tokenizer's eos, and those of the model's generation_config.json (chat models end turns
    with another token than texts)."""
    found = {tokenizer.eos_token_id}
    file = Path(model.path or "") / "generation_config.json"
    if model.path is not None and file.is_file():
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


def _folder(model: Model) -> tuple[Path, str]:
    key = "model.path" if model.tokenizer is None else "model.tokenizer"
    folder = Path(model.tokenizer or model.path or "")
    if not folder.is_dir():
        raise UserError(f"{key}: no such folder: {folder} (expected a Hugging Face folder on this machine)")
    return folder, key


def _from_folder(folder: Path, key: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    names = (*VOCABULARIES, "*.py") if trust_remote_code else VOCABULARIES
    if not any(any(folder.glob(name)) for name in names):
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


def _check(tokenizer: Any, key: str) -> None:
    """Nothing is patched up in silence: with pad = eos, a loss that masks pads would unlearn how to stop."""
    for kind in ("pad", "eos"):
        if getattr(tokenizer, f"{kind}_token_id") is None:
            raise UserError(
                f"{key}: the tokenizer has no {kind} token (set {kind}_token in its tokenizer_config.json, "
                "or set model.tokenizer to a folder whose tokenizer has it)"
            )
    if not tokenizer.chat_template:
        raise UserError(
            f"{key}: the tokenizer has no chat template (set model.chat_template to the path of a Jinja file, "
            "or model.tokenizer to a folder whose tokenizer has it)"
        )
