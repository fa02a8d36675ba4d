"""Engines whose policy has adapters (model.lora): factors come, and what is served is the base with their product.

One contract for all engines. SGLang is asked where it is installed (docs/engines.md says how it was).
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from gcore.config.base import Lora, PolicyModel
from gcore.generation.embedded import EmbeddedBackend
from gcore.generation.engine_shell import SteppedEngine
from gcore.models.networks import Adapters, adapters_in, adapters_of
from gcore.prompts.tokenizer import build_char_tokenizer
from gcore.types import Completion, UserError
from gcore.weights import receiver
from gcore.weights.bucket import PACKED, pack_bucket, to_host_memory
from gcore.weights.receiver import Base, WeightReceiver
from tests.contract.test_engine import (
    ALPHABET,
    CLOSE,
    MAX_LENGTH,
    VLLM,
    ask,
    greedy,
    logprobs_of,
    network_of,
    open_vllm,
    prompt,
    run,
    until_generated,
    weights_of,
)

Factors = dict[str, np.ndarray]


def embedded(network: Any, adapters: Adapters) -> SteppedEngine:
    return SteppedEngine(EmbeddedBackend(network, max_concurrent=32, max_length=MAX_LENGTH, adapters=adapters))


def embedded_by_library(network: Any, adapters: Adapters) -> SteppedEngine:
    return SteppedEngine(EmbeddedBackend(network, 32, MAX_LENGTH, adapters=adapters, fused=False))


def sglang(network: Any, adapters: Adapters) -> Any:
    from gcore.generation.sglang import SglangBackend
    from gcore.generation.spec import LibraryOptions

    options = LibraryOptions(32, MAX_LENGTH, dtype="float32", cpu_cache_gib=0.25, adapters=adapters)
    with TemporaryDirectory() as folder:
        network.save_pretrained(folder)
        build_char_tokenizer(ALPHABET).save_pretrained(folder)
        return SteppedEngine(SglangBackend(Path(folder), options))


OPEN: dict[str, Callable[..., Any]] = {"embedded": embedded, "embedded-by-library": embedded_by_library}
if VLLM:
    OPEN["vllm"] = open_vllm
if importlib.util.find_spec("sglang") is not None:
    OPEN["sglang"] = sglang


@pytest.fixture(scope="module")
def base() -> Any:
    return network_of(seed=1)


@pytest.fixture(scope="module")
def adapters(base: Any) -> Adapters:
    """Parts of what engines join: queries without keys, up without gate."""
    return adapters_of(base, Lora(rank=4, alpha=6.0, targets=["q_proj", "v_proj", "up_proj", "down_proj"]))


@pytest.fixture(scope="module", params=list(OPEN))
def engine(request: pytest.FixtureRequest, base: Any, adapters: Adapters) -> Iterator[Any]:
    """One for all tests: what is served never depends on what was served before."""
    opened = OPEN[request.param](copy.deepcopy(base), adapters=adapters)
    yield opened
    opened.close()


def factors_of(network: Any, adapters: Adapters, seed: int | None) -> Factors:
    """Random, and large enough to say something else; without a seed B is zero, as in the beginning."""
    rng, found = np.random.default_rng(seed), Factors()
    for layer in adapters.layers:
        width_out, width_in = network.get_parameter(f"{layer}.weight").shape
        a, b = rng.normal(0, 0.2, (adapters.rank, width_in)), rng.normal(0, 0.2, (width_out, adapters.rank))
        found[f"{layer}.lora_A.weight"] = a.astype(np.float32)
        found[f"{layer}.lora_B.weight"] = (b if seed is not None else b * 0).astype(np.float32)
    return found


def together(network: Any, adapters: Adapters, factors: Factors) -> Any:
    """The network that base and adapters are together, by a formula of its own."""
    found = copy.deepcopy(network)
    with torch.no_grad():
        for layer in adapters.layers:
            a, b = (torch.from_numpy(factors[f"{layer}.lora_{which}.weight"]).double() for which in "AB")
            found.get_parameter(f"{layer}.weight").add_(1.5 * (b @ a))
    return found


def load(engine: Any, version: int, weights: Any, part: tuple[int, int] = (0, 1)) -> int:
    return asyncio.run(asyncio.wait_for(engine.load_weights(version, weights, part), 60))


def serves(engine: Any, network: Any, version: int) -> bool:
    prompts = [prompt(n) for n in (1, 9, 33)]
    found = run(engine, *(ask(p, 16, temperature=0) for p in prompts))
    assert {v for c in found for v in c.versions_S.tolist()} == {version}
    close = [
        np.abs(c.logprobs_S - logprobs_of(network, p, c.content.tokens_S)).max()
        for p, c in zip(prompts, found, strict=True)
    ]
    return [c.content.tokens_S.tolist() for c in found] == [greedy(network, p, 16) for p in prompts] and max(
        close
    ) < CLOSE


def test_it_starts_as_the_base_and_serves_base_and_adapters(engine, base, adapters):
    assert len(adapters.layers) == 8 and adapters.scale == 1.5
    with pytest.raises(Exception, match=r"version 1 lack .* \(16 names\)"):
        load(engine, 1, weights_of(base))
    assert serves(engine, base, 0)
    assert load(engine, 1, factors_of(base, adapters, None)) == 1 and serves(engine, base, 1)
    factors = factors_of(base, adapters, 5)
    expected = together(base, adapters, factors)
    assert greedy(expected, prompt(9), 16) != greedy(base, prompt(9), 16)
    assert load(engine, 2, pack_bucket({k: torch.from_numpy(v) for k, v in factors.items()}, to_host_memory)) == 2
    for value in factors.values():  # what was given is not looked at again
        value[...] = 0
    assert serves(engine, expected, 2)


def test_nothing_adds_up(engine, base, adapters):
    """The last bits too: every version is made from the base."""
    first, second = factors_of(base, adapters, 5), factors_of(base, adapters, 6)
    requests = [ask(prompt(n), 16, key=n) for n in (1, 9, 33)]
    answers: list[list[Completion]] = []
    for version, factors in enumerate((first, second, first), start=3):
        load(engine, version, factors)
        answers.append(run(engine, *requests))
    before, between, after = ([c.logprobs_S.tolist() for c in found] for found in answers)
    assert before == after != between
    load(engine, 6, factors_of(base, adapters, None))
    assert serves(engine, base, 6)


def test_factors_in_different_buckets_are_merged(engine, base, adapters):
    """One factor of a layer in this part, the other in that; decoding waits for the last."""
    factors = factors_of(base, adapters, 7)
    names = sorted(factors, key=lambda name: (".lora_B." in name, name))  # all A before all B
    parts = [{name: factors[name].copy() for name in names[i : i + 6]} for i in (0, 6, 12)]
    load(engine, 7, factors_of(base, adapters, None))

    async def come() -> list[Completion]:
        running = asyncio.ensure_future(engine.generate([ask(prompt(4), 50, temperature=0)]))
        await until_generated(engine, (await engine.stats()).generated_tokens + 3)
        for i in (0, 1):
            assert await engine.load_weights(8, parts[i], (i, 3)) == 7
            for value in parts[i].values():
                value[...] = 0
        seen = (await engine.stats()).generated_tokens
        await asyncio.sleep(0.05)
        assert (await engine.stats()).generated_tokens == seen and not running.done()
        assert await engine.load_weights(8, parts[2], (2, 3)) == 8
        return await running

    (mixed,) = asyncio.run(asyncio.wait_for(come(), 60))
    assert set(mixed.versions_S.tolist()) == {7, 8}
    assert serves(engine, together(base, adapters, factors), 8)


def test_what_does_not_fit_is_refused_whole(engine, base, adapters):
    old = together(base, adapters, factors_of(base, adapters, 8))
    load(engine, 9, factors_of(base, adapters, 8))
    new = factors_of(base, adapters, 9)
    *_, last = new
    damaged = pack_bucket({k: torch.from_numpy(v.copy()) for k, v in new.items()}, to_host_memory)
    damaged[PACKED].payload[-1] ^= 1
    cases = [
        ({k: v for k, v in new.items() if k != last}, rf"lack \['{last}'\] \(1 names\)"),
        ({**new, last: new[last][:, :3]}, rf"{last} has shape \(\d+, 3\), expected \(\d+, 4\)"),
        (weights_of(base), r"version 10 lack .* \(16 names\)"),
        (damaged, "damaged"),
    ]
    for bad, words in cases:
        with pytest.raises(Exception, match=words):
            load(engine, 10, bad)
    assert serves(engine, old, 9)


# --- GPUs, without one: what goes into the model, and what may sleep


class Core:
    """A stand-in for vLLM's core on CUDA that keeps what it is told."""

    def __init__(self) -> None:
        from types import SimpleNamespace

        self.model_config = SimpleNamespace(hf_text_config=None, dtype=torch.bfloat16, get_vocab_size=lambda: 16)
        self.engine_core, self.loads, self.slept = self, list[dict[str, torch.Tensor]](), list[int]()
        self.scheduler, self.batch_queue, self.model_executor = self, list[Any](), None

    def collective_rpc(self, call: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        if args:
            assert call.__name__ == "load_in_place"
            self.loads.append(dict(args[0]))
        return [True]

    def sleep(self, level: int) -> None:
        self.slept.append(level)

    def set_pause_state(self, state: Any) -> None: ...

    def abort_requests(self, names: list[str]) -> None: ...


@pytest.mark.skipif(not VLLM, reason="vllm is not installed")
def test_on_a_gpu_the_targets_alone_are_loaded_and_weights_are_never_dropped(monkeypatch, base, tmp_path):
    from gcore.generation import vllm
    from gcore.generation.spec import LibraryOptions

    base.save_pretrained(tmp_path)
    model = PolicyModel(path=str(tmp_path), lora=Lora(rank=4, alpha=6.0, targets=["q_proj", "mlp.down_proj"]))
    adapters = adapters_in(tmp_path, model)
    assert adapters is not None and adapters == adapters_of(base, model.lora)
    core, base_on = Core(), receiver.FolderWeights.base
    monkeypatch.setattr(vllm, "open_core", lambda folder, options: core)
    monkeypatch.setattr(vllm, "shut_core", lambda core: None)
    monkeypatch.setattr(vllm, "is_cpu", lambda: False)
    monkeypatch.setattr(
        receiver.FolderWeights,
        "base",
        lambda weights, adapters, device, *rest: base_on(weights, adapters, "cpu", *rest),
    )
    monkeypatch.setattr(receiver, "CHUNK_BYTES", 128 * 128 * 2)  # as large as q_proj, larger than down_proj
    engine = SteppedEngine(vllm.VllmBackend(tmp_path, LibraryOptions(4, 64, sleep=True, adapters=adapters)))
    factors = factors_of(base, adapters, 3)
    expected = together(base, adapters, factors)
    assert load(engine, 1, factors) == 1
    q, down = "model.layers.{}.self_attn.q_proj.weight", "model.layers.{}.mlp.down_proj.weight"
    assert [list(found) for found in core.loads] == [[q.format(0), down.format(0)], [q.format(1), down.format(1)]]
    for name, tensor in {**core.loads[0], **core.loads[1]}.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.allclose(tensor.float(), expected.get_parameter(name), rtol=2**-8, atol=1e-6)  # rounded once
    with pytest.raises(UserError, match=r"generation\.sleep=2 .*model\.lora.*; use 1"):
        asyncio.run(asyncio.wait_for(engine.sleep(2), 60))
    asyncio.run(asyncio.wait_for(engine.sleep(1), 60))
    assert core.slept == [1]
    engine.close()


def test_a_bucket_whose_loading_failed_may_be_repeated(base, adapters, monkeypatch):
    """The update stays incomplete until then."""
    kept = {f"{layer}.weight": base.get_parameter(f"{layer}.weight").detach() for layer in adapters.layers}
    shapes = {name: tuple(p.shape) for name, p in base.named_parameters()}
    incoming = WeightReceiver(shapes, Base(adapters, kept, torch.device("cpu"), torch.float32))
    factors = factors_of(base, adapters, 4)
    first, second = ({k: v for k, v in factors.items() if f"lora_{which}" in k} for which in "AB")
    with incoming.receive(1, first, (0, 2)) as loads:
        assert list(loads) == []
    with pytest.raises(MemoryError), incoming.receive(1, second, (1, 2)):
        raise MemoryError
    assert incoming.incomplete
    with incoming.receive(1, second, (1, 2)) as loads:
        found = list(loads)
    assert not incoming.incomplete and [(len(tensors), last) for tensors, last in found] == [(8, True)]
    monkeypatch.setattr(receiver, "CHUNK_BYTES", 0)
    for bucket, flags in (((0, 2), [False] * 8), ((1, 2), [False] * 7 + [True])):  # only the last tensors end it
        with incoming.receive(2, factors, bucket) as loads:
            assert [(len(tensors), last) for tensors, last in loads] == [(1, flag) for flag in flags]


def test_a_folder_without_the_matrices_is_the_users_to_mend(base, adapters, tmp_path):
    with pytest.raises(UserError, match=r"model\.lora: .* no safetensors with model\.layers\.0"):
        receiver.FolderWeights(tmp_path).base(adapters, "cpu", torch.float32)
