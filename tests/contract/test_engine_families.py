"""Today's families in vLLM and SGLang: the names of their weights, and what is computed where a CPU can compute it.

vLLM's CPU build cannot make every network (CANNOT). The names of these were compared by hand (docs/engines.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gcore.models.networks import auto_class
from gcore.weights.pretrained import WeightFiles
from gcore.weights.receiver import FolderWeights
from tests.contract.test_engine import CUDA, VLLM, ask, in_parts, logprobs_of, open_vllm, prompt, run
from tests.contract.test_families import TODAY, save

with_vllm = pytest.mark.skipif(not VLLM, reason="vllm is not installed")


@pytest.mark.parametrize("family", sorted(TODAY))
def test_what_trainers_send_is_what_files_have(family: str, tmp_path: Path) -> None:
    """Tensor by tensor: names in files differ, stacked experts and convolutions are there in parts, and some tensors
    are joined there."""
    kind = auto_class(TODAY[family]())
    save(TODAY[family](), tmp_path, kind)
    files, weights = WeightFiles(tmp_path), FolderWeights(tmp_path)
    network = kind.from_pretrained(tmp_path, dtype=torch.float32)
    sent = {name: parameter.detach() for name, parameter in network.named_parameters()}
    assert weights.shapes == {name: tuple(tensor.shape) for name, tensor in sent.items()}
    found: dict[str, Any] = {}
    for name in reversed(sent):
        parts = weights.as_stored({name: sent[name]}, last=False)
        assert not found.keys() & parts.keys()
        found |= parts
    found |= weights.as_stored({}, last=True)
    assert found.keys() == files.shapes.keys()
    assert all(torch.equal(tensor, files.read(name)) for name, tensor in found.items())


def test_names_are_found_beside_a_configuration_of_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM registers its own for some model types."""

    class Other(PreTrainedConfig):
        model_type = "qwen3_next"

        def __init__(self, hidden_size: int = 0, **others: Any) -> None:
            super().__init__(**others)  # type: ignore[no-untyped-call]
            self.width = hidden_size

    save(TODAY["qwen3_next"](), tmp_path)
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {})
    AutoConfig.register("qwen3_next", Other, exist_ok=True)
    assert type(AutoConfig.from_pretrained(tmp_path)) is Other
    weights = FolderWeights(tmp_path)
    assert "model.layers.0.mlp.experts.down_proj" in weights.shapes


def test_a_convolution_of_unequal_parts_is_split_as_in_the_files(tmp_path: Path) -> None:
    """Values of OLMo-hybrid are wider than keys. Transformers saves three equal parts, which no other library reads."""
    save(TODAY["olmo_hybrid"](), tmp_path)
    files, sizes = load_file(tmp_path / "model.safetensors"), {"q": 16, "k": 16, "v": 32}
    convolutions = {name.replace("q_conv1d", "{}_conv1d") for name in files if "q_conv1d" in name}
    for pattern in convolutions:
        names = [pattern.format(part) for part in sizes]
        whole = torch.cat([files[name] for name in names])
        files |= {name: part.clone() for name, part in zip(names, whole.split([*sizes.values()]), strict=True)}
    save_file(files, tmp_path / "model.safetensors", {"format": "pt"})
    weights = FolderWeights(tmp_path)
    network = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    found = weights.as_stored(dict(network.named_parameters()), last=True)
    assert len(convolutions) == 2 and found.keys() == files.keys()
    assert all(torch.equal(tensor, files[name]) for name, tensor in found.items())


# --- vLLM: sizes that its kernels take

HYBRID = ["linear_attention", "full_attention"] * 2
SLIDING = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GDN = {
    "layer_types": HYBRID,
    "head_dim": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
NEMOTRON = {
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 1,
    "chunk_size": 16,
    "time_step_min": 1e-9,  # transformers limits the steps of states to it, and vLLM does not (docs/engines.md)
}
CONV = {"layer_types": ["conv", "full_attention"] * 2, "conv_dim": 64, "block_dim": 64}  # the last two for vLLM alone
SHARED_KEYS = {"head_dim": 32, "layer_types": SLIDING, "sliding_window": 16, "num_kv_shared_layers": 2}
PER_LAYER = {"vocab_size_per_layer_input": 48, "hidden_size_per_layer_input": 8}
MLA = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "qk_head_dim": 64,
    "v_head_dim": 32,
    "head_dim": 32,
}
SPARSE = {
    **MLA,
    "q_lora_rank": 32,
    "index_head_dim": 64,
    "index_n_heads": 16,
    "index_topk": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", {**GDN, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_5_text": ("Qwen3_5TextConfig", GDN),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", {**GDN, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "olmo_hybrid": ("OlmoHybridConfig", GDN),
    "kimi_linear": (
        "KimiLinearConfig",
        {**MLA, **EXPERTS, "layer_types": HYBRID, "linear_head_dim": 32, "linear_num_heads": 4},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {**NEMOTRON, "layer_types": ["linear_attention", "mlp", "full_attention", "mlp"]},
    ),
    "nemotron_h-experts": (
        "NemotronHConfig",
        {**NEMOTRON, "layer_types": ["linear_attention", "moe", "full_attention", "mlp"], "n_routed_experts": 4},
    ),
    "falcon_h1": ("FalconH1Config", {"head_dim": 32, "mamba_d_ssm": 128, **MAMBA}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {**MAMBA, "layer_types": HYBRID, "shared_intermediate_size": 32, "num_local_experts": 4},
    ),
    "jamba": ("JambaConfig", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_dt_rank": 4}),
    "mamba2": ("Mamba2Config", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16}),
    "lfm2": ("Lfm2Config", CONV),
    "lfm2_moe": ("Lfm2MoeConfig", {**CONV, **EXPERTS, "num_dense_layers": 1}),
    "gemma3n_text": (
        "Gemma3nTextConfig",
        {**SHARED_KEYS, **PER_LAYER, "intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4},
    ),
    "gemma4_text": ("Gemma4TextConfig", {**SHARED_KEYS, **PER_LAYER, "global_head_dim": 32}),
    "llama4_text": ("Llama4TextConfig", {"head_dim": 32, "intermediate_size_mlp": 64, "num_local_experts": 4}),
    "deepseek_v32": ("DeepseekV32Config", SPARSE),
    "glm_moe_dsa": ("GlmMoeDsaConfig", SPARSE),
}
CANNOT = {  # on a CPU, vLLM 0.32
    "qwen3_5_text": "imports torchvision",
    "qwen3_5_moe_text": "imports torchvision",
    "olmo_hybrid": "needs Triton",
    "kimi_linear": "needs CUDA's cutlass",
    "nemotron_h-experts": "has no experts without a gate",
    "deepseek_v32": "has no sparse attention",
    "glm_moe_dsa": "has no sparse attention",
}
CLOSE_IN = {"qwen3_next": 0.05}  # bfloat16: the delta rule of the CPU build takes nothing else
TAKES = 1 / 1024  # values that float32 holds exactly


def network_of(family: str, seed: int = 0, scale: float = 0.6) -> Any:
    name, options = SERVED[family]
    sizes = {
        "vocab_size": 48,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**sizes, **options})).eval()
    with torch.no_grad():
        for parameter_name, parameter in network.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=scale * parameter.shape[-1] ** -0.5)
            elif "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    network.generation_config.eos_token_id = None
    return network


