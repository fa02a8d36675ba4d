"""Model families: the embedded engine and the trainer compute what transformers computes.

The reference is the library's own forward pass over one sequence: no padding, no cache, no mask given. The engine's
logprobs of what it sampled and the trainer's logprobs, packed and alone, agree with it. Windows are smaller than the
sequences, so a layer that sees too much or too little shows.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from gcore.config.base import Model
from gcore.content.tokens import Tokens
from gcore.generation import embedded
from gcore.generation.embedded import EmbeddedBackend
from gcore.generation.engine_shell import SteppedEngine
from gcore.generation.noise import noise_key
from gcore.generation.speculation import speculation_of
from gcore.models import recurrent
from gcore.models.decoders import KINDS, traits_of
from gcore.models.networks import auto_class, load_model, load_scorer, score_texts
from gcore.models.recurrent import mixers_of
from gcore.prompts.processor import media_family
from gcore.training import varlen
from gcore.training.context import choose_method
from gcore.training.logprob_model import LogprobModel, to_tensors
from gcore.types import MicroBatch, Request, Sample, SamplingParams, UserError
from tests.contract.test_speculation import Guess

CPU = torch.device("cpu")
VOCABULARY, WINDOW, LAYERS = 48, 5, 4
CLOSE = 2e-5
CLOSE_DELTA = 5e-5  # the delta rule in float32, in chunks or step by step: transformers differs from itself as much
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.2,  # ignored: training and sampling are of one policy
}
MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW}


def family(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**{**SIZES, **options})


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": family("LlamaConfig"),
    "qwen3": family("Qwen3Config", head_dim=8),
    "qwen2-mixed": family("Qwen2Config", layer_types=MIXED, **QWEN_WINDOW),
    "qwen2-upper": family("Qwen2Config", max_window_layers=2, **QWEN_WINDOW),
    "qwen3-mixed": family("Qwen3Config", head_dim=8, layer_types=MIXED, **QWEN_WINDOW),
    "qwen2_moe": family(
        "Qwen2MoeConfig", max_window_layers=3, shared_expert_intermediate_size=24, **QWEN_EXPERTS, **QWEN_WINDOW
    ),
    "qwen3_moe": family("Qwen3MoeConfig", head_dim=8, **QWEN_EXPERTS, **QWEN_WINDOW),
    "mistral": family("MistralConfig", head_dim=8, sliding_window=WINDOW),
    "mistral-full": family("MistralConfig", head_dim=8, sliding_window=None),
    "mixtral": family("MixtralConfig", head_dim=8, sliding_window=WINDOW, router_jitter_noise=0.1, **EXPERTS),
    "ministral": family("MinistralConfig", head_dim=8, sliding_window=WINDOW, layer_types=MIXED),
    "ministral3": family("Ministral3Config", head_dim=8, sliding_window=WINDOW),
    "phi3": family("Phi3Config", sliding_window=WINDOW),
    "phi3-full": family("Phi3Config"),
    "starcoder2": family("Starcoder2Config", sliding_window=WINDOW),
    "gemma2": family(
        "Gemma2Config",
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "vaultgemma": family("VaultGemmaConfig", head_dim=8, sliding_window=WINDOW, final_logit_softcapping=3.0),
    "gemma2-uncapped": family(
        "Gemma2Config", head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma3": family(
        "Gemma3TextConfig",
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gpt_oss": family(
        "GptOssConfig",
        head_dim=8,
        sliding_window=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        **EXPERTS,
    ),
    "olmo3": family("Olmo3Config", sliding_window=WINDOW, layer_types=MIXED),
    "cohere": family("CohereConfig", logit_scale=0.25),
    "cohere2": family("Cohere2Config", sliding_window=WINDOW, layer_types=MIXED, logit_scale=0.25),
    "smollm3": family("SmolLM3Config", no_rope_layers=[1, 0] * 2, sliding_window=WINDOW, use_sliding_window=True),
    "exaone4": family("Exaone4Config", sliding_window=WINDOW, sliding_window_pattern=2),
    "granitemoe": family("GraniteMoeConfig", logits_scaling=2.0, **EXPERTS),
    "granite": family("GraniteConfig", logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.7),
}
GDN = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 3,
}
HYBRID = ["linear_attention", "full_attention"] * (LAYERS // 2)
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 4,
}
CONV = {"layer_types": ["conv", "full_attention"] * (LAYERS // 2), "conv_L_cache": 3}
SHARED = {"shared_expert_intermediate_size": 24}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    "head_dim": 4,
    "v_head_dim": 8,
    "index_head_dim": 8,
    "index_n_heads": 16,
    "index_topk": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
TODAY: dict[str, Callable[[], Any]] = {
    "qwen3_next": family("Qwen3NextConfig", head_dim=8, layer_types=HYBRID, **GDN, **QWEN_EXPERTS, **SHARED),
    "qwen3_5": family("Qwen3_5TextConfig", head_dim=8, layer_types=HYBRID, **GDN),
    "qwen3_5_moe": family("Qwen3_5MoeTextConfig", head_dim=8, layer_types=HYBRID, **GDN, **QWEN_EXPERTS, **SHARED),
    "olmo_hybrid": family("OlmoHybridConfig", head_dim=8, layer_types=HYBRID, **GDN),
    "kimi_linear": family(
        "KimiLinearConfig",
        layer_types=HYBRID,
        num_key_value_heads=4,
        head_dim=4,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        qk_head_dim=12,
        v_head_dim=8,
        linear_head_dim=8,
        linear_num_heads=4,
        linear_conv_kernel_dim=3,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=24,
    ),
    "minimax": family("MiniMaxConfig", head_dim=8, layer_types=HYBRID, block_size=4, **EXPERTS),
    "nemotron_h": family(
        "NemotronHConfig",
        head_dim=8,
        layer_types=["linear_attention", "moe", "full_attention", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        conv_kernel=3,
        chunk_size=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
    ),
    "falcon_h1": family("FalconH1Config", head_dim=8, mamba_d_ssm=64, **MAMBA),
    "bamba": family("BambaConfig", attn_layer_indices=[1, 3], **MAMBA),
    "granitemoehybrid": family(
        "GraniteMoeHybridConfig", layer_types=HYBRID, shared_intermediate_size=24, **EXPERTS, **MAMBA
    ),
    "jamba": family(
        "JambaConfig",
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
        mamba_d_conv=3,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "mamba2": family(
        "Mamba2Config", num_heads=8, head_dim=8, state_size=8, n_groups=1, expand=2, conv_kernel=3, chunk_size=4
    ),
    "gemma3n": family(
        "Gemma3nTextConfig",
        head_dim=8,
        intermediate_size=[48] * LAYERS,
        layer_types=MIXED,
        sliding_window=WINDOW,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * LAYERS,
        altup_num_inputs=2,
    ),
    "gemma4": family(
        "Gemma4TextConfig",
        head_dim=8,
        global_head_dim=8,
        layer_types=MIXED,
        sliding_window=WINDOW,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
    ),
    "gemma4-moe": family(
        "Gemma4TextConfig",
        head_dim=8,
        global_head_dim=8,
        layer_types=MIXED,
        sliding_window=WINDOW,
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=24,
    ),
    "llama4": family(
        "Llama4TextConfig",
        head_dim=8,
        intermediate_size_mlp=48,
        attention_chunk_size=WINDOW,
        layer_types=["chunked_attention", "full_attention"] * (LAYERS // 2),
        no_rope_layers=[1, 0] * (LAYERS // 2),
        **EXPERTS,
    ),
    "deepseek_v32": family("DeepseekV32Config", **MLA),
    "glm_moe_dsa": family("GlmMoeDsaConfig", **MLA),
    "deepseek_v4": family(
        "DeepseekV4Config",
        num_key_value_heads=1,
        head_dim=16,
        q_lora_rank=16,
        partial_rotary_factor=0.25,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        layer_types=[
            *("compressed_sparse_attention", "heavily_compressed_attention"),
            *("sliding_attention", "compressed_sparse_attention"),
        ],
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        compress_rates={"compressed_sparse_attention": 3, "heavily_compressed_attention": 7},
        sliding_window=WINDOW,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=16,
        index_head_dim=8,
        index_topk=3,
        hc_mult=2,
    ),
    "qwen4_exp": family(
        "Qwen4ExpTextConfig",
        head_dim=8,
        layer_types=["linear_attention", "indexed_attention"] * (LAYERS // 2),
        hc_count=2,
        hc_lowrank=8,
        ple_layer_ids=[1, 3],
        ple_embed_dim=16,
        ple_conv_kernel_size=2,
        heads_per_ngram=2,
        ngram_vocab_size_base=50,
        make_ngram_vocab_size_divisible_by=4,
        split_ngram_parts=2,
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=6,
        indexer_compress_ratio=3,
        **GDN,
        **QWEN_EXPERTS,
        **SHARED,
    ),
    "lfm2": family("Lfm2Config", **CONV),
    "lfm2_moe": family(
        "Lfm2MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, num_dense_layers=1, **CONV
    ),
}
TODAY |= {
    "afmoe": family(
        "AfmoeConfig",
        head_dim=8,
        layer_types=MIXED,
        sliding_window=WINDOW,
        num_dense_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
    ),
    "cohere2_moe": family(
        "Cohere2MoeConfig",
        head_dim=8,
        layer_types=MIXED,
        sliding_window=WINDOW,
        logit_scale=0.25,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "cwm": family(
        "CwmConfig",
        head_dim=8,
        layer_types=MIXED,
        sliding_window=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "exaone_moe": family(
        "ExaoneMoeConfig",
        head_dim=8,
        layer_types=MIXED,
        sliding_window=WINDOW,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_group=1,
        topk_group=1,
        mlp_layer_types=["dense", "sparse"] * (LAYERS // 2),
    ),
    "granite_swa": family("GraniteSWAConfig", layer_types=MIXED, sliding_window=WINDOW, logits_scaling=2.0),
    "granitemoe_swa": family(
        "GraniteMoeSWAConfig", layer_types=MIXED, sliding_window=WINDOW, logits_scaling=2.0, **EXPERTS
    ),
    "mimo_v2_flash": family(
        "MiMoV2FlashConfig",
        head_dim=8,
        v_head_dim=6,
        layer_types=MIXED,
        sliding_window=WINDOW,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_group=1,
        topk_group=1,
    ),
    "nanochat": family("NanoChatConfig", final_logit_softcapping=3.0),
    "minicpm3": family("MiniCPM3Config", **{k: v for k, v in MLA.items() if "index" not in k}),
    "hy_v4": family("HYV4Config", **{**MLA, "head_dim": 8}),
    "axk2": family("AXK2Config", **MLA),
    "mamba": family("MambaConfig", state_size=8, conv_kernel=3, time_step_rank=4),
    "falcon_mamba": family("FalconMambaConfig", state_size=4, conv_kernel=3, time_step_rank=4),
}
TOWER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
QWEN_TOWER = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}


def outer(name: str, text: Callable[[], Any], tower: dict[str, Any]) -> Callable[[], Any]:
    """A model with a tower, of which the decoder alone is used."""
    tokens = {"image_token_id": 1, "video_token_id": 2}
    return lambda: getattr(transformers, name)(text_config=text().to_dict(), vision_config=tower, **tokens)


TODAY |= {
    "step3p7": outer(
        "Step3p7Config",
        family(
            "Step3p7TextConfig",
            head_dim=8,
            layer_types=MIXED,
            mlp_layer_types=["dense", "sparse"] * (LAYERS // 2),
            sliding_window=WINDOW,
            num_sliding_attention_heads=2,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            share_expert_dim=24,
            swiglu_limits=[None, 1.0] * (LAYERS // 2),
        ),
        {**TOWER, "image_size": 28},
    ),
    "glm5_next": outer(
        "Glm5NextConfig",
        family(
            "Glm5NextTextConfig",
            **{key: value for key, value in MLA.items() if key not in ("qk_rope_head_dim", "qk_head_dim", "head_dim")},
            qk_rope_head_dim=0,
            index_kpool=3,
            linear_head_dim=8,
            linear_num_heads=4,
            linear_conv_kernel_dim=3,
            hc_mult=2,
            mlp_layer_types=["dense", "sparse"] * (LAYERS // 2),
            layer_types=["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
            indexer_types=["full", "full", "shared", "full"],
        ),
        QWEN_TOWER,
    ),
    "llama4-outer": outer(
        "Llama4Config",
        TODAY["llama4"],
        {**TOWER, "image_size": 28, **dict.fromkeys(("vision_output_dim", "projector_input_dim"), 32)}
        | {"projector_output_dim": 32},
    ),
    "gemma4-outer": outer("Gemma4Config", TODAY["gemma4"], TOWER),
    "qwen4_exp-outer": outer("Qwen4ExpConfig", TODAY["qwen4_exp"], QWEN_TOWER),
}
FAMILIES |= TODAY
SAME_BITS = ("qwen3_5", "olmo_hybrid", "falcon_h1", "bamba", "mamba2", "lfm2", "gemma3n", "gemma4", "llama4")
DELTA_RULE = (
    *(
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe",
        "olmo_hybrid",
        "kimi_linear",
        "qwen4_exp",
        "qwen4_exp-outer",
        "glm5_next",
    ),
)
SOFT_CAPPED = ("gemma2", "vaultgemma")


def close(name: str) -> float:
    return CLOSE_DELTA if name in DELTA_RULE else CLOSE


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            save(FAMILIES[name](), made[name], auto_class(FAMILIES[name]()))
        return made[name]

    return folder


def save(config: Any, folder: Path, kind: Any = AutoModelForCausalLM) -> None:
    """Weights large enough for distributions that are neither flat nor certain, and for attention that chooses."""
    torch.manual_seed(0)
    network = kind.from_config(config)
    delta = tuple(f"{name}." for name, module in network.named_modules() if hasattr(module, "forget_gate"))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if ("linear_attn" in name or name.startswith(delta)) and parameter.dim() > 1:
                # its float32 sums, step by step or in chunks, differ by 2e-4 with the weights of other layers here
                parameter.normal_(std=parameter.shape[-1] ** -0.5 * 0.4)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.4 if "embed" in name or "head" in name else parameter.shape[-1] ** -0.5 * 1.2)
            elif "sinks" in name or name.endswith("bias"):
                parameter.normal_(std=0.5)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    network.save_pretrained(folder)


def ours(folder: Path) -> Any:
    return load_model(Model(path=str(folder)), None, 0, torch.float32, CPU)


def reference(folder: Path, name: str) -> Any:
    """Soft-capped attention exists in the library's eager implementation alone; its sdpa leaves the cap out."""
    how = {"attn_implementation": "eager"} if name in SOFT_CAPPED else {}
    return auto_class(FAMILIES[name]()).from_pretrained(folder, dtype=torch.float32, **how).eval()


