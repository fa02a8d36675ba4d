"""Properties of a decoder that its callers must handle: one attention mask per kind of layer, and scaled logits.

The trainer packs samples into rows and computes logits only where they are needed; the embedded engine has its own KV
cache. Both build attention masks themselves, which must equal those of transformers. `traits_of` reads the properties
from the model's configuration and raises for configurations that were not compared with transformers:
tests/contract/test_families.py compares every family named here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gcore.content.families import FAMILIES, TEXT_ALONE, Blocks
from gcore.types import UserError


@dataclass(frozen=True, slots=True)
class LayerKind:
    """LayerKind("full")"""

    mask: str = ""  # which earlier tokens its attention sees: full, sliding, chunked; empty: it has no attention
    state: bool = False  # has a state that goes along the sequence (models/recurrent.py)
    chooses: bool = False  # an indexer chooses the tokens that attention sees
    kernel: bool = True  # scores and a window are all of its attention, as the kernel of training/varlen.py computes it

    @property
    def rolls_back(self) -> bool:
        """Whether tokens of a decoding step can be dropped again: all they leave are keys and values."""
        return not (self.state or self.chooses)


KINDS = {  # by their names in `layer_types` of transformers
    "full_attention": LayerKind("full"),
    "sliding_attention": LayerKind("sliding"),
    "chunked_attention": LayerKind("chunked", kernel=False),
    "indexed_attention": LayerKind("full", chooses=True, kernel=False),  # an indexer chooses among the visible tokens
    # a window, and before it, tokens of the sequence that are compressed to one entry each:
    "compressed_sparse_attention": LayerKind("sliding", state=True, kernel=False),
    "heavily_compressed_attention": LayerKind("sliding", state=True, kernel=False),
    # an indexer chooses among groups of tokens, and makes the mask itself:
    "pooled_attention": LayerKind(state=True, kernel=False),
    "linear_attention": LayerKind(state=True),  # gated delta rule, lightning attention, Mamba
    "conv": LayerKind(state=True),
    "hybrid": LayerKind("full", state=True),  # attention and a state-space model side by side
    "mlp": LayerKind(),
    "moe": LayerKind(),
}
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
ONE_WINDOW = {"mistral", "mixtral", "ministral3", "phi3", "qwen3_moe", "starcoder2"}  # the window is in every layer
BY_LAYER = {  # `layer_types` lists which layers have the window
    *("qwen2", "qwen2_moe", "qwen3", "gemma2", "gemma3_text", "vaultgemma", "gpt_oss", "ministral", "olmo3"),
    *("cohere2", "exaone4", "smollm3", "gemma3n_text", "gemma4_text", "deepseek_v4", "step3p5", "afmoe", "cwm"),
    *("cohere2_moe", "exaone_moe", "granite_swa", "granitemoe_swa", "mimo_v2_flash"),
}
IN_CHUNKS = {"llama4_text"}
INDEXED = {"deepseek_v32", "glm_moe_dsa", "qwen4_exp_text", "hy_v4", "axk2"}
SCALED = {  # logits capped or multiplied
    *("gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "vaultgemma", "cohere", "cohere2", "granite"),
    *("granitemoe", "granitemoehybrid", "falcon_h1", "cohere2_moe", "granite_swa", "granitemoe_swa", "minicpm3"),
    "nanochat",
}
STATEFUL = {  # with recurrent layers
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "minimax", "nemotron_h"),
    *("falcon_h1", "bamba", "granitemoehybrid", "jamba", "mamba2", "lfm2", "lfm2_moe", "qwen4_exp_text"),
    *("mamba", "falcon_mamba"),
    *("deepseek_v4", "glm5_next_text"),  # compressed entries, pooled keys
}
RENAMED = {"glm5_next_text": {"indexed_attention": "pooled_attention"}}  # kinds that are others in this family
VERIFIED = ONE_WINDOW | BY_LAYER | SCALED | STATEFUL | INDEXED | IN_CHUNKS | {"llama"}
KNOWN = VERIFIED | TEXT_ALONE | FAMILIES.keys()  # with towers; of other families `check_network` computes two sequences
ROUTER = re.compile("(?<!Hash)Router$|JambaSparseMoeBlock$")  # classes
LONG_SEQUENCE_LIMITS = ("keep_window_size", "index_topk")  # of attention, in families that no test covers
TOWER_TOKENS = ("image_token_id", "video_token_id", "audio_token_id")
DEQUANTISED = ("fp8", "mxfp4")  # files in these formats are read as if they were in bfloat16
MASKED_LOGIT = -1e9  # its probability and gradient are 0; with -infinity, 0 * infinity would give NaN
SCALES = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


@dataclass(frozen=True, slots=True)
class Traits:
    """Traits(kinds=("sliding_attention", "full_attention"), window=4096, additive=False, scale=1.0, cap=None)"""

    kinds: tuple[str, ...]  # of each layer
    window: int | None  # a token in a sliding layer sees itself and the window - 1 tokens before it
    additive: bool  # the mask is added to the attention scores; otherwise it is True where a key is visible
    scale: float  # of the logits
    cap: float | None  # then, logits become cap * tanh(logits / cap)
    forbidden: tuple[int, ...] = ()  # tokens that are never sampled: their logits are masked
    media_blocks: Blocks = ""  # kind of the layers where the features of a medium attend to each other, later ones too
    chunk: int | None = None  # a token in a chunked layer sees the tokens of its chunk, up to itself

    def masks(
        self,
        seen: Tensor,
        query_at: Tensor,
        dtype: torch.dtype,
        blocks: Tensor | None = None,
        positions: tuple[Tensor, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """One mask per kind of attention. `seen` [..., Q, K] is that of full attention. Keys are at 0, 1, ... K - 1 and
        queries at `query_at`, of shape [..., Q, 1]. `blocks` [..., Q, K]: pairs of features of one medium. `positions`
        in their samples, of queries [..., Q, 1] and keys [..., 1, K], if they are not where they are."""
        wanted = {KINDS[kind].mask for kind in self.kinds}
        masks = {FULL: seen} if "full" in wanted else {}
        query_at, key_at = positions or (query_at, torch.arange(seen.shape[-1], device=seen.device))
        if "sliding" in wanted:
            assert self.window is not None
            near = seen if blocks is None or self.media_blocks != SLIDING else seen | blocks
            masks[SLIDING] = near & (key_at > query_at - self.window)
        if "chunked" in wanted:
            assert self.chunk is not None
            masks[CHUNKED] = seen & (query_at // self.chunk == key_at // self.chunk)
        if blocks is not None and self.media_blocks == "all":
            masks = {kind: mask | blocks for kind, mask in masks.items()}
        if self.additive:
            zero, lowest = torch.zeros((), dtype=dtype, device=seen.device), torch.finfo(dtype).min
            return {kind: torch.where(mask, zero, lowest) for kind, mask in masks.items()}
        return masks

    @property
    def recurrent(self) -> bool:
        return any(KINDS[kind].state for kind in self.kinds)

    def as_argument(self, masks: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor | None] | None:
        """`attention_mask` for the decoders of transformers: one tensor if all layers are of one kind, else by kind."""
        if not masks:
            return None
        if len(set(self.kinds)) == 1 and not self.recurrent:
            return next(iter(masks.values()))
        by_mask = {KINDS[kind].mask: mask for kind, mask in masks.items()}
        kinds = dict.fromkeys((*self.kinds, *KINDS))  # some models take the first mask
        return {k: by_mask.get(KINDS[k].mask) for k in kinds if KINDS[k].state or KINDS[k].mask in by_mask}

    def scaled(self, logits: Tensor) -> Tensor:
        """Output of the last linear layer -> logits of the model."""
        if self.scale != 1:
            logits = logits * self.scale
        return self.allowed(logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap)

    def allowed(self, logits: Tensor) -> Tensor:
        """Logits of the model -> logits of the policy, which never says a forbidden token. Engine and trainer both
        normalize over the remaining tokens."""
        return forbid(logits, self.forbidden)


def forbid(logits: Tensor, tokens: tuple[int, ...]) -> Tensor:
    if not tokens:
        return logits
    return logits.index_fill(-1, torch.tensor(tokens, device=logits.device), MASKED_LOGIT)


def decoder_of(network: Any) -> Any:
    """The layers with embedding and last norm, without the head."""
    decoder = network.get_decoder()
    is_whole = decoder is network or type(decoder).__name__.endswith("ForCausalLM")  # of Llama 4
    return decoder.model if is_whole else decoder


def layers_of(network: Any) -> tuple[str, nn.ModuleList]:
    """The layers of the decoder, and their name in it."""
    lists = [item for item in decoder_of(network).named_children() if isinstance(item[1], nn.ModuleList)]
    if not lists:
        raise _unsupported(network.config, "has no list of layers")
    name, layers = max(lists, key=lambda item: (item[0] == "layers", len(item[1])))
    return name, cast(nn.ModuleList, layers)


def implementation(config: Any) -> str:
    """The attention implementation of transformers that supports all features of this model: its sdpa leaves out capped
    scores."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return "sdpa" if softcap is None and getattr(kind, "_supports_sdpa", True) else "eager"


