"""The tokenizer, checked before the run starts: a missing eos token or chat template is reported early."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from gcore import hub, user_files
from gcore.config.base import Model
from gcore.content.families import FAMILIES, built_family
from gcore.content.processor import read_json
from gcore.types import UserError

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHAR_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
# of a model that takes media: message parts become text or placeholders
MEDIA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ MARKS.get(part['type'], part['text']) }}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
# tokens usable for padding, in order of preference: made for padding, or in no text
PADS = ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|reserved_special_token_0|>", "<|endoftext|>")

# In tokenizer_config.json: tokenizer.json says all. AutoTokenizer would give a model of some families (qwen2, qwen3_5)
# the rules of its family, which drop the spaces of a tokenizer with one token per character.
AS_IT_IS = "TokenizersBackend"


def load_tokenizer(model: Model, key: str = "model", *, chat: bool = False) -> Any:
    """A model's tokenizer. Raises UserError if it has no eos token, or with `chat` if it has no chat template.

    `key`: the config key of the model. A policy needs no template for prompts that are strings, and no pad token:
    training packs sequences, and engines track lengths.
    """
    if model.build is not None:
        tokenizer, source_key = build_char_tokenizer(model.build.alphabet), f"{key}.build"
        if (family := built_family(model.build)) is not None:
            marks = dict(FAMILIES[family].marks)
            tokens = dict.fromkeys(re.findall(r"<\|.*?\|>", "".join(marks.values())))
            tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
            tokenizer.chat_template = MEDIA_TEMPLATE.replace("MARKS", repr(marks))
    else:
        folder, source_key = hub.tokenizer_folder(model, key)
        tokenizer = _from_folder(folder, source_key, model.trust_remote_code)
    if model.chat_template is not None:
        from jinja2 import TemplateError

        tokenizer.chat_template = user_files.template_text(model.chat_template, "model.chat_template")
        probe = [{"role": "user", "content": "x"}]
        try:
            tokenizer.apply_chat_template(probe, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            cause = " ".join(str(error).split())
            raise UserError(f"model.chat_template: does not render a user message: {cause}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{source_key}: the tokenizer has no eos token (set eos_token in its tokenizer_config.json, "
            f"or set {key}.tokenizer to one that has it)"
        )
    if chat and not tokenizer.chat_template:
        raise no_template(source_key, key)
    return tokenizer


def no_template(what: str, key: str = "model") -> UserError:
    return UserError(
        f"{what}: the tokenizer has no chat template for messages (set {key}.chat_template to the path of a Jinja "
        f"file, or {key}.tokenizer to a tokenizer that has one)"
    )


def with_padding(tokenizer: Any, model: Model) -> Any:
    """The tokenizer of a scorer. A missing pad token is set to a token that is not a stop token, if there is one:
    scorers read the last token that is not padding, and pad = eos would hide the end of a conversation."""
    if tokenizer.pad_token_id is None:
        stops, vocabulary = stop_tokens(model, tokenizer), tokenizer.get_vocab()
        names = (*PADS, tokenizer.bos_token, tokenizer.unk_token)
        tokenizer.pad_token = next((name for name in names if vocabulary.get(name, stops[0]) not in stops), None)
    return tokenizer


def stop_tokens(model: Model, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a response: the tokenizer's eos, and those of the model's generation_config.json (chat models
    end turns with another token than texts)."""
    stops = {tokenizer.eos_token_id}
    if model.path is not None and (file := hub.model_folder(model) / "generation_config.json").is_file():
        eos = json.loads(file.read_text()).get("eos_token_id")
        stops |= set(eos if isinstance(eos, list) else [eos]) - {None}
    return tuple(sorted(stops))


def build_char_tokenizer(alphabet: str) -> Any:
    """One token per character: 4 special tokens, then the alphabet in its order. "27+58=" -> <bos> 2 7 + 5 8 ="""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if not alphabet:
        raise UserError(
            "model.build.alphabet: got an empty string; expected the characters of the task, such as 0123456789+="
        )
    if twice := sorted({c for c in alphabet if alphabet.count(c) > 1}):
        raise UserError(f"model.build.alphabet: got {''.join(twice)!r} twice; expected each character once")
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
    tokenizer.alphabet = alphabet  # lets the templater report unknown characters
    return tokenizer


def _from_folder(folder: Path, key: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # transformers builds an empty tokenizer if there is only config.json, so check the files first
    if not hub.has_vocabulary(folder) and not (trust_remote_code and any(folder.glob("*.py"))):
        raise UserError(
            f"{key}: no tokenizer in {folder}; expected tokenizer.json or similar files (or set model.tokenizer)"
        )
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        if read_json(folder / "tokenizer_config.json").get("tokenizer_class") == AS_IT_IS:
            return PreTrainedTokenizerFast.from_pretrained(str(folder), **options)
        return AutoTokenizer.from_pretrained(str(folder), **options)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ... for files it cannot read
        cause = " ".join(str(error).split())[:300]
        raise UserError(f"{key}: the tokenizer in {folder} does not load: {cause} (or set model.tokenizer)") from error