def plain(network: Any, tokens_T: np.ndarray, num_steps: int) -> torch.Tensor:
    """Logprobs of the last steps of one sequence by the plain forward pass."""
    tokens = torch.from_numpy(tokens_T.astype(np.int64))
    logits = network(tokens[None], use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(traits_of(network.config).allowed(logits), -1)
    return logprobs[:-1].gather(-1, tokens[1:, None])[-num_steps:, 0]


def samples_of(lengths: list[tuple[int, int]]) -> list[Sample]:
    """(prompt, response) lengths -> random tokens."""
    rng, found = np.random.default_rng(0), []
    for i, (prompt, steps) in enumerate(lengths):
        tokens = rng.integers(3, VOCABULARY, prompt + steps).astype(np.int32)
        zeros = np.zeros(steps, np.float32)
        found.append(Sample(i, 0, Tokens.split(tokens, steps), np.ones(steps, bool), zeros))
    return found


def trained(
    policy: LogprobModel, samples: list[Sample], rows: tuple[tuple[int, ...], ...], width: int
) -> list[torch.Tensor]:
    """Logprobs of each sample, laid out in these rows, by the trainer's network."""
    batch = MicroBatch(tuple(tuple(samples[i].key for i in row) for row in rows), width)
    packed = to_tensors(batch, {s.key: s for s in samples}, CPU, policy.varlen)
    logprobs_S, _ = policy(packed)
    by_key = {key: logprobs_S[packed.sample_S == i] for i, key in enumerate(packed.keys)}
    return [by_key[s.key] for s in samples]


def generated(
    network: Any,
    prompts: list[np.ndarray],
    max_tokens: list[int],
    max_length: int = 128,
    first_key: int = 0,
    **options: Any,
) -> list[Any]:
    engine = SteppedEngine(EmbeddedBackend(network, max_concurrent=4, max_length=max_length, **options))
    try:
        requests = [
            Request(Tokens(prompt.astype(np.int32)), SamplingParams(max_tokens=n, temperature=1.0), noise_key(0, i))
            for i, (prompt, n) in enumerate(zip(prompts, max_tokens, strict=True), start=first_key)
        ]
        return asyncio.run(engine.generate(requests))
    finally:
        engine.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_trainer_packed_and_alone_is_the_plain_forward_pass(name, folders):
    samples = samples_of([(9, 14), (3, 20), (17, 6), (1, 2)])
    network = reference(folders(name), name)
    policy = LogprobModel(ours(folders(name))).train()
    with torch.no_grad():
        expected = [plain(network, s.content.tokens_T, s.num_steps) for s in samples]
        packed = trained(policy, samples, ((0, 1, 3), (2,)), 56)
        alone = trained(policy, samples, ((0,), (1,), (2,), (3,)), 32)
    for want, *got in zip(expected, packed, alone, strict=True):
        assert want.std() > 0.1 or len(want) < 4
        for found in got:
            assert (found - want).abs().max() < close(name)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"])
def test_kernels_that_take_lengths_read_a_row_as_it_is(name, folders, monkeypatch):
    """Here, these stand for the kernels of flash-linear-attention, which run on GPUs alone: the samples one by one."""
    network = ours(folders(name))
    module = sys.modules[type(mixers_of(network)[0]).__module__]
    rule, convolution, calls = module.torch_chunk_gated_delta_rule, module.causal_conv1d_fn, []

    def of_samples(compute, *rows, starts):
        calls.append(starts.tolist())
        spans = list(itertools.pairwise(starts.tolist()))
        return torch.cat([compute(*(row[:, a:b] for row in rows)) for a, b in spans], 1)

    def delta_rule(query, key, value, g, beta, cu_seqlens, **options):
        compute = lambda *parts: rule(*parts, **options)[0]  # noqa: E731
        return of_samples(compute, query, key, value, g, beta, starts=cu_seqlens), None

    def causal_conv1d(rows, weight, bias, activation, cu_seqlens):
        compute = lambda row: convolution(row.transpose(1, 2), weight, bias, activation).transpose(1, 2)  # noqa: E731
        return of_samples(compute, rows, starts=cu_seqlens), None

    parts = ("modules", "modules.causal_conv1d", "modules.norm", "modules.norm.l2norm", "ops", "ops.gated_delta_rule")
    for package in ("fla", *(f"fla.{part}" for part in parts)):
        stand_in: Any = types.ModuleType(package)
        stand_in.__spec__ = ModuleSpec(package, None)
        stand_in.l2norm_fwd_kernel, stand_in.l2norm_bwd_kernel = types.SimpleNamespace(), types.SimpleNamespace()
        stand_in.causal_conv1d, stand_in.chunk_gated_delta_rule = causal_conv1d, delta_rule
        monkeypatch.setitem(sys.modules, package, stand_in)
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", rule)  # both to be replaced
    monkeypatch.setattr(module, "causal_conv1d_fn", convolution)
    monkeypatch.setattr(varlen, "usable", lambda *_: True)
    monkeypatch.setattr(recurrent, "choose_variants", lambda *_: None)  # of Triton
    policy, samples = LogprobModel(network).train(), samples_of([(9, 14), (3, 20), (17, 6), (1, 2)])
    found = trained(policy, samples, ((0, 1, 3, 2),), 72)
    assert len(calls) == 2 * len(mixers_of(network)) and {tuple(call) for call in calls} == {(0, 23, 46, 49, 72)}
    sum(part.sum() for part in found).backward()  # type: ignore[union-attr]
    expected = reference(folders(name), name)
    policy_rule = module.torch_chunk_gated_delta_rule
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", rule)
    wanted = [plain(expected, s.content.tokens_T, s.num_steps) for s in samples]
    sum(part.sum() for part in wanted).backward()  # type: ignore[union-attr]
    assert max(float((a - b).detach().abs().max()) for a, b in zip(wanted, found, strict=True)) < CLOSE_DELTA
    mine, theirs = (dict(m.named_parameters())["model.layers.0.linear_attn.A_log"].grad for m in (network, expected))
    assert float((mine - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max()) + 1e-6
    # samples that share a prefix in the row: the kernels read whole samples, all else computes the prefix once
    prompt, answers = samples[1].content.tokens_T, [sample.content.tokens_S for sample in samples]  # type: ignore[union-attr]
    siblings = [
        Sample(0, i, Tokens(prompt, steps), np.ones(len(steps), bool), np.zeros(len(steps), np.float32))
        for i, steps in enumerate(answers)
    ]
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", policy_rule)
    of_networks = []
    for shares in (False, True):
        calls.clear()
        network.zero_grad()
        batch = MicroBatch((tuple(s.key for s in siblings),), 256, shares=shares)
        packed = to_tensors(batch, {s.key: s for s in siblings}, CPU, True)
        assert packed.tokens_RW.numel() == 42 + (23 if shares else 4 * 23)
        logprobs = policy(packed)[0]
        assert {tuple(call) for call in calls} == {(0, 37, 80, 109, 134)}
        (logprobs * torch.linspace(-1, 1, 42)).sum().backward()
        gradients = {key: p.grad.clone() for key, p in network.named_parameters() if p.grad is not None}
        of_networks.append((logprobs.detach(), gradients))
    (whole, wanted_gradients), (shared, found_gradients) = of_networks
    assert float((whole - shared).abs().max()) < CLOSE_DELTA
    for key, gradient in wanted_gradients.items():
        assert float((gradient - found_gradients[key]).abs().max()) <= 1e-4 * float(gradient.abs().max()) + 1e-6, key


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen3_5", "llama4", "deepseek_v32", "deepseek_v4", "gpt_oss"])
def test_the_kernel_of_packed_rows_is_for_attention_of_scores_and_a_window(name, folders, monkeypatch):
    monkeypatch.setattr(varlen, "_KERNEL", True)
    usable = varlen.usable(ours(folders(name)), torch.device("cuda"), torch.bfloat16)
    assert usable == (name in ("qwen3", "gemma3", "qwen3_5"))


@pytest.mark.parametrize("name", ["step3p7"])
def test_a_tower_that_is_not_supported_takes_no_media(name, folders):
    assert media_family(Model(path=str(folders(name)))) is None
    assert traits_of(ours(folders(name)).config).forbidden == (1, 2)


@pytest.mark.parametrize("name", FAMILIES)
def test_engine_samples_with_the_logprobs_of_the_plain_forward_pass(name, folders):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCABULARY, n) for n in (1, 7, 23, 40, 12, 2)]
    prompts.append(prompts[2])  # a sibling shares the prefill
    found = generated(ours(folders(name)), prompts, [30, 12, 25, 9, 1, 18, 25])
    network = reference(folders(name), name)
    with torch.no_grad():
        for prompt, completion in zip(prompts, found, strict=True):
            want = plain(
                network, np.concatenate([prompt, completion.content.tokens_S]), len(completion.content.tokens_S)
            )
            assert np.abs(completion.logprobs_S - want.numpy()).max() < close(name)