@pytest.fixture(autouse=True)
def groups_of_experts() -> None:
    """vLLM makes its groups for the first model of a process: if that is dense, there is none for experts."""
    if VLLM:
        from vllm.distributed import parallel_state

        if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
            parallel_state.destroy_model_parallel()


@pytest.fixture(scope="module")
def make_in_vllm() -> Callable[[Path], Any]:
    """The network of a folder, as vLLM makes it, without an engine."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment, parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.network_utils import get_open_port

    def make(folder: Path) -> Any:
        if parallel_state._WORLD is None:
            with set_current_vllm_config(VllmConfig()):
                init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
        arguments = EngineArgs(
            str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=128, enable_prefix_caching=False
        )
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            ensure_model_parallel_initialized(1, 1)
            return initialize_model(config)

    return make


@with_vllm
@pytest.mark.skipif(CUDA, reason="networks are made on the CPU")
@pytest.mark.parametrize("family", [family for family in SERVED if family not in CANNOT])
def test_vllm_takes_every_tensor_and_gets_every_parameter(family: str, make_in_vllm: Any, tmp_path: Path) -> None:
    """Each tensor that a trainer sends has a value of its own, and is seen in vLLM's network afterwards, as it is, or
    as vLLM keeps decays (-exp) and norms (1 + x). No parameter of vLLM's network is left as it was."""
    network = network_of(family)
    network.save_pretrained(tmp_path)
    weights, served = FolderWeights(tmp_path), make_in_vllm(tmp_path)
    parameters = dict(served.named_parameters())
    for parameter in parameters.values():
        parameter.data.fill_(torch.nan)
    names = [name for name, _ in network.named_parameters()]
    shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
    for number, name in enumerate(names):  # one bucket per tensor
        tensor = torch.full(shapes[name], (number + 1) * TAKES)
        served.load_weights(iter(weights.as_stored({name: tensor}, last=number + 1 == len(names)).items()))
    assert [name for name, parameter in parameters.items() if parameter.isnan().any()] == []
    found = torch.cat([parameter.data.flatten() for parameter in parameters.values()]).unique()

    def is_seen(value: float) -> bool:
        forms = torch.tensor([value, -np.exp(value), 1 + value])
        return bool((found[:, None] - forms).abs().min() < TAKES / 100)

    assert [name for number, name in enumerate(names) if not is_seen((number + 1) * TAKES)] == []


@pytest.fixture
def exact_rotary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM 0.32's kernel for CPUs is wrong for queries of three dimensions, as LFM2 has them."""
    if VLLM:
        from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

        monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_native)
    yield


@with_vllm
@pytest.mark.skipif(CUDA, reason="in float32, against the CPU")
@pytest.mark.parametrize(
    "family",
    [
        "falcon_h1",
        "nemotron_h",
        "lfm2",
        "qwen3_next",
        pytest.param("granitemoehybrid", marks=pytest.mark.release),
        pytest.param("gemma3n_text", marks=pytest.mark.release),
    ],
)
def test_vllm_computes_what_transformers_does(family: str, exact_rotary: None) -> None:
    """Siblings, whose prompts are computed again, with the first weights and with new ones that come in parts."""
    close = CLOSE_IN.get(family, 5e-5)
    old, new = network_of(family), network_of(family, seed=1)
    engine, p = open_vllm(old, dtype="bfloat16" if family in CLOSE_IN else "float32"), prompt(50)

    def differences(network: Any) -> float:
        answers = run(engine, *(ask(p, 12, key=key) for key in range(3)), ask(prompt(9), 12))
        prompts = [p, p, p, prompt(9)]
        return max(
            float(np.abs(answer.logprobs_S - logprobs_of(network, own, answer.content.tokens_S)).mean())
            for own, answer in zip(prompts, answers, strict=True)
        )

    async def load(version: int, network: Any) -> None:
        parts = in_parts(network, 3)
        for number, part in enumerate(parts):
            await engine.load_weights(version, part, (number, len(parts)))

    try:
        assert differences(old) < close
        asyncio.run(asyncio.wait_for(load(1, new), 60))
        assert differences(new) < close < differences(old)
    finally:
        engine.close()
