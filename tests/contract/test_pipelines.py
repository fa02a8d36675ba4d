"""Transformers of diffusers on the engine and the trainer of diffusion models: tiny ones with random weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")

from gcore.config.base import Lora
from gcore.config.denoising import Denoising
from gcore.config.tree import Config
from gcore.content.latents import Latents
from gcore.diffusion.denoiser import stacked, tensors_of
from gcore.diffusion.pipelines import FAMILIES, PipelineDenoiser, check_denoiser, load_denoiser
from gcore.generation.diffusion import DiffusionBackend
from gcore.generation.engine_shell import SteppedEngine
from gcore.models.networks import LORA_A, LORA_B, adapters_of, compile_each
from gcore.prompts.conditions import ConditionTemplater
from gcore.protocols import Rendezvous
from gcore.runtime.gloo import join
from gcore.training import denoise_model, lora
from gcore.training.context import RowGroup
from gcore.training.denoise_model import DenoiseModel, LayersThatFit
from gcore.training.fsdp import mixed_precision
from gcore.types import MicroBatch, Request, Sample, SamplingParams, UserError
from tests.unit.tiny_pipelines import save_flux, save_sd3

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("pipelines")
    return {"sd3": save_sd3(place), "flux": save_flux(place), "schnell": save_flux(place, guidance_embeds=False)}


def config_of(folder: Path, **denoising: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"train": {"task": "draw_digits"}, "max_prompt_length": 64},
            "generation": {"denoising": {"steps": 3, "height": 32, "width": 32, **denoising}},
            "rewards": {"functions": [{"name": "r", "path": "gcore.rewarding.rules:exact_answer"}]},
        }
    )


def samples_of(config: Config, folder: Path, denoiser: Any, number: int = 3) -> dict[Any, Sample]:
    spec = config.generation.denoising
    engine = SteppedEngine(DiffusionBackend(denoiser, spec, folder, max_concurrent=8))
    content = ConditionTemplater(config).prompt({"prompt": "a cat"}, 0, 0).content
    requests = [Request(content, SamplingParams(spec.steps), key) for key in range(number)]
    completions = asyncio.run(engine.generate(requests))
    engine.close()
    found = {}
    for i, completion in enumerate(completions):
        whole = content.extended(completion.content)
        assert whole.picture.read().shape == (32, 32, 3)
        found[(i, 0)] = Sample(i, 0, whole, whole.actions_S, completion.logprobs_S)
    return found


def logprobs_of(model: DenoiseModel, samples: dict[Any, Sample]) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    packed = model.pack(MicroBatch((tuple(samples),), 8), samples, RowGroup(None, (0,), 0))
    found = model(packed)[0]
    rollout = np.concatenate([sample.rollout_logprobs_S for sample in samples.values()])
    return found.detach().numpy(), rollout, found


CASES = [("sd3", 1.0), ("sd3", 4.0), ("flux", 3.5), ("schnell", 1.0), ("schnell", 2.0)]


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_a_pipeline_on_engine_and_trainer(folders, tmp_path, name, scale):
    """Text is encoded once, by the engine; the trainer reads embeddings from files, and has no text encoder."""
    config = config_of(folders[name], guidance_scale=scale, shift=3.0)
    check_denoiser(config)
    denoiser = load_denoiser(config, CPU, torch.float32, encoders=True)
    encoded = []
    original = denoiser.family.encode
    object.__setattr__(denoiser, "family", _counting(denoiser.family, original, encoded))
    samples = samples_of(config, tmp_path, denoiser)
    assert encoded == (["a cat", ""] if scale != 1 and name != "flux" else ["a cat"])
    own = load_denoiser(config, CPU, torch.float32, encoders=False)
    model = DenoiseModel(own, spec=config.generation.denoising).train()
    found, rollout, logprobs = logprobs_of(model, samples)
    assert np.allclose(found, rollout, atol=1e-5, rtol=1e-5) and np.abs(rollout).max() > 0
    (logprobs.sum()).backward()
    layers = [p for name, p in own.named_parameters() if "blocks" in name]
    assert sum(float(p.grad.abs().sum()) > 0 for p in layers if p.grad is not None) > 0.5 * len(layers)


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_layers_are_compiled_whole_and_not_again_for_other_times_or_weights(folders, tmp_path, name, compiled_layers):
    config = config_of(folders[name], guidance_scale=2.0, shift=3.0, steps=5)
    spec = config.generation.denoising
    samples = samples_of(config, tmp_path / "eager", load_denoiser(config, CPU, torch.float32, encoders=True), number=2)
    served = load_denoiser(config, CPU, torch.float32, encoders=True)
    compile_each(served.layers)
    same = samples_of(config, tmp_path / "compiled", served, number=2)
    kinds = 2  # of layers: the last one of sd3 returns no text; flux has single ones
    assert compiled_layers.frame_count == kinds  # five steps
    for one, other in zip(samples.values(), same.values(), strict=True):
        assert np.allclose(one.rollout_logprobs_S, other.rollout_logprobs_S, atol=1e-5)
    own = load_denoiser(config, CPU, torch.float32, encoders=False)
    compile_each(own.layers)
    model = DenoiseModel(own, spec=spec, row_bytes=1e-9).train()
    model.recompute.begin = lambda rows: setattr(model.recompute, "recomputed", 1)
    before = compiled_layers.frame_count
    for _ in range(2):
        found, rollout, logprobs = logprobs_of(model, same)
        assert np.allclose(found, rollout, atol=1e-5, rtol=1e-5)
        logprobs.sum().backward()
        with torch.no_grad():
            for parameter in own.transformer.parameters():
                parameter.mul_(1.0)
    assert compiled_layers.frame_count - before == kinds


def test_layers_that_do_not_fit_are_recomputed(folders, tmp_path, monkeypatch):
    """The first ones. Gradients are those of a pass that keeps everything."""
    config = config_of(folders["sd3"], guidance_scale=2.0)
    samples = samples_of(config, tmp_path, load_denoiser(config, CPU, torch.float32, encoders=True))
    gradients, calls = [], []
    monkeypatch.setattr(denoise_model, "WORKING_LAYERS", 0)
    for free, expected in ((6 * 2 * 10.0, [1, 1]), (6 * 1 * 10.0, [2, 1]), (0.0, [2, 2])):  # six rows, two layers
        monkeypatch.setattr(denoise_model, "free_bytes", lambda device, free=free: free)
        own = load_denoiser(config, CPU, torch.float32, encoders=False)
        model = DenoiseModel(own, spec=config.generation.denoising, row_bytes=10.0).train()
        calls = [0, 0]
        for number, layer in enumerate(model.layers):

            def count(layer, inputs, number=number, calls=calls):
                calls[number] += 1

            layer.register_forward_pre_hook(count)
        logprobs_of(model, samples)[2].sum().backward()
        assert calls == expected
        gradients.append({n: p.grad for n, p in own.named_parameters() if p.grad is not None})
        calls[:] = 0, 0
        with torch.no_grad():
            model(model.pack(MicroBatch((tuple(samples),), 8), samples, RowGroup(None, (0,), 0)))
        assert calls == [1, 1]
    for other in gradients[1:]:
        assert all(torch.equal(gradient, other[n]) for n, gradient in gradients[0].items())


@pytest.mark.parametrize(
    ("layers_free", "recomputed"), [(100, 0), (24, 0), (23.5, 4), (20, 7), (3, 24), (0, 24), (-2, 24)]
)
def test_as_many_layers_keep_their_activations_as_fit(layers_free, recomputed):
    """Below all of them, a layer that is recomputed needs room for its gradients too."""
    fit = LayersThatFit(24, 5.0, lambda: layers_free * 5.0 * 8)
    fit.begin(8)
    assert fit.recomputed == recomputed


def _counting(family, original, encoded):
    import dataclasses

    def encode(pipe, text):
        encoded.append(text)
        return original(pipe, text)

    return dataclasses.replace(family, encode=encode)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # Flux returns views of its layers, and writes into none
@pytest.mark.parametrize(("name", "scale"), CASES)
def test_engine_and_trainer_agree_in_half_precision(folders, tmp_path, name, scale):
    """Neither rounds positions and rotary angles, also where layers are sharded one by one, as on GPUs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join(Rendezvous(0, 1, None), "gloo")
    config = config_of(folders[name], guidance_scale=scale, shift=3.0)
    served = load_denoiser(config, CPU, torch.bfloat16, encoders=True)
    assert {p.dtype for module in (served, served.pipe.vae) for p in module.parameters()} == {torch.bfloat16}
    samples = samples_of(config, tmp_path, served)
    model = DenoiseModel(load_denoiser(config, CPU, torch.float32, encoders=False), spec=served.spec).train()
    how = {"mesh": init_device_mesh("cpu", (1,)), "mp_policy": mixed_precision(torch.bfloat16)}
    for module in (*model.layers, model):
        fully_shard(module, **how)
    found, rollout, logprobs = logprobs_of(model, samples)
    assert np.array_equal(found, rollout)
    logprobs.sum().backward()


