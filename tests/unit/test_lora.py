"""model.lora: where adapters sit, what training changes, what is handed over, saved and exported."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from gcore.checkpoint import store, tensors
from gcore.checkpoint.export import adapter_folder, export
from gcore.config.base import Lora
from gcore.config.load import load_config
from gcore.config.tree import Config
from gcore.cost.workload import CostModel
from gcore.models.networks import LORA_A, LORA_B, adapters_of
from gcore.observe.trace import Tracer
from gcore.preparation.balance import make_layout
from gcore.preparation.samples import metas_of
from gcore.protocols import Rendezvous
from gcore.runtime.gloo import join
from gcore.training.backend import NewNetwork
from gcore.training.fsdp import AdapterReference, FsdpBackend
from gcore.training.lora import adapt
from gcore.training.rank import TrainerRank
from gcore.types import UserError
from gcore.weights.publisher import WeightPublisher
from tests.ranks import finish_ranks, free_address, start_ranks
from tests.unit.test_training import (
    CPU,
    alone,
    batch_of,
    config_of,
    network_of,
    same,
    samples_of,
    save_state,
    trainer_of,
    update,
    weights_of,
)

LAYERS = [
    f"model.layers.{i}.{name}"
    for i in (0, 1)
    for name in (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
]
LORA = {"rank": 4, "alpha": 6.0}


pytestmark = pytest.mark.usefixtures("one_rank")


def lora_of(lora: dict[str, Any] | None = None, **sections: Any) -> Config:
    return config_of(model={"lora": LORA if lora is None else lora}, **sections)


def merged_of(trainer: TrainerRank) -> Any:
    """The library's own network with base and adapters added up, by a formula of its own."""
    network, factors = network_of(trainer._config), weights_of(trainer)
    with torch.no_grad():
        adapters = trainer.backend._adapters
        for layer in adapters.layers:
            a, b = (torch.from_numpy(np.array(factors[layer + end])).double() for end in (LORA_A, LORA_B))
            network.get_parameter(f"{layer}.weight").add_(
                trainer.backend._adapters.alpha / trainer.backend._adapters.rank * (b @ a)
            )
    return network


def trained(config: Config, updates: int = 3) -> TrainerRank:
    trainer = trainer_of(config)
    asyncio.run(trainer.end_warm_start())
    for seed in range(updates):
        update(trainer, samples_of(seed), batch_of(samples_of(seed)))
    return trainer


# --- configuration


def refused(tree: dict[str, Any], words: str) -> None:
    with pytest.raises((UserError, ValueError), match=words):
        Config.model_validate(tree)


def test_what_lora_goes_with():
    tree = lora_of().model_dump(mode="json")
    assert lora_of({}).model.lora == Lora(rank=16, alpha=32.0, targets=[])
    assert config_of().model.lora is None
    refused({**tree, "generation": {**tree["generation"], "sleep": 2}}, r"generation\.sleep=2 .* expected 0, 1 or auto")
    emulated = {**tree["training"], "backend": "emulated", "emulated": {}}
    device = {**tree["generation"], "engine": "emulated", "emulated": {}}
    refused({**tree, "training": emulated, "generation": device}, r"model\.lora: training\.backend=emulated")
    refused({**tree, "model": {**tree["model"], "lora": {"rank": 0}}}, "rank")


def test_a_judge_has_no_lora(tmp_path):
    tree = config_of().model_dump(mode="json")
    tree["rewards"]["judges"] = [{"name": "j", "template": "{{ response }}", "model": {"path": "m", "lora": LORA}}]
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError, match=r"rewards\.judges\.0\.model\.lora"):
        load_config(tmp_path / "r.yaml")


def test_engines_keep_their_weights_while_they_sleep():
    from gcore.launch.machines import Machine
    from gcore.launch.plan import make_plan

    for config, level in ((config_of(), 2), (lora_of(), 1)):
        on_gpu = config.model_copy(update={"generation": config.generation.model_copy(update={"engine": "vllm"})})
        assert make_plan(on_gpu, Machine(8, 1)).sleep_level == level
        assert make_plan(on_gpu, Machine(8, 0)).sleep_level == 0


# --- where they sit


def test_default_targets_are_all_linear_layers_of_attention_and_mlp():
    adapters = adapters_of(network_of(config_of()), Lora())
    assert (list(adapters.layers), adapters.rank, adapters.scale) == (LAYERS, 16, 2.0)


def test_targets_are_the_ends_of_names():
    network = network_of(config_of())
    chosen = adapters_of(network, Lora(targets=["q_proj", "mlp.up_proj"]))
    assert list(chosen.layers) == [LAYERS[0], LAYERS[5], LAYERS[7], LAYERS[12]]
    for targets, strange in ((["q_proj", "proj"], "proj"), (["lm_head"], "lm_head"), (["attn.q_proj"], "attn.q_proj")):
        words = rf"model\.lora\.targets: no linear layer named {strange}; expected some of \['down_proj', .*'v_proj'\]"
        with pytest.raises(UserError, match=words):
            adapters_of(network, Lora(targets=targets))


