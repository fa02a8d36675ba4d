"""Each rank reads its shards of a model: the same bits as the whole model has, for every family and way to shard."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gcore.config.base import Lora, Model
from gcore.models.networks import auto_class, load_model, make_empty
from gcore.protocols import Rendezvous
from gcore.runtime.gloo import join
from gcore.training.lora import adapt, fill_adapters
from gcore.training.shards import copy_weights, fill
from gcore.types import UserError
from gcore.weights.pretrained import open_weights
from tests.contract.test_families import FAMILIES, family, save
from tests.ranks import finish_ranks, free_address, start_ranks
from tests.unit.test_training import config_of, load_tokenizer

CPU = torch.device("cpu")
CONVERTED = {  # experts or convolutions are stored one by one, or under other names
    *("qwen2_moe", "qwen3_moe", "mixtral", "granitemoe", "qwen3_next", "qwen3_5_moe", "olmo_hybrid", "kimi_linear"),
    *("minimax", "nemotron_h", "granitemoehybrid", "jamba", "deepseek_v32", "glm_moe_dsa", "lfm2_moe"),
    *("afmoe", "axk2", "cohere2_moe", "exaone_moe", "mimo_v2_flash", "hy_v4"),
    *("deepseek_v4", "qwen4_exp", "qwen4_exp-outer", "step3p7", "glm5_next"),
}


def path_of(folder: Path) -> Model:
    return Model(path=str(folder))


def filled(model: Model, tokenizer: Any = None, seed: int = 0) -> Any:
    network = make_empty(model, tokenizer, None)
    assert all(p.is_meta and p.dtype == torch.float32 for p in network.parameters())
    fill(network, open_weights(network, model, seed, tokenizer), CPU)
    return network


def assert_same(found: Any, expected: Any) -> None:
    """Names, values to the last bit, and which parameters are tied."""
    for kind in ("named_parameters", "named_buffers"):
        a, b = (dict(getattr(network, kind)()) for network in (found, expected))
        assert a.keys() == b.keys()
        for name, tensor in b.items():
            whole = a[name].full_tensor() if isinstance(a[name], DTensor) else a[name]
            assert whole.dtype == tensor.dtype and torch.equal(whole, tensor), name


# --- one process


@pytest.mark.parametrize("name", FAMILIES)
def test_filled_is_loaded(name, tmp_path, caplog):
    save(FAMILIES[name](), tmp_path, auto_class(FAMILIES[name]()))
    with caplog.at_level(logging.WARNING):
        found = filled(path_of(tmp_path))
    expected = load_model(path_of(tmp_path), None, 0, torch.float32, CPU)
    assert_same(found, expected)
    assert found.training is expected.training is False
    assert found.config._attn_implementation == expected.config._attn_implementation
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.allclose(found(tokens).logits, expected(tokens).logits, atol=1e-5)  # memory is aligned differently
    assert ("the whole model is read" in caplog.text) == (name in CONVERTED), caplog.text


def test_a_built_model_has_the_weights_of_its_seed():
    config = config_of()
    tokenizer = load_tokenizer(config.model)
    for seed in (0, 7):
        expected = load_model(config.model, tokenizer, seed, torch.float32, CPU)
        state = torch.random.get_rng_state()
        assert_same(filled(config.model, tokenizer, seed), expected)
        assert torch.equal(torch.random.get_rng_state(), state)


def test_stored_in_bfloat16_and_in_several_files(tmp_path):
    save(FAMILIES["qwen3"](), tmp_path)
    network = load_model(path_of(tmp_path), None, 0, torch.bfloat16, CPU)
    network.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 3
    assert_same(filled(path_of(tmp_path / "parts")), network.float())


def edited(folder: Path, **changes: torch.Tensor | None) -> Model:
    """The files with tensors added, replaced or, with None, removed."""
    tensors = {**load_file(folder / "model.safetensors"), **{k.replace("__", "."): v for k, v in changes.items()}}
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors", {"format": "pt"})
    return path_of(folder)


def test_tied_weights_by_either_name_or_both(tmp_path):
    save(family("LlamaConfig", tie_word_embeddings=True)(), tmp_path)
    expected = load_model(path_of(tmp_path), None, 0, torch.float32, CPU)
    embedding = expected.get_input_embeddings().weight.detach().clone()
    assert embedding is not None and "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    both = edited(tmp_path, lm_head__weight=embedding)
    for model in (both, edited(tmp_path, model__embed_tokens__weight=None)):
        network = filled(model)
        assert network.lm_head.weight is network.model.embed_tokens.weight
        assert_same(network, expected)
    changed = embedding.clone()
    changed[-1, -1] += 1
    with pytest.raises(UserError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight, .* different values"):
        filled(edited(tmp_path, model__embed_tokens__weight=changed))


def test_missing_and_unknown_names(tmp_path):
    save(FAMILIES["llama"](), tmp_path)
    filled(
        edited(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    )  # of checkpoints of earlier versions of transformers
    name = "model.layers.1.mlp.up_proj.weight"
    kept = load_file(tmp_path / "model.safetensors")[name].clone()
    with pytest.raises(UserError, match=rf"has no weights for {name} \(1 names\)"):
        filled(edited(tmp_path, **{name.replace(".", "__"): None}))
    with pytest.raises(UserError, match=r"has weights of no layer: model\.odd\.weight \(1 names\)"):
        filled(edited(tmp_path, model__odd__weight=torch.ones(3), **{name.replace(".", "__"): kept}))
    with pytest.raises(UserError, match=r"cannot load a causal language model"):
        filled(edited(tmp_path, model__odd__weight=None, **{name.replace(".", "__"): torch.ones(2, 2)}))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(bad, tmp_path):
    save(FAMILIES["qwen3"](), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    (name,) = (name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    tensors[name][3, 5] = bad
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=rf"model\.path={tmp_path}: {name} is NaN or infinite"):
        load_model(path_of(tmp_path), None, 0, torch.float32, CPU)


def test_without_safetensors_the_whole_model_is_read(tmp_path, caplog):
    save(FAMILIES["llama"](), tmp_path)
    expected = load_model(path_of(tmp_path), None, 0, torch.float32, CPU)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        assert_same(filled(path_of(tmp_path)), expected)
    assert "it has no safetensors; the whole model is read into host memory" in caplog.text


def test_families_that_no_test_covers_are_compared_without_their_weights(tmp_path):
    for name, config in {"gpt_neox": family("GPTNeoXConfig"), "olmo2": family("Olmo2Config")}.items():
        save(config(), tmp_path / name)
        assert_same(filled(path_of(tmp_path / name)), load_model(path_of(tmp_path / name), None, 0, torch.float32, CPU))
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    family("BartConfig", **sizes)().save_pretrained(tmp_path / "bart")
    with pytest.raises(UserError, match="type bart gives packed samples different logprobs"):
        make_empty(path_of(tmp_path / "bart"), None)
    family("LlamaConfig", sliding_window=7, layer_types=["sliding_attention"] * 4)().save_pretrained(tmp_path / "no")
    with pytest.raises(UserError, match="layers of kind sliding_attention"):
        make_empty(path_of(tmp_path / "no"), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_on_an_empty_network(tmp_path, dtype):
    save(FAMILIES["qwen3"](), tmp_path)
    lora = Lora(rank=4, alpha=6.0)
    network, expected = make_empty(path_of(tmp_path), None), load_model(path_of(tmp_path), None, 0, torch.float32, CPU)
    assert adapt(network, lora, 5, dtype) == adapt(expected, lora, 5, dtype)
    assert all(p.is_meta for p in network.parameters())
    fill(network, open_weights(network, path_of(tmp_path), 5, None), CPU)
    fill_adapters(network, 5)
    assert_same(network, expected)
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in expected.named_parameters() if p.requires_grad} and len(trained) == 56


# --- four processes


def shard_layers(network: Any, mesh: Any) -> None:
    for layer in network.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)


def shard(network: Any, how: str) -> None:
    if how == "shards":
        shard_layers(network, init_device_mesh("cpu", (4,)))
    elif how == "copies x shards":
        shard_layers(network, init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "tensor"))
        column = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"}
        column |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
        row = {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        for layer in network.get_decoder().layers:
            parallelize_module(layer, mesh["tensor"], {**column, **row})
        shard_layers(network, mesh["shards"])


def _rank(rank: int, address: str, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    join(Rendezvous(rank, 4, address), "gloo", timeout_s=120)
    config = config_of()
    built = (config.model, load_tokenizer(config.model))
    stored = (path_of(Path(folder)), None)
    report = {}
    for model, tokenizer in (stored, built):
        expected = load_model(model, tokenizer, 3, torch.float32, CPU)
        for how in ("shards", "copies x shards", "shards x tensor")[: 2 if model.build else 3]:  # it has one key head
            network = make_empty(model, tokenizer)
            shard(network, how)
            sizes = {p.to_local().numel() / p.numel() for p in network.parameters() if isinstance(p, DTensor)}
            fill(network, open_weights(network, model, 3, tokenizer), CPU)
            assert_same(network, expected)
            tokens = torch.arange(4, 14)[None]
            with torch.no_grad():
                logits = network(tokens).logits
                assert torch.allclose(logits, expected(tokens).logits, atol=1e-5)
            copy = make_empty(model, tokenizer)
            shard(copy, how)
            copy_weights(copy, network, CPU)
            assert_same(copy, expected)
            assert copy.lm_head.weight.to_local().data_ptr() != network.lm_head.weight.to_local().data_ptr()
            report[f"{model.path is None} {how}"] = sorted(sizes)
    network, expected = make_empty(stored[0], None), load_model(*stored, 3, torch.float32, CPU)
    lora = Lora(rank=6)
    for each in (network, expected):
        adapt(each, lora, 3, torch.bfloat16)
    shard(network, "shards")
    fill(network, open_weights(network, stored[0], 3, None), CPU)
    fill_adapters(network, 3)
    assert_same(network, expected)
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(report))


@pytest.mark.release
def test_shards_of_four_ranks_are_those_of_the_whole_model(tmp_path):
    """Sizes that four ranks do not divide: 49 tokens, 34 wide."""
    config = family("Qwen3Config", head_dim=8, vocab_size=49, intermediate_size=38, hidden_size=34)()
    config.tie_word_embeddings = False
    save(config, tmp_path)
    finish_ranks(start_ranks(4, _rank, free_address(), str(tmp_path)))
    report = json.loads((tmp_path / "rank-0.json").read_text())
    assert len(report) == 5 and max(report["True shards"]) < 0.3, report