def test_asleep_it_has_no_encoders_and_awake_it_makes_the_same_pictures(folders, tmp_path):
    config = config_of(folders["sd3"], guidance_scale=2.0)
    denoiser = load_denoiser(config, CPU, torch.float32, encoders=True)
    engine = SteppedEngine(DiffusionBackend(denoiser, config.generation.denoising, tmp_path, max_concurrent=8))
    content = ConditionTemplater(config).prompt({"prompt": "a cat"}, 0, 0).content
    new = ConditionTemplater(config).prompt({"prompt": "a dog"}, 0, 0).content  # its text is not cached
    modules = (denoiser.pipe.text_encoder, denoiser.pipe.vae, denoiser.transformer)

    async def pictures(content: Latents) -> list[np.ndarray]:
        found = await engine.generate([Request(content, SamplingParams(3), key) for key in range(2)])
        return [completion.content.picture.read() for completion in found]

    async def nights() -> None:
        before = await pictures(content)
        for other in (content, new):
            await engine.sleep(1)
            assert all(parameter.numel() == 0 for module in modules for parameter in module.parameters())
            await engine.wake()
            assert all(np.array_equal(*pair) for pair in zip(await pictures(content), before, strict=True))
            assert len(await pictures(other)) == 2

    asyncio.run(nights())
    engine.close()


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_it_returns_its_memory_to_the_gpu(folders, tmp_path, monkeypatch, level):
    """The trainer is in another process: memory that this one keeps cached is lost for it."""
    config = config_of(folders["sd3"])
    denoiser = load_denoiser(config, CPU, torch.float32, encoders=True)
    engine = SteppedEngine(DiffusionBackend(denoiser, config.generation.denoising, tmp_path, max_concurrent=8))
    held: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held.append(sum(p.numel() for p in denoiser.parameters())))
    asyncio.run(engine.sleep(level))
    assert held == []  # on a CPU there is nothing to return
    asyncio.run(engine.wake())
    engine.backend._device = torch.device("cuda")
    asyncio.run(engine.sleep(level))
    assert held == [0]
    engine.close()