def test_at_first_nothing_is_added_and_the_seed_decides():
    config = lora_of()
    network, plain = network_of(config), network_of(config)
    adapt(network, config.model.lora, 5, torch.float32)
    tokens = torch.arange(4, 16)[None]
    assert torch.equal(network(tokens).logits, plain(tokens).logits)
    again, other = network_of(config), network_of(config)
    adapt(again, config.model.lora, 5, torch.float32)
    adapt(other, config.model.lora, 6, torch.float32)
    a = {name: p for name, p in network.named_parameters() if name.endswith(LORA_A)}
    assert len(a) == 14 and len({p.flatten()[0].item() for p in a.values()}) == 14  # no two alike
    for name, parameter in a.items():
        assert torch.equal(parameter, again.get_parameter(name))
        assert not torch.equal(parameter, other.get_parameter(name))
        assert 0.8 * parameter.shape[1] ** -0.5 < parameter.abs().max() <= parameter.shape[1] ** -0.5


# --- training


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2"])  # without and with biases
def test_training_changes_adapters_alone_and_merged_they_are_the_policy(architecture):
    build = {**config_of().model.build.model_dump(), "architecture": architecture}
    config = config_of(model={"build": build, "lora": LORA}, training={"weight_decay": 0.1, "max_grad_norm": 0.01})
    trainer = trainer_of(config)
    network = trainer.backend.networks["policy"].model.network
    before = {n: p.full_tensor().clone() for n, p in network.named_parameters()}
    asyncio.run(trainer.end_warm_start())
    for seed in range(3):
        stats = update(trainer, samples_of(seed), batch_of(samples_of(seed)))
        assert stats.grad_norm > 0 and stats.skipped == 0
    changed = {
        n
        for n, p in trainer.backend.networks["policy"].model.network.named_parameters()
        if not torch.equal(p.full_tensor(), before[n])
    }
    assert changed == {layer + end for layer in LAYERS for end in (LORA_A, LORA_B)} == set(weights_of(trainer))
    assert len(trainer.backend.networks["policy"].optimizer.state) == 28
    info = asyncio.run(trainer.info())
    assert info.num_parameters == sum(v.size for v in weights_of(trainer).values())
    merged, samples = merged_of(trainer), samples_of(7)
    asyncio.run(trainer.push(0, samples))
    asyncio.run(trainer.compute_logprobs(batch_of(samples, mini_batches=2)))
    for sample in samples:
        expected, plain = alone(merged, sample)[0], alone(network_of(config), sample)[0]
        assert torch.allclose(trainer._data.columns["old_logprobs"][sample.key], expected, atol=1e-5, rtol=0)
        assert not torch.allclose(expected, plain, atol=1e-3, rtol=0)


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_the_reference_is_the_policy_at_begin(mini_batches):
    config = lora_of(algorithm={"kl_coef": 0.1, "mini_batches": mini_batches})
    trainer, samples = trainer_of(config), samples_of()
    update(trainer, samples, batch_of(samples, objective="warm_start"))
    asyncio.run(trainer.end_warm_start())
    start = merged_of(trainer)
    assert update(trainer, samples, batch_of(samples)).metrics["actor/kl"].total == pytest.approx(0, abs=1e-5)
    update(trainer, samples, batch_of(samples))
    now, factors, batch = merged_of(trainer), weights_of(trainer), batch_of(samples, mini_batches=mini_batches)
    factors = {name: np.array(value) for name, value in factors.items()}
    asyncio.run(trainer.push(0, samples))
    asyncio.run(trainer.compute_logprobs(batch))
    for sample in samples:
        assert torch.allclose(
            trainer._data.columns["ref_logprobs"][sample.key], alone(start, sample)[0], atol=1e-5, rtol=0
        )
        assert not torch.allclose(
            trainer._data.columns["ref_logprobs"][sample.key], alone(now, sample)[0], atol=1e-5, rtol=0
        )
        if mini_batches > 1:
            assert torch.allclose(
                trainer._data.columns["old_logprobs"][sample.key], alone(now, sample)[0], atol=1e-5, rtol=0
            )
    assert same(weights_of(trainer), factors)  # its own are back
    assert type(trainer.backend.networks["reference"]) is AdapterReference  # not a second network
    batch = dataclasses.replace(batch, advantages={s.key: s.reward for s in samples})
    assert asyncio.run(trainer.update(batch)).metrics["actor/approx_kl"].total == pytest.approx(0, abs=0.1)