def forbidden_tokens(config: Any) -> tuple[int, ...]:
    """The tokens that stand for features in prompts. A response with one would be read as a medium that is not there.
    Some models have more tokens than logits."""
    return tuple(i for i in feature_tokens(config) if i < config.get_text_config().vocab_size)


def feature_tokens(config: Any) -> tuple[int, ...]:
    row = FAMILIES.get(config.model_type)
    names = row.tokens if row else TOWER_TOKENS if config.model_type in TEXT_ALONE else ()
    ids: list[int | None] = [getattr(config, name, None) for name in names]
    return tuple(sorted({i for i in ids if i is not None}))


def quantisation(config: Any) -> str | None:
    """The method by which the files of a model are quantised."""
    if (found := getattr(config, "quantization_config", None)) is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
    return str(getattr(method, "value", method))


def traits_of(config: Any) -> Traits:
    """Raises UserError for models that the engine and the trainer would compute differently from transformers."""
    if (row := FAMILIES.get(config.model_type)) is not None:
        text = config.get_text_config()
        causal = row.blocks == SLIDING and text.use_bidirectional_attention is None
        traits = replace(_text_traits(text), media_blocks="" if causal else row.blocks)
        return replace(traits, forbidden=forbidden_tokens(config))
    if config.model_type in TEXT_ALONE:
        return replace(_text_traits(config.get_text_config()), forbidden=forbidden_tokens(config))
    return _text_traits(config)