@pytest.mark.parametrize("length", [71, 82])  # the last chunk has 6 tokens, or would have 1
@pytest.mark.parametrize(
    "name",
    [
        *("qwen3_5", "falcon_h1", "lfm2", "minimax", "deepseek_v32", "llama4", "gemma3n", "deepseek_v4", "qwen4_exp"),
        "glm5_next",
    ],
)
def test_states_go_from_chunk_to_chunk_of_a_long_prompt(name, length, folders, monkeypatch):
    monkeypatch.setattr(embedded, "PREFILL_TOKENS", 32)
    monkeypatch.setattr(embedded, "PREFILL_CHUNK", 16)
    prompt, network = np.random.default_rng(1).integers(3, VOCABULARY, length), reference(folders(name), name)
    for completion in generated(ours(folders(name)), [prompt, prompt], [12, 12]):
        with torch.no_grad():
            want = plain(network, np.concatenate([prompt, completion.content.tokens_S]), 12)
        assert np.abs(completion.logprobs_S - want.numpy()).max() < close(name)


@pytest.mark.parametrize("name", ["qwen2-mixed", "mistral", "mistral-full", "gemma2", "gemma3", "granite"])
def test_a_long_prompt_is_prefilled_in_chunks(name, folders, monkeypatch):
    """Chunks of 16 tokens, for prompts of more than 32: with sliding windows, and with siblings."""
    monkeypatch.setattr(embedded, "PREFILL_TOKENS", 32)
    monkeypatch.setattr(embedded, "PREFILL_CHUNK", 16)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCABULARY, n) for n in (70, 20, 33, 41)]
    prompts.insert(0, prompts[0])
    model, network = ours(folders(name)), reference(folders(name), name)
    widths = list[int]()
    hook = model.get_decoder().register_forward_pre_hook(
        lambda _, args, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    found = generated(model, prompts, [12] * 5)
    hook.remove()
    assert sorted(n for n in widths if n > 1) == [16] * (6 + 4) + [32, 32]  # 69 tokens are padded to 96, 40 to 64
    with torch.no_grad():
        for prompt, completion in zip(prompts, found, strict=True):
            want = plain(network, np.concatenate([prompt, completion.content.tokens_S]), 12)
            assert np.abs(completion.logprobs_S - want.numpy()).max() < CLOSE
    again = generated(model, prompts[1:2], [12], first_key=1)[0]  # alone
    assert (again.logprobs_S == found[1].logprobs_S).all()


@pytest.mark.parametrize("name", ["qwen2-mixed", "phi3", "gemma2", "gemma3", "gpt_oss", "cohere2", "granite", *TODAY])
def test_gradients_are_those_of_the_plain_forward_pass(name, folders):
    samples = samples_of([(9, 14), (3, 20), (17, 6)])
    network, policy = reference(folders(name), name), LogprobModel(ours(folders(name))).train()
    sum(plain(network, s.content.tokens_T, s.num_steps).sum() for s in samples).backward()  # type: ignore[union-attr]
    torch.cat(trained(policy, samples, ((0, 2), (1,)), 48)).sum().backward()
    wanted = dict(network.named_parameters())
    for key, parameter in policy.network.named_parameters():
        if wanted[key].grad is None:
            assert parameter.grad is None, key
            assert (
                key.endswith("expert_bias")
                or ".indexer." in key
                or (network.config.get_text_config() is not network.config and "language_model." not in key)
            ), key
            continue
        assert parameter.grad is not None, key
        scale = float(wanted[key].grad.abs().max())
        assert float((parameter.grad - wanted[key].grad).abs().max()) <= 1e-4 * scale + 1e-6, key


@pytest.mark.parametrize("name", ["qwen2-mixed", "mistral", "phi3", "gemma3", *SAME_BITS])
def test_company_changes_no_bit_of_a_sample(name, folders):
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, VOCABULARY, n) for n in (1, 7, 23, 40, 65)]
    together = generated(ours(folders(name)), prompts, [30, 12, 25, 9, 18])
    for prompt, completion, key in zip(prompts[:3], together, range(3), strict=False):
        (alone,) = generated(ours(folders(name)), [prompt], [len(completion.content.tokens_S)], first_key=key)
        assert np.array_equal(alone.content.tokens_S, completion.content.tokens_S)
        assert np.array_equal(alone.logprobs_S, completion.logprobs_S)


