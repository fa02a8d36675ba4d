"""Transformers models, loaded from a folder or built small from the configuration: the policy, and scalar scorers.

Engines load whole models here. Trainer ranks make the same network without weights (`make_empty`) and read only their
shards of them (training/shards.py). Training and serving of scorers share this file too: they lay out a batch in the
same way.
"""

from __future__ import annotations

import atexit
import copy
import difflib
import importlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from gcore.config.base import Lora, Model, PolicyModel
from gcore.content.families import FAMILIES, TEXT_ALONE, built_family
from gcore.hub import model_folder
from gcore.models.built import build_network
from gcore.models.decoders import (
    KNOWN,
    check_length,
    check_network,
    decoder_of,
    implementation,
    layers_of,
    quantisation,
    traits_of,
)
from gcore.models.towers import takes_media, tower_of
from gcore.types import Ints, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DROPOUTS = ("dropout", "pdrop", "jitter_noise")  # in names of attributes; the last: of routers of experts
RECOMPILE_LIMIT = 64  # of the code of a layer
SCORE = "score.weight"  # the head of a network with one label instead of the vocabulary: a scorer, a critic
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"  # suffixes after the layer's name, as in PEFT


@dataclass(frozen=True, slots=True)
class Adapters:
    """Low-rank additions to some matrices of a network: Adapters(("model.layers.0.mlp.up_proj",), rank=16, alpha=32)"""

    layers: tuple[str, ...]
    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def shapes(self, whole: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Shapes of the factors. `whole`: shapes of the network's weights."""
        factors: dict[str, tuple[int, ...]] = {}
        for layer in self.layers:
            width_out, width_in = whole[f"{layer}.weight"]
            factors |= {layer + LORA_A: (self.rank, width_in), layer + LORA_B: (width_out, self.rank)}
        return factors

    def merge(self, base: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """base + scale * b a, in float32."""
        return torch.addmm(base.float(), b.float(), a.float(), alpha=self.scale)


def adapters_of(network: Any, lora: Lora) -> Adapters:
    """The adapters that model.lora puts in this network."""
    lists = _layer_lists(network, lora.parts)
    linear = [
        f"{prefix}.{name}" if name else prefix
        for prefix in lists
        for name, module in network.get_submodule(prefix).named_modules()
        if isinstance(module, torch.nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear)
    ]  # of torch's own attention modules, only the weights are used: an adapter would have no effect
    available = sorted({name.rpartition(".")[2] for name in linear})
    if unknown := [t for t in lora.targets if not any(f".{name}".endswith(f".{t}") for name in linear)]:
        raise UserError(f"model.lora.targets: no linear layer named {', '.join(unknown)}; expected some of {available}")
    wanted = tuple(f".{target}" for target in lora.targets or available)
    layers = tuple(name for name in linear if f".{name}".endswith(wanted))
    if not layers:
        raise UserError(f"model.lora: the layers {', '.join(lists)} have no linear layers to adapt")
    return Adapters(layers, lora.rank, lora.alpha)


def _layer_lists(network: Any, parts: Sequence[str]) -> tuple[str, ...]:
    """Names of the modules that hold the layers of a language model, or of a denoiser, which names its own. `parts`: as
    model.lora.parts."""
    if hasattr(network, "layer_lists"):
        return tuple(network.layer_lists)
    decoder, (layers, _) = decoder_of(network), layers_of(network)
    text = next(f"{name}.{layers}" for name, module in network.named_modules() if module is decoder)
    tower = tuple(tower_of(network)) if takes_media(network) else ()
    if "vision" in parts and not tower:
        raise UserError("model.lora.parts: the model has no vision tower; expected [text]")
    return (*([text] if "text" in parts else ()), *(tower if "vision" in parts else ()))


def adapters_in(folder: Path, model: Model) -> Adapters | None:
    """Same as `adapters_of`, for the network in a folder, without loading its weights. Only a policy has adapters."""
    if (lora := getattr(model, "lora", None)) is None:
        return None
    config = _read_config(model, folder)
    with torch.device("meta"):
        return adapters_of(auto_class(config).from_config(config, trust_remote_code=model.trust_remote_code), lora)


def check_policy(model: PolicyModel, tokenizer: Any, max_length: int) -> None:
    """Check before the start, without weights, that the network is of a supported kind and has the layers that
    model.lora names. Raises UserError."""
    if model.build is not None:
        network = make_empty(model, tokenizer, max_length)
    else:
        config = _config(model, max_length)
        if model.lora is None:
            return
        with torch.device("meta"):
            network = auto_class(config).from_config(config, trust_remote_code=model.trust_remote_code)
    if model.lora is not None:
        adapters_of(network, model.lora)


def config_of(model: Model, tokenizer: Any, max_length: int | None) -> Any:
    """Of transformers, for the network of this model."""
    return make_empty(model, tokenizer, max_length).config if model.build is not None else _config(model, max_length)


def auto_class(config: Any) -> Any:
    """The class of transformers that makes a policy of this configuration."""
    row, alone = FAMILIES.get(config.model_type), config.model_type in TEXT_ALONE
    name = row.auto_class if row else "AutoModelForImageTextToText" if alone else "AutoModelForCausalLM"
    return getattr(importlib.import_module("transformers"), name)


def pick_device(name: str, index: int = 0) -> torch.device:
    """`auto`: a GPU if there is one. Several roles on one machine use GPU `index` modulo the number of visible GPUs."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise UserError("training.device=cuda: PyTorch sees no GPU here; use training.device=cpu (or auto)")
        return torch.device("cuda", index % torch.cuda.device_count())
    return torch.device("cpu")


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


def compile_each(layers: Iterable[torch.nn.Module], must: bool = False) -> None:
    """Layers of one kind share compiled code, whose inputs are the weights: they may change. `must`: an error if a
    layer does not compile; else it runs eagerly, with a warning."""
    # Variants: kinds of layers, with and without gradients, fixed and dynamic shapes, shared sequences. Beyond the
    # limit of 8, layers would run eagerly without a word.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    torch._dynamo.config.suppress_errors |= not must
    for layer in layers:
        layer.compile()


def load_model(
    model: Model,
    tokenizer: Any,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_length: int | None = None,
) -> PreTrainedModel:
    """The model with its starting weights, in eval mode. The same seed builds the same weights in every process.

    `max_length`: of the sequences, if known. Some models compute longer ones differently.
    """
    network = load_whole(model, tokenizer, seed, max_length=max_length)
    unify_passes(network)
    _place(network, dtype, device)
    check_network(network.eval())
    return network


def load_whole(model: Model, tokenizer: Any, seed: int, *, max_length: int | None = None) -> PreTrainedModel:
    """The network as transformers makes it: in float32, on the CPU."""
    if model.build is not None:
        return build_network(model.build, tokenizer, seed, scorer=False)
    return _load(model, max_length)


def make_empty(model: Model, tokenizer: Any, max_length: int | None = None, scorer: bool = False) -> PreTrainedModel:
    """The network of `load_model` without its weights: parameters are on the meta device, in float32. Buffers, such as
    rotary frequencies, have their values; they are on the CPU. Raises UserError as `load_model` does. `scorer`: with
    one label instead of the vocabulary; a network that takes media keeps its tower."""
    from transformers import AutoModelForSequenceClassification

    if model.build is not None:
        with torch.device("meta"):
            network = build_network(model.build, tokenizer, 0, scorer=scorer and built_family(model.build) is None)
    else:
        config = _config(model, max_length)
        text_scorer = scorer and config.model_type not in FAMILIES
        kind: Any = AutoModelForSequenceClassification if text_scorer else auto_class(config)
        if text_scorer:
            config.num_labels = 1
        with torch.device("meta"):
            network = kind.from_config(config, **_options(model, config))
    if scorer and network.config.model_type in FAMILIES:
        _exchange_head(network)
    unify_passes(network)
    _make_buffers(network)
    if scorer:
        return network
    check_network(network.eval() if network.config.model_type in KNOWN else _small_network(model, network.config))
    return network


def _exchange_head(network: Any) -> None:
    """One label instead of the vocabulary, as `score.weight`. Transformers has sequence classification for few of the
    families that take media."""
    del (network if hasattr(network, "lm_head") else network.language_model).lm_head
    with torch.device("meta"):
        network.score = torch.nn.Linear(network.config.get_text_config().hidden_size, 1, bias=False)


@torch.no_grad()
def _make_buffers(network: PreTrainedModel) -> None:
    """Compute the buffers as transformers does after it has read the weights of a checkpoint. Those that a checkpoint
    has are overwritten later."""
    for module in network.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
            module._is_hf_initialized = False  # type: ignore[assignment]
    with torch.random.fork_rng(devices=[]):
        network.initialize_weights()  # only modules without the mark; their parameters have no memory to write to


def _small_network(model: Model, config: Any) -> PreTrainedModel:
    """A network of this kind with two layers, few tokens and random weights, for `check_network`. The weights are large
    enough that the output depends on what the attention sees."""
    from transformers import AutoModelForCausalLM

    small, num_layers = copy.deepcopy(config), config.num_hidden_layers
    for name, value in list(vars(small).items()):
        if isinstance(value, (list, tuple)) and len(value) == num_layers > 2:  # one entry per layer
            setattr(small, name, value[:2])
    small.num_hidden_layers, small.vocab_size = min(num_layers, 2), min(config.vocab_size, 512)
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    try:
        network = AutoModelForCausalLM.from_config(small, **_options(model, small))
    except (ValueError, TypeError, IndexError, RuntimeError, AssertionError) as error:
        first = " ".join(str(error).split())[:200]
        raise UserError(
            f"a model of type {config.model_type} cannot be compared with transformers: building it with two layers "
            f"failed: {first} (key: model.path; docs/engines.md lists the families)"
        ) from error
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    unify_passes(network)
    return network.eval()


def _place(network: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Convert the parameters to `dtype`, but not the buffers: rotary frequencies in bfloat16 have an error of 0.4 %,
    which is more than one radian at position 4,095."""
    for parameter in network.parameters():
        parameter.data = parameter.data.to(device=device, dtype=dtype)
    network.to(device)  # type: ignore[arg-type]


def save_built(model: Model, tokenizer: Any, seed: int) -> Path:
    """Save a built model to a folder, for engines that load from one. It is removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="gcore-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    load_model(model, tokenizer, seed, torch.float32, torch.device("cpu")).save_pretrained(folder)
    return folder


def load_scorer(
    model: Model, seed: int, dtype: torch.dtype, device: torch.device, *, tokenizer: Any = None, new_head: bool = False
) -> PreTrainedModel:
    """A sequence-classification model with one label, in eval mode. A model for serving must be trained already.

    `new_head` is for training: a causal language model gets a seeded head. So is `model.build`. The padding
    token comes from the tokenizer in training, and if config.json has none.
    """
    if model.build is not None:
        network = build_network(model.build, tokenizer, seed, scorer=True)
    else:
        network = _load_scorer(model, seed, new_head)
    text_config = network.config.get_text_config()
    if tokenizer is not None and (new_head or text_config.pad_token_id is None):
        text_config.pad_token_id = tokenizer.pad_token_id
    if text_config.pad_token_id is None:
        raise UserError(
            f"model.path={model.path}: its config.json has no pad_token_id and its tokenizer has no padding token, "
            "so texts cannot be batched (set pad_token_id in config.json)"
        )
    network.config.use_cache = False  # nothing is generated
    unify_passes(network)
    _place(network, dtype, device)
    return network.eval()


def score_texts(network: PreTrainedModel, texts: Sequence[Ints], width: int) -> torch.Tensor:
    """One score per text, in float32. Short texts are padded at the right, where causal attention does not reach."""
    tokens = np.full((len(texts), width), network.config.get_text_config().pad_token_id, np.int64)
    mask = np.zeros((len(texts), width), np.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)], mask[row, : len(text)] = text, 1
    tokens_RW, mask_RW = (torch.from_numpy(array).to(network.device) for array in (tokens, mask))
    scores: torch.Tensor = network(input_ids=tokens_RW, attention_mask=mask_RW).logits
    return scores[:, 0].float()


def longest_text(scorer: PreTrainedModel) -> int:
    """Maximum length in tokens. One position is reserved: serving pads every text."""
    return (getattr(scorer.config.get_text_config(), "max_position_embeddings", None) or 2**31) - 1


def _config(model: Model, max_length: int | None) -> Any:
    """Raises UserError for an unsupported model."""
    try:
        config = _read_config(model, model_folder(model))
        traits_of(config)
        check_length(config, max_length)
        if quantisation(config) is not None:
            del config.quantization_config  # the network is that of the weights before they were quantised
        return config
    except UserError:
        raise
    except Exception as error:  # of the library's own checks
        raise _unloadable(model, error) from error


def _read_config(model: Model, folder: Path) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    file = folder / "config.json"
    found = json.loads(file.read_text()) if file.is_file() else {}
    kind = found.get("model_type")
    if "auto_map" in found and kind not in CONFIG_MAPPING and not model.trust_remote_code:
        raise UserError(
            f"model.path={model.path}: has code of its own for type {kind}; expected trust_remote_code=true"
        )
    if "auto_map" not in found and kind is not None and kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, CONFIG_MAPPING.keys(), 1)
        hint = f" such as {near[0]}," if near else ""
        raise UserError(
            f"model.path={model.path}: is of type {kind}, which transformers {__version__} does not know; "
            f"expected one that it knows,{hint} or a newer transformers"
        )
    return AutoConfig.from_pretrained(str(folder), trust_remote_code=model.trust_remote_code, local_files_only=True)


def _options(model: Model, config: Any) -> dict[str, Any]:
    return {
        "dtype": torch.float32,
        "attn_implementation": implementation(config),
        "trust_remote_code": model.trust_remote_code,
    }


def _dequantised(model: Model) -> dict[str, Any]:
    """Options with which transformers reads quantised files as what they were before."""
    from transformers import FineGrainedFP8Config
    from transformers.utils.quantization_config import Mxfp4Config

    formats = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}
    method = quantisation(_read_config(model, model_folder(model)))
    return {} if method is None else {"quantization_config": formats[method](dequantize=True)}


def _load(model: Model, max_length: int | None) -> PreTrainedModel:
    """Raises UserError for an unsupported model before any weights are read."""
    config = _config(model, max_length)
    try:
        network, names = auto_class(config).from_pretrained(
            str(model_folder(model, weights=True)),
            local_files_only=True,
            output_loading_info=True,
            **_options(model, config),
            **_dequantised(model),
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise _unloadable(model, error) from error
    _check_names(model, names["missing_keys"], names["unexpected_keys"])
    _check_finite(model, network)
    loaded: PreTrainedModel = network
    return loaded


def _check_finite(model: Model, network: PreTrainedModel) -> None:
    """The answers of such a network are tokens like any other."""
    for name, parameter in network.named_parameters():
        if not torch.linalg.vector_norm(parameter.detach(), torch.inf).isfinite():
            raise UserError(f"model.path={model.path}: {name} is NaN or infinite; expected a model with finite weights")


def _check_names(model: Model, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Transformers would give missing weights random values."""
    for names, problem in ((sorted(missing), "has no weights for"), (sorted(unexpected), "has weights of no layer:")):
        if names:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise UserError(
                f"model.path={model.path}: {problem} {shown} ({len(names)} names); expected the weights of the network "
                "that its config.json describes"
            )


def _unloadable(model: Model, error: Exception, kind: str = "causal language model") -> UserError:
    first = " ".join(str(error).split())[:300]
    return UserError(f"model.path={model.path}: cannot load a {kind}: {first}")


def _load_scorer(model: Model, seed: int, new_head: bool) -> PreTrainedModel:
    """Transformers initializes missing weights at random: right for a new head, an error for all other weights."""
    from transformers import AutoModelForSequenceClassification

    prefix, expected = f"model.path={model.path}", "expected a sequence-classification model with one label"
    folder = model_folder(model, weights=True)
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code, "local_files_only": True}
    try:
        config = _read_config(model, folder)
        if any("SequenceClassification" in name for name in config.architectures or ()):
            if config.num_labels != 1:
                raise UserError(f"{prefix}: has {config.num_labels} labels; {expected}")
        elif not new_head:
            raise UserError(f"{prefix}: is {config.architectures}; {expected} (objective=reward_model trains one)")
        attention = {"attn_implementation": "eager"} if implementation(config) == "eager" else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network, info = AutoModelForSequenceClassification.from_pretrained(
                str(folder), dtype=torch.float32, num_labels=1, output_loading_info=True, **attention, **options
            )
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise _unloadable(model, error, "scorer") from error
    body = f"{network.base_model_prefix}."
    _check_names(model, [name for name in info["missing_keys"] if not new_head or name.startswith(body)], ())
    _check_finite(model, network)
    scorer: PreTrainedModel = network
    return scorer


def unify_passes(network: PreTrainedModel) -> None:
    """Logprobs before and during an update must come from the same policy, and from that of the engine: without
    dropout, which adds noise, and with one limit of the time steps of Mamba (transformers has another one for whole
    sequences of Nemotron-H; vLLM has that of the configuration)."""
    for module in network.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = network.config.get_text_config().time_step_limit
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and any(part in name for part in DROPOUTS):
                setattr(module, name, 0.0)
