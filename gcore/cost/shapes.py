"""The dimensions of a language model that determine time and memory: from a size such as 32B, or from a config.json.

    "32B", "30B-A3B" ──┐
                       ├──> Shape ──> parameters, bytes of weights, bytes of KV cache per token, FLOPs per token
    folder, config.json┘

No weights are read. Biases (0.02 % of Qwen2.5) are not counted. Of a vision tower, only the FLOPs per patch are known.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gcore.config.base import Model
from gcore.cost.workload import CostModel
from gcore.hub import config_file, is_id, model_folder
from gcore.types import UserError

BYTES = 2  # bfloat16: the weights of engines, and the arithmetic of the trainer


@dataclass(frozen=True)
class Latent:
    """Keys and values of all heads from one vector per token (MLA). Latent(parameters=10**8, kv=576, width=24_576)"""

    parameters: int  # of attention, per layer
    kv: int  # numbers in the cache, per token and layer
    width: int  # numbers in the products of a pair of tokens: of scores and values, in the mean


@dataclass(frozen=True)
class Shape:
    """A decoder. In a mixture of experts, `intermediate` is the size of one expert.

    Shape("1.5B", layers=28, hidden=1536, intermediate=8960, heads=12, kv_heads=2, head_dim=128, vocab=151936)
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    experts: int = 0  # 0: dense
    active_experts: int = 0
    attention_layers: int | None = None  # None: all. The others have a mixer with a state, or nothing
    mlp_layers: int | None = None  # None: all
    mixer: int = 0  # parameters in the place of attention, in the mean of the layers without it
    state_values: int = 0  # of a sequence, in all layers: it does not grow with the length
    latent: Latent | None = None
    towers: tuple[tuple[str, CostModel], ...] = ()  # what encodes media, by their kind
    source: str = "given dimensions"

    @property
    def _attention(self) -> int:
        if self.latent is not None:
            return self.latent.parameters
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)  # q and o, k and v

    @property
    def _with_attention(self) -> int:
        return self.layers if self.attention_layers is None else self.attention_layers

    @property
    def _with_mlp(self) -> int:
        return self.layers if self.mlp_layers is None else self.mlp_layers

    @property
    def _expert(self) -> int:
        return 3 * self.hidden * self.intermediate  # gate, up, down

    @property
    def layer_parameters(self) -> int:
        """In the mean of the layers."""
        mlp = self._expert * max(1, self.experts) + self.hidden * self.experts  # with its router
        attention, without = self._with_attention * self._attention, self.layers - self._with_attention
        return (attention + without * self.mixer + self._with_mlp * mlp) // self.layers + 2 * self.hidden

    @property
    def table_parameters(self) -> int:
        """Of the embedding; the head is a second table of this size, or the same one if tied."""
        return self.vocab * self.hidden

    @property
    def tables(self) -> int:
        """Parameters of the embedding and the head."""
        return self.table_parameters * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.tables + self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all of them in a dense model."""
        return self.parameters - self._with_mlp * self._expert * (max(1, self.experts) - max(1, self.active_experts))

    @property
    def weight_bytes(self) -> int:
        return BYTES * self.parameters

    @property
    def kv_bytes_per_token(self) -> int:
        values = 2 * self.kv_heads * self.head_dim if self.latent is None else self.latent.kv
        return self._with_attention * values * BYTES

    @property
    def state_bytes(self) -> int:
        """Of a sequence. States are in float32."""
        return 4 * self.state_values

    @property
    def product_parameters(self) -> int:
        """Parameters in matrix products per token: the head is multiplied, the embedding is only looked up."""
        return self.active_parameters - (0 if self.tied else self.table_parameters)

    @functools.cached_property
    def cost(self) -> CostModel:
        """The cost model of samples, which training uses for its layout too."""
        head = 2.0 * self.table_parameters
        token = (
            2.0 * self.product_parameters - head + 6.0 * self.state_values
        )  # a state is read, changed and multiplied
        pair = 4.0 * self._with_attention * (self.heads * self.head_dim if self.latent is None else self.latent.width)
        stateful = 2.0 * (self.layers - self._with_attention) * self.mixer + 6.0 * self.state_values
        return CostModel(
            crossover=2 * token / pair if pair else math.inf,
            head=head / token,
            flops=token,
            towers=self.towers,
            stateful=stateful / token,
        )

    def forward_flops(self, context: float) -> float:
        """FLOPs of one token that attends to `context` others."""
        return self.cost.flops * self.cost.of_token(context)

    def read_bytes(self, running: float) -> float:
        """Bytes of weights that a decoding step with `running` sequences reads; of experts, only the used ones."""
        rest = BYTES * (self.product_parameters - self._with_mlp * self._expert * max(1, self.active_experts))
        touched: float = 1
        if self.experts:
            touched = self.experts * (1 - (1 - self.active_experts / self.experts) ** running)
        states = 2 * running * self.state_bytes  # read and written
        return rest + BYTES * self._with_mlp * self._expert * touched + states


SMALL: dict[str, Any] = {"vocab": 151936, "tied": True}
MIXTURE: dict[str, Any] = {"vocab": 151936, "experts": 128, "active_experts": 8, "family": "Qwen3"}


def _qwen(size: str, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, **other: Any) -> Shape:
    family = other.pop("family", "Qwen2.5")
    rest = {"head_dim": 128, "vocab": 152064, "source": f"shape of {family}-{size}", **other}
    return Shape(size, layers, hidden, intermediate, heads, kv_heads, **rest)


SHAPES = {
    shape.name: shape
    for shape in (
        _qwen("0.5B", 24, 896, 4864, 14, 2, **SMALL, head_dim=64),
        _qwen("1.5B", 28, 1536, 8960, 12, 2, **SMALL),
        _qwen("3B", 36, 2048, 11008, 16, 2, **SMALL),
        _qwen("7B", 28, 3584, 18944, 28, 4),
        _qwen("14B", 48, 5120, 13824, 40, 8),
        _qwen("32B", 64, 5120, 27648, 40, 8),
        _qwen("72B", 80, 8192, 29568, 64, 8),
        _qwen("30B-A3B", 48, 2048, 768, 32, 4, **MIXTURE),
        _qwen("235B-A22B", 94, 4096, 1536, 64, 4, **MIXTURE),
    )
}
# of media, by their kind: the section of config.json, and how much of a medium becomes a token where it does not tell
TOWERS = {"image": ("vision_config", 14 * 14), "audio": ("audio_config", 2)}
STATEFUL_KEYS = (  # of config.json: layers that are not attention of grouped queries
    *("kv_lora_rank", "linear_num_value_heads", "linear_num_heads", "mamba_d_state", "ssm_state_size", "state_size"),
    *(
        "layer_types",
        "layers_block_type",
        "hybrid_override_pattern",
        "full_attention_interval",
        "attn_layer_indices",
        "attn_layer_period",
    ),
)
SIZE = re.compile(r"(\d+(?:\.\d+)?)([BM])", re.IGNORECASE)


def shape_of(text: str, option: str = "--model") -> Shape:
    """A size ("32B", "1.5B", "30B-A3B"), a folder with a config.json, such a file, or a hub id ("Qwen/Qwen3-8B")."""
    if named := SHAPES.get(text.strip().upper()):
        return named
    path = Path(text)
    if path.exists():
        return _from_config(path / "config.json" if path.is_dir() else path, option)
    if (match := SIZE.fullmatch(text.strip())) and float(match[1]) > 0:
        billions = float(match[1]) * (1 if match[2].upper() == "B" else 1e-3)
        if 0.05 <= billions <= 2000:
            return _scaled(text.strip().upper(), billions * 1e9)
    if "/" in text and is_id(text):
        return replace(_from_config(config_file(text, option), option), name=text.rpartition("/")[2])
    raise UserError(
        f"{option} {text}: neither a folder nor a known size; expected a size from 0.05B to 2000B such as "
        f"7B, one of the mixtures 30B-A3B and 235B-A22B, a folder with config.json, or a hub id such as "
        f"Qwen/Qwen3-8B"
    )


def model_shape(model: Model, key: str) -> Shape:
    """Of a model in a recipe. `key`: of the recipe, for messages."""
    if model.path is not None:
        return shape_of(str(model_folder(model)), key)
    build = model.build
    if build is None:
        raise UserError(f"{key}: a diffusion model has no shape of a language model")
    return Shape(
        key,
        layers=build.layers,
        hidden=build.hidden_size,
        intermediate=build.intermediate_size,
        heads=build.heads,
        kv_heads=build.kv_heads,
        head_dim=build.hidden_size // build.heads,
        vocab=len(build.alphabet) + 4,
        tied=True,
        experts=build.experts if build.architecture == "qwen3_moe" else 0,
        active_experts=build.active_experts if build.architecture == "qwen3_moe" else 0,
        towers=_towers({f"{name}_config": tower for name, tower in build.model_dump().items()}),
    )


def _scaled(name: str, parameters: float) -> Shape:
    """The nearest dense shape, its width scaled by the cube root of the ratio, with as many layers as needed."""
    dense = [shape for shape in SHAPES.values() if not shape.experts]
    near = min(dense, key=lambda shape: abs(math.log(parameters / shape.parameters)))
    factor = (parameters / near.parameters) ** (1 / 3)
    heads = near.kv_heads * max(1, round(near.heads / near.kv_heads * factor))
    wide = replace(
        near,
        name=name,
        heads=heads,
        hidden=heads * near.head_dim,
        intermediate=128 * max(1, round(near.intermediate * factor / 128)),
        source=f"scaled from Qwen2.5-{near.name}: an estimate; use a config.json for the real shape",
    )
    tables = wide.parameters - wide.layers * wide.layer_parameters
    return replace(wide, layers=max(1, round((parameters - tables) / wide.layer_parameters)))


def _from_config(file: Path, option: str) -> Shape:
    try:
        config = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{option} {file}: cannot be read as JSON ({error}); expected a model's config.json") from error
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = {**config, **config["text_config"]}
    if not isinstance(config, dict):
        raise UserError(f"{option} {file}: got {type(config).__name__}; expected a model's config.json, an object")

    def number(*keys: str, default: int | None = None) -> int:
        value = next((config[key] for key in keys if config.get(key) is not None), default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UserError(f"{option} {file}: {' or '.join(keys)} is {value!r}; expected an integer, at least 0")
        return value

    try:
        other_layers = _other_layers(config)
    except KeyError as error:
        named = next(f"{key}={config[key]}" for key in STATEFUL_KEYS if config.get(key))
        raise UserError(f"{option} {file}: {named}; expected the key {error} too") from error
    heads, shared = number("num_attention_heads"), number("n_shared_experts", default=0)
    experts = number("num_experts", "num_local_experts", "n_routed_experts", default=0)
    if heads < 1:
        raise UserError(f"{option} {file}: num_attention_heads is 0; expected at least 1")
    intermediate = ("moe_intermediate_size", "intermediate_size") if experts else ("intermediate_size",)
    return Shape(
        name=file.parent.resolve().name,
        layers=number("num_hidden_layers", default=len(_kinds(config)) or None),
        hidden=(hidden := number("hidden_size")),
        intermediate=number(*intermediate),
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=hidden // heads),
        vocab=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts + shared if experts else 0,
        active_experts=number("num_experts_per_tok", "num_experts_per_token") + shared if experts else 0,  # with shared
        **other_layers,
        towers=_towers(config),
        source=str(file),
    )


def _other_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of layers whose attention is not that of grouped queries, and of layers without attention."""
    kinds, hidden, about = _kinds(config), config["hidden_size"], dict[str, Any]()
    if rank := config.get("kv_lora_rank"):
        heads, rope = config["num_attention_heads"], config.get("qk_rope_head_dim", 0)
        key, value, low = config["qk_nope_head_dim"] + rope, config["v_head_dim"], config.get("q_lora_rank")
        queries = heads * key * hidden if low is None else low * (hidden + heads * key)
        expanded = rank * heads * (config["qk_nope_head_dim"] + value)
        parameters = queries + hidden * (rank + rope) + expanded + heads * value * hidden
        about["latent"] = Latent(parameters, rank + rope, heads * (key + value) // 2)
    if not kinds:
        return about
    mixer, state = _mixer(config)
    stateful = sum(kind in ("linear_attention", "mamba", "conv", "hybrid") for kind in kinds)
    with_attention = sum(kind not in ("linear_attention", "mamba", "conv", "mlp", "moe") for kind in kinds)
    if without := len(kinds) - with_attention:
        about["mixer"] = mixer * stateful // without
    elif "hybrid" in kinds:  # attention and a mixer in every layer
        own = 2 * hidden * config["head_dim"] * (config["num_attention_heads"] + config["num_key_value_heads"])
        width = config["num_attention_heads"] * config["head_dim"]
        about["latent"] = Latent(own + mixer, 2 * config["num_key_value_heads"] * config["head_dim"], width)
    if {"mlp", "moe"} & set(kinds):  # a layer is one or the other
        about["mlp_layers"] = sum(kind in ("mlp", "moe") for kind in kinds)
    return about | {"attention_layers": with_attention, "state_values": stateful * state}


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Of each layer, by the names of transformers. Empty: all have attention."""
    layers = int(config.get("num_hidden_layers") or 0)
    for key in ("layer_types", "layers_block_type"):
        if config.get(key):
            kinds = [
                {"mamba": "linear_attention", "attention": "full_attention"}.get(kind, kind) for kind in config[key]
            ]
            return kinds[: layers or None]
    if pattern := config.get("hybrid_override_pattern"):  # of Nemotron-H
        names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
        return [names[letter] for letter in pattern]
    if every := config.get("full_attention_interval"):
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    if (at := config.get("attn_layer_indices")) is not None:
        return ["full_attention" if i in at else "linear_attention" for i in range(layers)]
    if period := config.get("attn_layer_period"):
        offset = config.get("attn_layer_offset", 0)
        return ["full_attention" if i % period == offset else "linear_attention" for i in range(layers)]
    return ["hybrid"] * layers if config.get("mamba_d_ssm") else []


def _mixer(config: Mapping[str, Any]) -> tuple[int, int]:
    """Parameters of a layer's mixer, and the numbers of its state."""
    hidden = config["hidden_size"]
    if heads := config.get("linear_num_value_heads"):  # gated delta net
        key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]
        keys, values = config["linear_num_key_heads"] * key, heads * value
        kernel = config.get("linear_conv_kernel_dim", 4)
        products = hidden * (2 * keys + 3 * values + 2 * heads)
        return products + kernel * (2 * keys + values), heads * key * value + kernel * (2 * keys + values)
    if heads := config.get("linear_num_heads"):  # Kimi delta attention, with two gates of low rank
        size, kernel = config["linear_head_dim"], config.get("linear_conv_kernel_dim", 4)
        width = heads * size
        products = 4 * hidden * width + 2 * size * (hidden + width) + hidden * heads
        return products + 3 * kernel * width, width * size + 3 * kernel * width
    state = next((config[k] for k in ("mamba_d_state", "ssm_state_size", "state_size") if config.get(k)), 0)
    heads = next((config[k] for k in ("mamba_n_heads", "mamba_num_heads", "num_heads") if config.get(k)), 0)
    if state:  # Mamba-2, or Mamba (Jamba) without heads
        size = next((config[k] for k in ("mamba_d_head", "mamba_head_dim", "head_dim") if config.get(k)), 0)
        inner = heads * size if heads and isinstance(size, int) else hidden * config.get("mamba_expand", 2)
        groups = next((config[k] for k in ("mamba_n_groups", "n_groups") if config.get(k)), 1)
        kernel = next((config[k] for k in ("mamba_d_conv", "conv_kernel") if config.get(k)), 4)
        if not heads:
            rank = config.get("mamba_dt_rank") or -(-hidden // 16)
            return 3 * hidden * inner + inner * (kernel + rank + 2 * state) + rank * inner, inner * (state + kernel)
        convolved = inner + 2 * groups * state
        return hidden * (2 * inner + 2 * groups * state + heads) + hidden * inner + kernel * convolved, (
            inner * state + kernel * convolved
        )
    if kernel := config.get("conv_L_cache"):  # short convolutions (LFM2)
        return 4 * hidden * hidden + kernel * hidden, kernel * hidden
    heads, size = config["num_attention_heads"], config.get("head_dim") or hidden // config["num_attention_heads"]
    return 5 * hidden * heads * size, heads * size * size  # lightning attention, with its output gate


def _towers(config: Mapping[str, Any]) -> tuple[tuple[str, CostModel], ...]:
    """Of the sections of a config.json that describe them."""
    towers = {kind: _tower(config.get(section), patch) for kind, (section, patch) in TOWERS.items()}
    return tuple((kind, tower) for kind, tower in towers.items() if tower is not None)


def _tower(config: Any, patch: int) -> CostModel | None:
    """Of an encoder of patches that all attend to each other. None: there is none, or its names are unknown."""
    if not isinstance(config, dict):
        return None

    def number(*keys: str) -> float:
        return next((float(config[key]) for key in keys if isinstance(config.get(key), int | float)), 0.0)

    layers = number("depth", "num_hidden_layers", "layers", "encoder_layers")
    hidden = number("embed_dim", "hidden_size", "d_model")
    mlp = number("intermediate_size", "encoder_ffn_dim") or hidden * number("mlp_ratio")
    if not (layers and hidden and mlp):
        return None
    patch = int(number("patch_size")) ** 2 or patch
    token = 2 * layers * (4 * hidden * hidden + 2 * hidden * mlp)
    return CostModel(2 * token / (4 * layers * hidden), causal=False, flops=token, patch=patch)