# --- long sequences


@pytest.mark.parametrize("name", ["mistral", "qwen2-mixed", "gemma3", "gpt_oss", "llama4", "gemma3n", "deepseek_v4"])
def test_the_cache_forgets_what_no_token_sees(name, folders, monkeypatch):
    """Prompts of one pass and in chunks; rows that move and are used again; a cache that grows past the window."""
    monkeypatch.setattr(embedded, "PREFILL_TOKENS", 80)
    monkeypatch.setattr(embedded, "PREFILL_CHUNK", 48)
    rng, network = np.random.default_rng(5), ours(folders(name))
    backend = EmbeddedBackend(network, max_concurrent=3, max_length=256)
    engine = SteppedEngine(backend)
    prompts = [rng.integers(3, VOCABULARY, n).astype(np.int32) for n in (9, 1, 70, 33, 130, 130, 64, 2)]
    prompts[5] = prompts[4]
    try:
        for part in (slice(0, 2), slice(2, 8)):  # the first ones are shorter than the ring
            asked = [
                Request(Tokens(prompt), SamplingParams(max_tokens=12 + 9 * i, temperature=1.0), noise_key(0, i))
                for i, prompt in enumerate(prompts[part])
            ]
            found = asyncio.run(engine.generate(asked))
            plainly = reference(folders(name), name)
            with torch.no_grad():
                for prompt, completion in zip(prompts[part], found, strict=True):
                    steps = completion.content.tokens_S
                    want = plain(plainly, np.concatenate([prompt, steps]), len(steps))
                    assert np.abs(completion.logprobs_S - want.numpy()).max() < close(name)
    finally:
        engine.close()
    assert backend._cache.length > 150
    for kind, keys in zip(backend._cache.kinds, backend._cache.keys, strict=True):
        if keys is not None:
            assert keys.shape[2] == (backend._cache.length if kind == "full_attention" else 32)


