"""`gcore doctor --families`: which families of the installed transformers engines and trainer support.

A small network of each family, with random weights, is sampled by the embedded engine, and its samples are packed as
in training; logprobs of both are compared with the forward pass of transformers. What vLLM and SGLang serve is read
from their registries; nothing is run there.
"""

from __future__ import annotations

import asyncio
import copy
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from gcore.config.base import Lora
from gcore.config.engines import ENGINES
from gcore.content.families import FAMILIES, KINDS, UNSUPPORTED
from gcore.generation.served import class_of, registry, served_by
from gcore.types import UserError

CLOSE = 1e-3  # of logprobs in float32, in the mean: another kind of attention or position changes them by more
LAYERS, VOCABULARY = 4, 64
LIBRARIES = [name for name, traits in ENGINES.items() if traits.registry]
SMALL: dict[str, Any] = {  # keys of config.json -> sizes of the small network, where the family has the key
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "ffn_dim", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "num_kv_heads"), 4),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("head_dim", "mamba_d_head", "mamba_head_dim", "linear_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "qk_nope_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups", "n_groups", "first_k_dense_replace"), 1),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_n_heads"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_size", "sliding_window", "attention_chunk_size"), 6),
    **{"qk_rope_head_dim": 4, "qk_head_dim": 12, "index_topk": 6, "mamba_dt_rank": 4, "max_position_embeddings": 256},
    **{"mamba_d_ssm": 64, "query_pre_attn_scalar": 8, "global_head_dim": 8, "expand": 2, "mamba_expand": 2},
    **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 6, "n_shared_experts": 1},
    **{"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
    "indexer_compress_ratio": 3,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "dropout": 0.0},
}

SMALL_TOWER: dict[str, Any] = {  # the same for what encodes media
    **dict.fromkeys(("hidden_size", "out_hidden_size", "d_model", "vision_output_dim"), 32),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "output_proj_dims"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("depth", "num_hidden_layers", "encoder_layers", "num_heads", "num_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "encoder_attention_heads", "pooling_kernel_size"), 2),
    **{"patch_size": 4, "image_size": 16, "head_dim": 16, "num_position_embeddings": 16, "window_size": 16},
    **{"position_embedding_size": 64, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]},
}


def families() -> list[str]:
    """Those with a causal language model, by `model_type`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | FAMILIES.keys())


def report(names: Sequence[str]) -> int:
    """Prints the table, in Markdown. Returns the number of families that are not supported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    checked = ("LoRA", "tensor parallel", "context parallel", "Megatron")
    columns = ["family", "layers", "embedded", "trainer", "media", *checked]
    columns += [registry(name).header for name in LIBRARIES]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    refused = 0
    for name in names:
        cells = row_of(name)
        refused += cells[1].startswith("no")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return refused


def row_of(name: str) -> list[str]:
    """Kinds of layers, then what works. `no: why` where it does not."""
    import torch

    from gcore.config.megatron import check_family
    from gcore.models.decoders import check_network, implementation, traits_of
    from gcore.models.networks import adapters_of, auto_class, unify_passes
    from gcore.training.context import choose_method
    from gcore.training.tensor_parallel import check as check_tensor

    libraries = [_served(engine, name) for engine in LIBRARIES]
    try:
        config = _small(name)
        kinds = ", ".join(sorted({kind.removesuffix("_attention") for kind in traits_of(config).kinds}))
        torch.manual_seed(0)
        network = auto_class(config).from_config(config, attn_implementation=implementation(config)).eval()
        for parameter in network.parameters():
            if parameter.dim() > 1:  # large enough that the output depends on what attention sees
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        unify_passes(network)
        check_network(network)
    except Exception as error:  # of any library code; a family that cannot be made small is not supported either
        return ["", f"no: {_line(error)}", "no", "", "", "", "", "", *libraries]
    checks = {
        "engine": lambda: _sampled(network),
        "trainer": lambda: _packed(copy.deepcopy(network)),  # it changes recurrent layers
        "media": lambda: _seen(copy.deepcopy(network)),
        "LoRA": lambda: adapters_of(network, Lora()) and None,
        "tensor": lambda: check_tensor(config, 2),
        "context": lambda: choose_method(config, 2, 1, "auto") and None,
        "Megatron": lambda: check_family(config.model_type),
    }
    cells = {name: _cell(check) for name, check in checks.items()}
    row = FAMILIES.get(name)
    if row is not None:  # modalities/media_keys.py
        cells |= dict.fromkeys(("tensor", "context", "Megatron"), "no: takes media")
    if cells["media"] == "yes":
        cells["media"] = ", ".join(KINDS[kind].plural for kind in row.kinds) if row is not None else ""
    return [kinds, *cells.values(), *libraries]