def test_in_bfloat16_the_base_is_held_so_and_adapters_are_not():
    config, samples = lora_of(training={"activation_checkpointing": True}), samples_of()
    exact = trainer_of(lora_of())
    backend = partial(FsdpBackend, config, {"policy": NewNetwork(lambda: network_of(config))}, CPU, torch.bfloat16)
    publisher = WeightPublisher(0, "host_memory", torch.bfloat16)
    trainer = TrainerRank(config, backend, 0, 1, Tracer(None, "trainer-0"), publisher)
    parameters = trainer.backend.networks["policy"].model.network.named_parameters()
    kinds = {(name.endswith((LORA_A, LORA_B)), p.dtype) for name, p in parameters}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    entropies = (
        [update(t, samples, batch_of(samples)).metrics["actor/entropy"].total for _ in range(2)]
        for t in (trainer, exact)
    )
    found, expected = entropies
    assert found == pytest.approx(expected, rel=0.01) and found != expected
    assert {str(value.dtype) for value in weights_of(trainer).values()} == {"float32"}
    rotary = trainer.backend.networks["policy"].model.network.model.rotary_emb.inv_freq
    assert rotary.dtype == torch.float32


def _rank(rank: int, address: str, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    join(Rendezvous(rank, 2, address), "gloo", timeout_s=120)
    for shard in (1, 2):
        train_as(rank, 2, shard, Path(folder) / f"{shard}")
    train_as(rank, 2, 2, Path(folder) / "bfloat16", torch.bfloat16)


def train_as(rank: int, size: int, shard: int, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    sections = {"algorithm": {"kl_coef": 0.1, "mini_batches": 2}, "training": {"activation_checkpointing": True}}
    config = lora_of(**sections)
    tracer, norms = Tracer(None, f"trainer-{rank}"), list[float]()
    backend = partial(FsdpBackend, config, {"policy": NewNetwork(lambda: network_of(config))}, CPU, dtype, shard)
    trainer = TrainerRank(config, backend, rank, 1, tracer)
    asyncio.run(trainer.end_warm_start())
    for seed in range(2):
        samples = samples_of(seed, prompts=6)
        layout = {"step": 1, "mini_batches": 2, "max_tokens": 60, "cost": CostModel(100.0), "objective": "policy"}
        batch = make_layout(metas_of(samples), num_ranks=size, shares=shard == 2, **layout)[rank]
        keys = {k for mini in batch.mini_batches for micro in mini.micro_batches for row in micro.rows for k in row}
        norms.append(update(trainer, [s for s in samples if s.key in keys], batch).grad_norm)
    folder.mkdir(exist_ok=True)
    save_state(trainer, folder)
    (folder / "norms.json").write_text(json.dumps(norms))


def load_part(folder: Path) -> dict[str, torch.Tensor]:
    return tensors.read(folder, tensors.shapes(folder))


def test_two_ranks_train_as_one(tmp_path):
    """As two copies, and as one copy in two shards, where siblings share their prompt; about so in bfloat16."""
    ranks = start_ranks(2, _rank, free_address(), str(tmp_path))
    train_as(0, 1, 1, tmp_path / "alone")
    finish_ranks(ranks)
    for part in ("weights", "optimizer", "reference"):
        expected = load_part(tmp_path / "alone" / part)
        for shard in ("1", "2"):
            found = load_part(tmp_path / shard / part)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.allclose(found[name], value, atol=2e-5, rtol=1e-4), (part, shard, name)
    alone, mixed = (json.loads((tmp_path / name / "norms.json").read_text()) for name in ("alone", "bfloat16"))
    assert mixed == pytest.approx(alone, rel=0.05) and mixed != alone
    assert any(v.abs().max() > 1e-3 for k, v in load_part(tmp_path / "alone/weights").items() if LORA_B in k)


# --- checkpoints


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_state_round_trip_is_exact_and_small(tmp_path, kl_coef):
    config = lora_of(algorithm={"kl_coef": kl_coef}, training={"schedule": "linear"})
    trainer, samples = trained(config), samples_of()
    save_state(trainer, tmp_path)
    names = {"trainer.json", "weights", "optimizer"} | ({"reference"} if kl_coef else set())
    assert {path.name for path in tmp_path.iterdir()} == names
    numbers = sum(value.size for value in weights_of(trainer).values())
    header = 28 * 2048  # per tensor
    assert size_of(tmp_path / "weights") < 4 * numbers + header
    assert size_of(tmp_path / "optimizer") < 8 * numbers + 3 * header

    other = trainer_of(config)
    asyncio.run(other.load(str(tmp_path)))
    assert other.trained["policy"].updates == 3 and same(weights_of(other), weights_of(trainer))
    a, b = (update(t, samples, batch_of(samples)) for t in (trainer, other))
    assert a == b and (a.metrics["actor/kl"].total > 1e-6 if kl_coef else "actor/kl" not in a.metrics)
    assert same(weights_of(other), weights_of(trainer))


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_checkpoints_of_another_kind_are_refused(tmp_path):
    full, small = tmp_path / "full", tmp_path / "small"
    for folder, config in ((full, config_of()), (small, lora_of())):
        folder.mkdir()
        save_state(trained(config, 1), folder)
    cases = [
        (full, lora_of(), r"holds all weights, and this run trains adapters; resume without model\.lora"),
        (small, config_of(), r"holds adapters, and this run trains all weights; resume with the model\.lora"),
        (small, lora_of({**LORA, "rank": 8}), r"rank=4, alpha=6\.0, 14 layers; model\.lora .* rank=8, alpha=6\.0"),
        (small, lora_of({**LORA, "alpha": 8}), r"alpha=6\.0, 14 layers; model\.lora .* alpha=8\.0"),
        (small, lora_of({**LORA, "targets": ["q_proj"]}), r"14 layers; model\.lora .* 2 layers"),
    ]
    for folder, config, words in cases:
        trainer = trainer_of(config)
        before = {k: np.array(v) for k, v in weights_of(trainer).items()}
        with pytest.raises(UserError, match=words):
            asyncio.run(trainer.load(str(folder)))
        assert same(weights_of(trainer), before)


# --- PEFT


def peft_of(network: Any, lora: Lora) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=[n.split(".")[-1] for n in LAYERS])
    return peft.get_peft_model(network, config)


def test_logits_and_gradients_are_those_of_peft():
    config = lora_of()
    trainer, samples = trained(config), samples_of(4)
    theirs = peft_of(network_of(config), config.model.lora)
    own = {f"base_model.model.{n}": torch.from_numpy(np.array(v)) for n, v in weights_of(trainer).items()}
    named = {n.replace(".default.", "."): p for n, p in theirs.named_parameters() if p.requires_grad}
    assert named.keys() == own.keys()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(own[name])
    asyncio.run(trainer.push(0, samples))
    asyncio.run(trainer.compute_logprobs(batch_of(samples, mini_batches=2)))
    for sample in samples:
        expected = alone(theirs, sample)[0]
        assert torch.allclose(trainer._data.columns["old_logprobs"][sample.key], expected, atol=1e-5, rtol=0)
    trainer._data.clear()
    gradients: dict[str, torch.Tensor] = {}

    def look(lr: float, network: str = "policy") -> float:
        parameters = trainer.backend.networks["policy"].model.network.named_parameters()
        gradients.update({name: p.grad.full_tensor().clone() for name, p in parameters if p.grad is not None})
        return 0.0

    trainer.backend.step = look
    update(trainer, samples, batch_of(samples, objective="warm_start"))
    assert {f"base_model.model.{name}" for name in gradients} == named.keys()
    steps = [alone(theirs, sample)[0][torch.from_numpy(sample.mask_S)] for sample in samples]
    (-torch.cat(steps).mean()).backward()
    for name, parameter in named.items():
        found = gradients[name.removeprefix("base_model.model.")]
        assert torch.allclose(found, parameter.grad, atol=1e-6, rtol=1e-4), name
        assert found.abs().max() > 1e-7


def test_an_export_is_merged_and_peft_reads_the_adapters_beside_it(tmp_path):
    from transformers import AutoModelForCausalLM

    config = lora_of(run={"dir": str(tmp_path), "name": "run"})
    trainer, run = trained(config), tmp_path / "run"
    partial = store.begin(run, 3, 0)
    store.commit(partial, save_state(trainer, partial).files, {})
    (run / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    folder = tmp_path / "out" / "model"
    assert export(run, folder) == 24
    tokens = torch.arange(4, 16)[None]
    with torch.no_grad():
        expected = merged_of(trainer)(tokens).logits
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert not any("lora" in name for name, _ in plain.named_parameters())
        assert torch.allclose(plain(tokens).logits, expected, atol=1e-5, rtol=0)
        assert not torch.allclose(network_of(config)(tokens).logits, expected, atol=1e-3, rtol=0)
    beside = adapter_folder(folder)
    assert beside == tmp_path / "out" / "model-adapter"
    about = json.loads((beside / "adapter_config.json").read_text())
    assert about["target_modules"] == sorted({layer.split(".")[-1] for layer in LAYERS}) and about["r"] == 4
    with pytest.raises(UserError, match="model-adapter: the folder is not empty"):
        _export_again(run, folder)
    peft = pytest.importorskip("peft")
    theirs = peft.PeftModel.from_pretrained(network_of(config), str(beside))
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, expected, atol=1e-5, rtol=0)


def _export_again(run: Path, folder: Path) -> None:
    """The policy's folder was taken away, the adapters' was not."""
    for file in folder.iterdir():
        file.unlink()
    export(run, folder)