def test_pictures_are_decoded_in_parts(folders, monkeypatch):
    denoiser = load_denoiser(config_of(folders["sd3"]), CPU, torch.float32, encoders=True)
    latents = torch.randn(5, *denoiser.latent_shape, generator=torch.Generator().manual_seed(0))
    whole, parts = denoiser.decode(latents), []
    original = denoiser._decode
    monkeypatch.setattr("gcore.diffusion.pipelines.DECODED_PIXELS", 2 * 32 * 32)
    monkeypatch.setattr(denoiser, "_decode", lambda part: parts.append(len(part)) or original(part))
    assert np.array_equal(denoiser.decode(latents), whole) and parts == [2, 2, 1]


def test_sd3_denoises_as_its_pipeline_does(folders):
    """Our deterministic sampler and the loop of diffusers, from the same noise: latents and pictures."""
    from diffusers import StableDiffusion3Pipeline

    config = config_of(folders["sd3"], guidance_scale=4.0, shift=3.0, steps=4)
    denoiser = load_denoiser(config, CPU, torch.float32, encoders=True)
    pipe: StableDiffusion3Pipeline = denoiser.pipe
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, shift=3.0)
    spec = config.generation.denoising
    from gcore.diffusion.samplers import schedule_of

    schedule, noise = schedule_of(spec), torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(3))
    # diffusers spaces its steps otherwise (it ends at sigma_min): give it ours
    sigmas = [1 - i / 4 for i in range(4)]
    theirs = pipe(
        "a cat", height=32, width=32, sigmas=sigmas, guidance_scale=4.0, latents=noise.clone(), output_type="latent"
    ).images
    condition, x = stacked([tensors_of(denoiser.encode("a cat", True), CPU)]), noise
    with torch.inference_mode():
        for step in range(4):
            at = torch.tensor([step])
            found = denoiser(x, schedule.times(at), condition, 4.0)
            x = schedule.step(x, found, at, torch.tensor([False])).mean
    assert torch.allclose(x, theirs, atol=1e-4)
    picture = pipe(
        "a cat", height=32, width=32, sigmas=sigmas, guidance_scale=4.0, latents=noise.clone(), output_type="np"
    ).images
    assert np.abs(denoiser.decode(x)[0] - picture[0] * 255).max() <= 1.0


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_adapters(folders, tmp_path, name):
    """LoRA: only adapters get gradients, and the engine that merged them samples what the trainer computes."""
    config = config_of(folders[name], guidance_scale=3.0)
    spec, chosen = config.generation.denoising, Lora(rank=2, alpha=4.0, targets=["to_q", "to_v"])
    own = load_denoiser(config, CPU, torch.float32, encoders=False)
    adapters = lora.adapt(own, chosen, 0, torch.float32)
    assert len(adapters.layers) >= 4 and all(layer.startswith("transformer.") for layer in adapters.layers)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter_name, parameter in own.named_parameters():
            if parameter_name.endswith(LORA_B):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    served = load_denoiser(config, CPU, torch.float32, encoders=True)
    backend = DiffusionBackend(served, spec, tmp_path, max_concurrent=8, adapters=adapters_of(served, chosen))
    engine = SteppedEngine(backend)
    factors = {n: p.detach().numpy() for n, p in own.named_parameters() if n.endswith((LORA_A, LORA_B))}
    content = ConditionTemplater(config).prompt({"prompt": "a cat"}, 0, 0).content
    request = Request(content, SamplingParams(3), 1)
    asyncio.run(engine.load_weights(1, factors))
    (completion,) = asyncio.run(engine.generate([request]))
    engine.close()
    whole = content.extended(completion.content)
    samples = {(0, 0): Sample(0, 0, whole, whole.actions_S, completion.logprobs_S)}
    model = DenoiseModel(own, spec=spec).train()
    found, rollout, logprobs = logprobs_of(model, samples)
    assert np.allclose(found, rollout, atol=1e-5, rtol=1e-5)
    logprobs.sum().backward()
    assert {n for n, p in own.named_parameters() if p.grad is not None} == set(factors)