def _cell(check: Any) -> str:
    try:
        difference = check()
    except Exception as error:
        return f"no: {_line(error)}"
    if difference is None:
        return "yes"
    return "yes" if difference < CLOSE else f"no: logprobs differ by {difference:.1g}"


def _served(engine: str, family: str) -> str:
    try:
        how = served_by(engine, family, class_of(family))
    except UserError as error:
        outer = re.search(r"of type (\S+) \((\w+)\),", str(error))
        return f"no: only as part of {outer[1]}" if outer else "no"
    return "yes" if how == "its own" else f"yes, by {how}"


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()).replace("|", "/")
    noises = (
        r"; the embedded engine and the trainer.*",
        r"; expected .*",
        r"^(got )?a model of type \S+ ?",
        r"^\S+=\S+: ",
        r"^got a model of type \S+: ",
        r" for a model of type \S+$",
    )
    for noise in noises:
        text = re.sub(noise, "", text)
    return text[:110] if isinstance(error, UserError) else f"{type(error).__name__}: {text[:90]}"


def _small(name: str) -> Any:
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[name]()
    if (row := FAMILIES.get(name)) is not None:
        tower = getattr(default, row.tower) or default.sub_configs[row.tower]()
        known, text = tower.to_dict(), _small(default.get_text_config().model_type)
        small = {"model_type": tower.model_type, **{key: n for key, n in SMALL_TOWER.items() if key in known}}
        if "pixel_shuffle_ratio" in known:
            small["intermediate_size"] = int(small["hidden_size"] / known["pixel_shuffle_ratio"] ** 2)
        if row.grid:  # all pairs of a head turn with the first axis
            head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            pairs = int(head * text.rope_parameters.get("partial_rotary_factor", 1)) // 2
            text.rope_parameters["mrope_section"] = [pairs, 0, 0]
        more = {key: 4 for key in ("mm_tokens_per_image",) if hasattr(default, key)}
        more |= {token: VOCABULARY - 1 - number for number, token in enumerate(row.tokens)}
        make: Any = type(default)
        return make(text_config=text.to_dict(), **{row.tower: small}, **more)
    if default.get_text_config() is not default:
        raise UserError(f"more than a text decoder{UNSUPPORTED.get(name, '')}")
    known = default.to_dict()
    optional = ("sliding_window", "attention_chunk_size")
    sizes = {k: v for k, v in SMALL.items() if k in known and not (k in optional and known[k] is None)}
    if known.get("kv_lora_rank"):  # latent attention: all heads have their own keys
        sizes |= {"num_key_value_heads": sizes["num_attention_heads"], "head_dim": SMALL["qk_rope_head_dim"]}
    if "layer_types" in known and not known.get("layer_types"):
        sizes["layer_types"] = ["full_attention"] * LAYERS
    if known.get("num_kv_shared_layers"):
        sizes |= {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
    return CONFIG_MAPPING[name](**sizes)


def _plain(network: Any, tokens: Any, steps: int, **more: Any) -> Any:
    import torch

    from gcore.models.decoders import forbid, forbidden_tokens

    with torch.no_grad():
        logits = network(input_ids=tokens[None], use_cache=False, **more).logits[0].float()
    logprobs = forbid(logits, forbidden_tokens(network.config)).log_softmax(-1)
    return logprobs[:-1].gather(-1, tokens[1:, None])[-steps:, 0]


def _generated(network: Any, prompts: Sequence[Any], steps: int) -> list[Any]:
    """Completions of the embedded engine."""
    from gcore.generation.embedded import EmbeddedBackend
    from gcore.generation.engine_shell import SteppedEngine
    from gcore.types import Request, SamplingParams

    longest = max(len(prompt.tokens_T) for prompt in prompts)
    engine = SteppedEngine(EmbeddedBackend(network, max_concurrent=4, max_length=longest + steps))
    try:
        asked = [Request(prompt, SamplingParams(max_tokens=steps), key) for key, prompt in enumerate(prompts)]
        return asyncio.run(engine.generate(asked))
    finally:
        engine.close()


def _seen(network: Any) -> float | None:
    """The same as `_sampled` and `_packed`, for a prompt with the smallest medium."""
    import inspect

    import numpy as np
    import torch

    from gcore.content.tokens import Tokens, tokens_of
    from gcore.models.towers import encode, smallest_medium, takes_media
    from gcore.training.media_model import MediaLogprobModel
    from gcore.types import MicroBatch, Sample

    if not takes_media(network):
        return None
    config, medium = network.config, smallest_medium(network)
    with torch.no_grad():
        num = len(encode(network, [medium])[0][0])
    token = getattr(config, FAMILIES[config.model_type].tokens[0])
    prompt = np.array([1, 5, 9, *[token] * num, 8, 4], np.int32)
    content = Tokens(prompt, media=(replace(medium, key="smallest", places=np.arange(3, 3 + num, dtype=np.int32)),))
    (answer,) = _generated(network, [content], 6)
    content = content.extended(tokens_of(answer.content))
    tokens = torch.from_numpy(content.tokens_T).long()
    kinds, known = (tokens == token).int()[None], inspect.signature(network.forward).parameters
    given = {"mm_token_type_ids": kinds, "token_type_ids": kinds}
    given |= {name: torch.from_numpy(np.array(value)) for name, value in medium.tensors().items()}
    wanted = torch.from_numpy(answer.logprobs_S)
    if medium.kind == "image":
        wanted = _plain(network, tokens, 6, **{name: value for name, value in given.items() if name in known})
    sample = Sample(0, 0, content, np.ones(6, bool), answer.logprobs_S)
    samples = {(0, 0): sample, (1, 0): replace(sample, prompt_id=1)}
    model = MediaLogprobModel(network)
    alone: Any = SimpleNamespace(size=1)  # ranks that share a row
    packed = model.pack(MicroBatch((tuple(samples),), 2 * content.size), samples, alone)
    with torch.no_grad():
        trained = model(packed)[0].view(2, -1)
    found = torch.cat([torch.from_numpy(answer.logprobs_S)[None], trained])
    return float((found - wanted).abs().mean(-1).max())


def _sampled(network: Any) -> float:
    """How far the logprobs are off in the mean of a sample, of what the engine sampled. One token may differ by more: a
    router may choose another of two experts that are equally good."""
    import numpy as np
    import torch

    from gcore.content.tokens import Tokens, tokens_of

    prompts = [np.arange(3, 3 + length, dtype=np.int32) * 7 % 60 + 3 for length in (9, 14)]
    differences = []
    for prompt, answer in zip(prompts, _generated(network, [Tokens(p) for p in prompts], 12), strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, tokens_of(answer.content).tokens_S])).long()
        differences.append(np.abs(answer.logprobs_S - _plain(network, tokens, 12).numpy()).mean())
    return float(max(differences))


def _packed(network: Any) -> float:
    """How far logprobs of two samples in one row are off in the mean."""
    import numpy as np
    import torch

    from gcore.content.tokens import Tokens, tokens_of
    from gcore.training.logprob_model import LogprobModel, to_tensors
    from gcore.types import MicroBatch, Sample

    samples = {}
    for number, length in enumerate((17, 12)):
        tokens = np.arange(length, dtype=np.int32) * 11 % 60 + 3
        samples[number, 0] = Sample(number, 0, Tokens.split(tokens, 9), np.ones(9, bool), np.zeros(9, np.float32))
    wanted = [_plain(network, torch.from_numpy(tokens_of(s.content).tokens_T).long(), 9) for s in samples.values()]
    packed = to_tensors(MicroBatch((tuple(samples),), 32), samples, torch.device("cpu"))
    with torch.no_grad():
        logprobs_S, _ = LogprobModel(network)(packed)
    return float((logprobs_S - torch.cat(wanted)).abs().mean())