def guessed(network: Any, close: float) -> int:
    """Compares samples with and without proposals, up to the last position of the model. Returns how many blocks were
    accepted in part."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCABULARY, n) for n in (1, 7, 23, 40, 12, 2)]
    sizes = [95 - len(prompt) for prompt in prompts]
    expected = generated(network, prompts, sizes, 96)
    guess = Guess({noise_key(0, i): c.content.tokens_S.tolist() for i, c in enumerate(expected)}, range(3, VOCABULARY))
    found = generated(network, prompts, sizes, 96, speculation=guess)
    for a, b in zip(found, expected, strict=True):
        assert a.content.tokens_S.tolist() == b.content.tokens_S.tolist()
        assert np.abs(a.logprobs_S - b.logprobs_S).max() < 2 * close  # of what both approximate
    return sum(number for (size, accepted), number in guess.kept.items() if 0 < accepted < size)


@pytest.mark.parametrize("name", FAMILIES)
def test_rejected_tokens_leave_nothing_behind(name, folders):
    network = ours(folders(name))
    if all(KINDS[kind].rolls_back for kind in traits_of(network.config).kinds):
        assert guessed(network, close(name)) > 20
        return
    assert speculation_of("auto", network) is None
    with pytest.raises(UserError, match="cannot drop rejected tokens; expected off or auto"):
        speculation_of("suffix", network)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4"])
def test_rejected_tokens_replace_no_key_that_is_still_seen(name, tmp_path):
    """Of a window that would fill a whole ring of the cache."""
    config = FAMILIES[name]()
    setattr(config, "attention_chunk_size" if name == "llama4" else "sliding_window", 32)
    save(config, tmp_path)
    assert guessed(ours(tmp_path), close(name)) > 20


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
def test_windows_in_sequences_longer_than_a_block_of_the_attention_kernel(name, folders):
    """Whole blocks of keys (512 on CPU) lie before the window then."""
    rng = np.random.default_rng(2)
    prompt = rng.integers(3, VOCABULARY, 700)
    (found,) = generated(ours(folders(name)), [prompt], [40], max_length=800)
    tokens = np.concatenate([prompt, found.content.tokens_S]).astype(np.int32)
    zeros, other = np.zeros(40, np.float32), samples_of([(30, 40)])[0]
    sample = Sample(1, 0, Tokens.split(tokens, 40), np.ones(40, bool), zeros)
    with torch.no_grad():
        want = plain(reference(folders(name), name), tokens, 40)
        packed = trained(LogprobModel(ours(folders(name))).train(), [other, sample], ((0, 1),), 832)[1]
    assert np.abs(found.logprobs_S - want.numpy()).max() < CLOSE
    assert (packed - want).abs().max() < CLOSE


# --- scorers: the library's forward pass with padding


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt_oss"])
def test_scorers_in_padded_batches_are_the_plain_forward_pass(name, tmp_path):
    config = FAMILIES[name]()
    config.num_labels = 1
    save(config, tmp_path, AutoModelForSequenceClassification)
    how = {"attn_implementation": "eager"} if name in SOFT_CAPPED else {}
    plainly = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32, **how).eval()
    scorer = load_scorer(Model(path=str(tmp_path)), 0, torch.float32, CPU)
    texts = [sample.content.tokens_T for sample in samples_of([(9, 14), (3, 30), (1, 2)])]
    with torch.no_grad():
        want = [float(plainly(torch.from_numpy(text.astype(np.int64))[None]).logits[0, 0]) for text in texts]
        assert score_texts(scorer, texts, 40).tolist() == pytest.approx(want, abs=CLOSE)


# --- what is refused, in one line


def refused(config: Any, folder: Path, **options: Any) -> str:
    config.save_pretrained(folder)
    with pytest.raises(UserError) as error:
        load_model(Model(path=str(folder)), None, 0, torch.float32, CPU, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (family("ZambaConfig"), "layers of kind hybrid, linear_attention"),
        (family("LlamaConfig", layer_types=["conv", "full_attention"] * 2), "layers of kind conv"),
        (family("Dots1Config", layer_types=MIXED, sliding_window=7), "sliding_attention (sliding_window=7)"),
        (family("LlamaConfig", layer_types=MIXED, sliding_window=7), "sliding_attention (sliding_window=7)"),
        (family("MiniMaxConfig", layer_types=HYBRID, sliding_window=7), "sliding_attention (sliding_window=7)"),
        (family("PhimoeConfig", sliding_window=7), "sliding_attention (sliding_window=7)"),
        (family("LlamaConfig", final_logit_softcapping=15.0), "scales its logits (final_logit_softcapping=15.0)"),
        (family("Gemma3TextConfig", use_bidirectional_attention=True), "attends to later tokens"),
        (lambda: transformers.LlavaNextConfig(), "has more than a text decoder"),
        (family("LlamaConfig", quantization_config={"quant_method": "gptq", "bits": 4}), "quantised weights (gptq;"),
    ],
)
def test_what_is_not_compared_is_refused_before_weights_are_read(config, why, tmp_path):
    assert why in refused(config(), tmp_path)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "llama9"}, "is of type llama9, which transformers .* does not know; .* such as llama"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "type own; expected trust_remote_code=true"),
        (
            {"quantization_config": {"quant_method": "int3x"}},
            r"quantised weights \(int3x; expected fp8, mxfp4 or none\)",
        ),
        ({"quantization_config": {"bits": 3}}, r"has quantised weights \(None; expected fp8, mxfp4 or none\)"),
        ({"model_type": "olmo2", "sliding_window": 7}, r"of kind sliding_attention \(sliding_window=7\)"),
        ({"model_type": "gpt_neox", "sliding_window": 7}, r"of kind sliding_attention \(sliding_window=7\)"),
        ({"attention_chunk_size": 7}, "has layers of kind chunked_attention"),
        ({"layer_types": ["rotating"] * LAYERS}, "cannot load a causal language model: .*layer_types"),
        ({"layer_types": ["full_attention"]}, "cannot load a causal language model: .*layer_types"),
    ],
)
def test_a_config_that_nobody_knows_is_refused_in_one_line(changes, why, tmp_path):
    """There are no weights in the folder."""
    found = {**FAMILIES["llama"]().to_dict(), **changes}
    (tmp_path / "config.json").write_text(json.dumps(found))
    with pytest.raises(UserError, match=why) as error:
        load_model(Model(path=str(tmp_path)), None, 0, torch.float32, CPU)
    assert "\n" not in str(error.value)


def test_layer_types_that_the_model_ignores_change_nothing(folders, tmp_path):
    """Mistral's layers all have the window, whatever layer_types says."""
    config = FAMILIES["mistral"]()
    config.layer_types = ["full_attention"] * LAYERS
    assert traits_of(config) == traits_of(FAMILIES["mistral"]())
    assert traits_of(config).kinds == ("sliding_attention",) * LAYERS
    assert traits_of(config).window == WINDOW


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("step3p7", "step3p7 has a tower"),
        ("deepseek_v4", "has layers of kind compressed_sparse_attention, heavily_compressed_attention;"),
        ("qwen4_exp", "has layers of kind indexed_attention, linear_attention;"),
        ("mimo_v2_flash", "has attention sinks or capped scores, or no sdpa;"),
    ],
)
def test_ranks_do_not_share_sequences_of_these_families(name, why):
    with pytest.raises(UserError, match=f"{why}.*expected 1 rank per sequence, got 2"):
        choose_method(FAMILIES[name](), 2, 1, "auto")


def test_other_families_are_compared_at_the_start(tmp_path):
    for name, config in {"gpt_neox": family("GPTNeoXConfig"), "olmo2": family("Olmo2Config")}.items():
        save(config(), tmp_path / name)
        assert not ours(tmp_path / name).training
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    save(family("BartConfig", **sizes)(), tmp_path / "bart")  # takes positions from the place in the row
    with pytest.raises(UserError, match="type bart gives packed samples different logprobs"):
        ours(tmp_path / "bart")


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_frequencies_that_change_with_length_are_refused_beyond_it(kind, tmp_path):
    """Up to there, they do not change."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        ones = [1.0] * 4
        rope |= {"short_factor": ones, "long_factor": [4.0] * 4, "original_max_position_embeddings": 64}
    limit = 64 if kind == "longrope" else 256
    config = family("LlamaConfig", rope_parameters=rope, max_position_embeddings=256)()
    config.save_pretrained(tmp_path)
    save(config, tmp_path)
    load_model(Model(path=str(tmp_path)), None, 0, torch.float32, CPU, max_length=limit)
    assert f"expected at most {limit}," in refused(config, tmp_path, max_length=limit + 1)