def _text_traits(config: Any) -> Traits:
    if config.get_text_config() is not config:
        raise _unsupported(config, "has more than a text decoder")
    if (method := quantisation(config)) not in (None, *DEQUANTISED):
        raise _unsupported(config, f"has quantised weights ({method}; expected {', '.join(DEQUANTISED)} or none)")
    both_ways = getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision")  # of media only
    if both_ways or not getattr(config, "is_causal", True):
        raise _unsupported(config, "attends to later tokens")
    kinds = _layers(config)
    window = getattr(config, "sliding_window", None) if any(KINDS[k].mask == "sliding" for k in kinds) else None
    chunk = getattr(config, "attention_chunk_size", None) if CHUNKED in kinds else None
    scale, cap = _scaling(config)
    return Traits(kinds, window, implementation(config) == "eager", scale, cap, chunk=chunk)


def _layers(config: Any) -> tuple[str, ...]:
    family, num_layers = config.model_type, int(config.num_hidden_layers)
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    declared = getattr(config, "layer_types", None)
    if family in ONE_WINDOW or declared is None:
        chunked = getattr(config, "attention_chunk_size", None) is not None and declared is None
        kinds = [CHUNKED if chunked else SLIDING if windowed else FULL] * num_layers
    else:
        kinds = [RENAMED.get(family, {}).get(kind, kind) for kind in declared][:num_layers]
    limits = [f"{name}={getattr(config, name)}" for name in LONG_SEQUENCE_LIMITS if getattr(config, name, None)]
    if limits and family not in VERIFIED:
        raise _unsupported(config, f"limits attention ({', '.join(limits)})")
    unknown = set(kinds) - _compared_kinds(family)
    if SLIDING in unknown or (SLIDING in kinds and not windowed) or (windowed and family == "minimax"):
        raise _unsupported(config, f"has layers of kind {SLIDING} (sliding_window={config.sliding_window})")
    if unknown:
        raise _unsupported(config, f"has layers of kind {', '.join(sorted(unknown))}")
    return tuple(kinds)


def _compared_kinds(family: str) -> set[str]:
    """Of layers, in a model of this family."""
    stateful = {kind for kind, row in KINDS.items() if row.state or not row.mask} if family in STATEFUL else set()
    others = {SLIDING: ONE_WINDOW | BY_LAYER, CHUNKED: IN_CHUNKS, "indexed_attention": INDEXED}
    return {FULL, *stateful, *(kind for kind, families in others.items() if family in families)}


def _scaling(config: Any) -> tuple[float, float | None]:
    values = {name: getattr(config, name, None) for name in SCALES}
    scales = {name: float(value) for name, value in values.items() if value not in (None, 1)}
    if scales and config.model_type not in SCALED:
        raise _unsupported(config, f"scales its logits ({', '.join(f'{n}={v}' for n, v in scales.items())})")
    return scales.get("logit_scale", 1.0) / scales.get("logits_scaling", 1.0), scales.get("final_logit_softcapping")


def _unsupported(config: Any, what: str) -> UserError:
    return UserError(
        f"a model of type {config.model_type} {what}; the embedded engine and the trainer do not support that "
        "(key: model.path; docs/engines.md lists the families)"
    )