TRANSFORMERS = {
    "QwenImageTransformer2DModel": {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 24,
        "axes_dims_rope": (4, 4, 8),
    },
    "WanTransformer3DModel": {
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 1,
        "attention_head_dim": 12,
        "num_attention_heads": 2,
        "text_dim": 24,
        "freq_dim": 16,
        "ffn_dim": 32,
        "rope_max_seq_len": 32,
    },
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_other_transformers_compute_the_same_alone_and_in_a_batch(name):
    """Qwen-Image, whose prompts have different lengths, and Wan, whose latents are those of a video. Text encoders and
    VAEs are not part of this test."""
    import diffusers

    torch.manual_seed(0)
    network = getattr(diffusers, name)(**TRANSFORMERS[name]).eval()
    is_video = FAMILIES[name].is_video
    spec = Denoising(steps=3, height=32, width=32, frames=5 if is_video else 1, guidance_scale=2.0)
    denoiser = PipelineDenoiser(FAMILIES[name], network, spec)
    assert denoiser.latent_shape == ((4, 2, 4, 4) if is_video else (4, 4, 4)) and denoiser.layers
    rng = np.random.default_rng(0)
    lengths = (5, 5) if is_video else (3, 5)
    conditions = []
    for length in lengths:
        both: dict[str, np.ndarray] = {}
        for prefix in ("", "empty_"):
            both[prefix + "embeds"] = rng.normal(size=(length, 24)).astype(np.float32)
            if not is_video:
                both[prefix + "mask"] = np.ones(length, np.int64)
        conditions.append(tensors_of(both, CPU))

    latents, times = torch.randn(2, *denoiser.latent_shape), torch.tensor([0.9, 0.4])
    together = denoiser(latents, times, stacked(conditions), 2.0)
    assert together.shape == latents.shape
    for row in range(2):
        alone = denoiser(latents[row : row + 1], times[row : row + 1], stacked(conditions[row : row + 1]), 2.0)
        assert torch.allclose(alone[0], together[row], atol=1e-5), row
    together.sum().backward()
    empty = stacked([tensors_of(denoiser.empty_condition(True), CPU)])
    assert denoiser(latents[:1], times[:1], empty, 2.0).shape == latents[:1].shape
    assert len(adapters_of(denoiser, Lora(targets=["to_q"])).layers) >= 1


def test_what_is_no_pipeline_is_refused(tmp_path, folders):
    with pytest.raises(UserError, match="expected the folder of a diffusers pipeline"):
        ConditionTemplater(config_of(tmp_path))
    with pytest.raises(UserError, match="expected multiples of 16"):
        check_denoiser(config_of(folders["sd3"], height=40))
    with pytest.raises(UserError, match="is a flow"):
        check_denoiser(config_of(folders["sd3"], sampler="ddim"))
    with pytest.raises(UserError, match="no linear layer named qq"):
        wrong = config_of(folders["sd3"])
        model = wrong.model.model_copy(update={"lora": Lora(targets=["qq"])})
        check_denoiser(wrong.model_copy(update={"model": model}))
    assert isinstance(ConditionTemplater(config_of(folders["sd3"])).prompt({"prompt": "x"}, 0, 0).content, Latents)