class ExpertRouters:
    """The routers of a mixture of experts. They can tell which experts they choose, and use a choice that is given.

    A router chooses with `topk` among the scores of all experts. With a given choice, that function returns the given
    experts with their scores, so that the router computes their weights as its own and learns.
    """

    def __init__(self, network: Any) -> None:
        config = network.config.get_text_config()
        self.num_experts = 0
        self.given: Tensor | None = None  # [tokens, routers, k]; -1: the router chooses itself
        self._seen: list[Tensor] | None = None
        for number, router in enumerate(find_expert_routers(network)):
            num_experts = int(getattr(router, "num_experts", None) or config.num_experts)
            self.num_experts = max(self.num_experts, num_experts)
            router.forward = partial(self._steered, router.forward, number, num_experts)

    def watch(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """The result, and the experts of each token: [tokens, routers, k]."""
        self._seen = []
        try:
            result = compute()
            return result, torch.stack(self._seen, 1)
        finally:
            self._seen = None

    def _steered(self, forward: Callable[..., Any], number: int, num_experts: int, *args: Any, **kwargs: Any) -> Any:
        if self.given is None and self._seen is None:
            return forward(*args, **kwargs)
        with _Choice(num_experts, None if self.given is None else self.given[:, number], self._seen):
            return forward(*args, **kwargs)


class _Choice(TorchFunctionMode):
    """Of one router. `given`: [tokens, k]. Its choice is added to `seen`."""

    def __init__(self, num_experts: int, given: Tensor | None, seen: list[Tensor] | None) -> None:
        super().__init__()
        self._num_experts, self._given, self._seen = num_experts, given, seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].shape[1:] != (self._num_experts,):
            return output  # not of all experts: of groups of experts, for example
        if self._seen is not None:
            self._seen.append(output[1])
        if self._given is None:
            return output
        given = self._given.to(output[1].dtype)
        chosen = torch.where(given < 0, output[1], given)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


def find_expert_routers(network: Any) -> list[Any]:
    """In the order of the layers: the modules that choose experts by their scores. Not those with a fixed choice."""
    return [module for module in network.modules() if ROUTER.search(type(module).__name__)]


def expert_routers_of(network: Any) -> ExpertRouters | None:
    return ExpertRouters(network) if find_expert_routers(network) else None


def check_length(config: Any, max_length: int | None) -> None:
    """Some rotary embeddings change their frequencies if a batch has a long sequence. Then a token's keys would depend
    on later tokens and on the rest of the batch. Raises UserError if sequences can be that long."""
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        kind = rope.get("rope_type", "") if isinstance(rope, dict) else ""
        if kind == "longrope":
            limit = rope["original_max_position_embeddings"]
        elif "dynamic" in kind:
            limit = config.max_position_embeddings
        else:
            continue
        if max_length is not None and max_length > limit:
            raise UserError(
                f"a model of type {config.model_type} with {kind} positions: sequences of up to {max_length} tokens, "
                f"expected at most {limit}, beyond which its rotary frequencies change (keys: data.max_prompt_length, "
                "generation.max_response_length; for a judge, its own keys)"
            )


@torch.no_grad()
def check_network(network: Any) -> None:
    """Compare a network of a family that no test covers: the logprobs of two short sequences, packed as in training,
    must equal those of each alone."""
    traits = traits_of(network.config)
    layers_of(network)
    if getattr(network, "_is_stateful", False) and not traits.recurrent:
        raise _unsupported(network.config, "keeps a recurrent state")
    if network.config.model_type in KNOWN:
        return
    device, lengths = network.device, (5, 7)
    parts = [torch.arange(3, 3 + n, device=device) * 7919 % network.config.vocab_size for n in lengths]
    sample = torch.repeat_interleave(torch.arange(2, device=device), torch.tensor(lengths, device=device))
    at = torch.arange(len(sample), device=device)
    seen = (sample[:, None] == sample) & (at <= at[:, None])
    try:
        alone = torch.cat([network(part[None], use_cache=False).logits[0].float().log_softmax(-1) for part in parts])
        hidden = decoder_of(network.train())(
            input_ids=torch.cat(parts)[None],
            position_ids=torch.cat([torch.arange(n, device=device) for n in lengths])[None],
            attention_mask=traits.as_argument(traits.masks(seen[None, None], at[:, None], network.dtype)),
            use_cache=False,
        ).last_hidden_state
        packed = traits.scaled(network.get_output_embeddings()(hidden[0]).float()).log_softmax(-1)
    except Exception as error:
        raise _unsupported(
            network.config, f"does not run packed: {type(error).__name__}: {str(error)[:100]!r}"
        ) from error
    finally:
        network.eval()
    difference = float((packed - alone).abs().mean())
    if not difference < (1e-4 if network.dtype == torch.float32 else 0.05):
        raise _unsupported(
            network.config, f"gives packed samples different logprobs (mean difference {difference:.2g})"
        )
