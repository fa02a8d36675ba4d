"""`gcore plan --denoiser` and simulated denoisers: counts on the real networks without weights, and the arithmetic."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch.utils.flop_counter import FlopCounterMode

from gcore.cli import main
from gcore.cost.costs import REACH, gpu_of
from gcore.cost.denoisers import (
    COMPILED_SHARE,
    DENOISERS,
    DenoisingWork,
    denoising_step_s,
    plan_denoiser,
    replica_speed,
    vae_s,
)
from gcore.simulate.run import simulate
from gcore.simulate.scenario import Scenario
from gcore.types import UserError


def sd3(layers: int, dual: int):
    from diffusers import SD3Transformer2DModel

    with torch.device("meta"):
        network = SD3Transformer2DModel(
            sample_size=128,
            patch_size=2,
            in_channels=16,
            num_layers=layers,
            attention_head_dim=64,
            num_attention_heads=layers,
            joint_attention_dim=4096,
            caption_projection_dim=64 * layers,
            pooled_projection_dim=2048,
            out_channels=16,
            pos_embed_max_size=192,
            dual_attention_layers=tuple(range(dual)),
            qk_norm="rms_norm",
        )
        inputs = {"encoder_hidden_states": torch.empty(1, 333, 4096), "pooled_projections": torch.empty(1, 2048)}
        return network, {"hidden_states": torch.empty(1, 16, 64, 64), "timestep": torch.empty(1), **inputs}


def flux():
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        text = {"encoder_hidden_states": torch.empty(1, 512, 4096), "pooled_projections": torch.empty(1, 768)}
        ids = {"txt_ids": torch.empty(512, 3), "img_ids": torch.empty(1024, 3)}
        one = {"timestep": torch.empty(1), "guidance": torch.empty(1)}
        return FluxTransformer2DModel(guidance_embeds=True), {
            "hidden_states": torch.empty(1, 1024, 64),
            **text,
            **ids,
            **one,
        }


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sd3.5-medium", lambda: sd3(24, 13)),
        pytest.param("sd3.5-large", lambda: sd3(38, 0), marks=pytest.mark.release),
        ("flux", flux),
    ],
)
def test_parameters_and_flops_are_those_of_the_network(name, make):
    pytest.importorskip("diffusers")
    network, inputs = make()
    network.to(torch.bfloat16)
    inputs = {name: tensor.to(torch.bfloat16) for name, tensor in inputs.items()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        """Not of attention: its matrices are not kept on a GPU."""
        whole = tensor if tensor._base is None else tensor._base
        is_attention = whole.dim() > 2 and whole.shape[-1] == whole.shape[-2]
        if not is_attention and not isinstance(whole, torch.nn.Parameter):
            kept[id(whole)] = whole
        return tensor

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        network(**inputs, return_dict=False)
    shape = DENOISERS[name]
    assert shape.parameters == pytest.approx(sum(p.numel() for p in network.parameters()), rel=0.02)
    assert shape.pass_flops(512) == pytest.approx(counter.get_total_flops(), rel=0.04)
    size = sum(tensor.nbytes for tensor in kept.values())
    assert shape.pass_bytes(512, checkpointing=False) == pytest.approx(size, rel=0.1)


@pytest.mark.release
def test_compiled_layers_keep_half_of_what_eager_ones_keep():
    """As a trainer compiles them, without generated code. Bytes per token and number of a layer."""
    pytest.importorskip("diffusers")
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    network = SD3Transformer2DModel(
        sample_size=32,
        in_channels=4,
        num_layers=3,
        attention_head_dim=64,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=256,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    ).to(torch.bfloat16)
    inputs = {
        "hidden_states": torch.randn(2, 4, 32, 32).bfloat16(),
        "timestep": torch.rand(2),
        "encoder_hidden_states": torch.randn(2, 77, 64).bfloat16(),
        "pooled_projections": torch.randn(2, 32).bfloat16(),
    }
    weights = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}

    def kept() -> float:
        found: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            place = tensor.untyped_storage()
            if place.data_ptr() not in weights:
                found[place.data_ptr()] = place.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            held = network(**inputs, return_dict=False)[0]
        assert held.requires_grad
        return sum(found.values()) / (2 * (256 + 77) * 256 * 3)

    eager = kept()
    for layer in network.transformer_blocks:
        layer.compile(backend="aot_eager_decomp_partition")
    with torch._functorch.config.patch(ban_recompute_materialized_backward=False):
        compiled = kept()
    assert 0.4 * eager < compiled < COMPILED_SHARE * eager


def test_a_step_costs_its_passes():
    gpu, shape = gpu_of("h200"), DENOISERS["sd3.5-medium"]
    work = DenoisingWork(prompts=8, samples=8, steps=20, trained=19, guidance=False, checkpointing=False)
    one, few = (plan_denoiser(shape, gpu, 1, w) for w in (work, DenoisingWork(trained=4, guidance=False)))
    passes = 64 * shape.pass_flops(512)
    assert one.seconds["training"] > 3 * 19 * passes / (gpu.tflops * 1e12)
    assert few.seconds["training"] < 0.4 * one.seconds["training"]
    assert few.seconds["generation"] == one.seconds["generation"] > 20 * passes / (gpu.tflops * 1e12)
    eight = plan_denoiser(shape, gpu, 8, work)
    assert eight.seconds["generation"] == pytest.approx(one.seconds["generation"] / 8)


def test_memory_by_part():
    gpu, shape = gpu_of("h200"), DENOISERS["sd3.5-medium"]
    found = plan_denoiser(shape, gpu, 1, DenoisingWork(batch=4, kl=True))
    one = 1357 * 1536  # tokens of a pass, times hidden size
    assert found.rollout == {
        "transformer": 2 * shape.parameters,
        "text encoders": 2 * 5.6e9,
        "VAE": 2 * 84e6,
        "batch": 4 * (2 * one * 76 + 21 * 16 * 64 * 64 * 4),  # two passes; 21 latents of 16 x 64 x 64
        "trainer": 16 * shape.parameters,
    }
    passes = 19 * 2  # of one sample, with guidance
    assert found.update == {
        "trainer": 16 * shape.parameters,
        "reference": 2 * shape.parameters,
        "activations": passes * one * (2 * 24 + 76),
    }
    assert found.fits and not plan_denoiser(DENOISERS["flux"], gpu, 1, DenoisingWork()).fits
    without = plan_denoiser(shape, gpu, 1, DenoisingWork(checkpointing=False))
    assert without.update["activations"] == passes * one * 76 * 24
    assert without.seconds["training"] == pytest.approx(
        found.seconds["training"] * REACH.training_recomputed / REACH.training
    )


def test_layers_that_do_not_fit_are_recomputed():
    """An H100 has 80 GB. A layer keeps 38 bytes of 38 passes x 1,357 tokens x 1,536 numbers."""
    shape, work = DENOISERS["sd3.5-medium"], DenoisingWork(checkpointing="auto")
    large, small = (plan_denoiser(shape, gpu_of(name), 1, work) for name in ("h200", "h100"))
    layer = 38 * 1357 * 1536 * 38
    assert large.recomputed == 0 and large.update["activations"] == pytest.approx(24 * layer)
    kept = int((0.9 * 80e9 - 16 * shape.parameters) / layer)
    assert 0 < kept < 24 and small.recomputed == 24 - kept
    fixed = [
        plan_denoiser(shape, gpu_of("h100"), 1, DenoisingWork(checkpointing=on)).seconds["training"]
        for on in (True, False)
    ]
    assert small.seconds["training"] == pytest.approx(fixed[1] + (fixed[0] - fixed[1]) * (24 - kept) / 24)


@pytest.mark.parametrize(("name", "passes"), [("sd3.5-medium", 2), ("flux", 1)])
def test_a_denoising_step_is_its_passes(name, passes):
    gpu, shape, work = gpu_of("h200"), DENOISERS[name], DenoisingWork()
    rate = gpu.tflops * 1e12 * REACH.prefill
    assert denoising_step_s(shape, gpu, work) == pytest.approx(passes * shape.pass_flops(512) / rate)
    speed = replica_speed(shape, gpu, work)
    pictures = 16 * (speed.per_sequence_s * work.steps)
    assert pictures == pytest.approx(16 * (20 * denoising_step_s(shape, gpu, work) + vae_s(shape, gpu, work)))
    assert speed.max_concurrent == 16 and speed.prefill_s_per_token == 2 * shape.encoder / rate
    with pytest.raises(UserError, match=r"needs \d+ GB with batch=4096; expected at most 134 GB"):
        replica_speed(shape, gpu, DenoisingWork(batch=4096))


def simulated(**changes) -> Scenario:
    facts = {"name": "pictures", "slots": 8, "gpu": "h200", "steps": 1, "prompts": 8, "samples": 16, "judges": ()}
    return Scenario.model_validate({**facts, "denoiser": {"steps": 20}, **changes})


def test_a_simulated_rollout_is_its_denoising_steps():
    """One prompt with one full batch on each of eight GPUs."""
    case = simulated(prompt_length=77, controllers=1)
    run = simulate(case, "colocated")
    speed = case.costs(1).speeds["policy"]
    expected = 20 * (speed.base_s + 16 * speed.per_sequence_s) + 77 * speed.prefill_s_per_token
    assert run.rollout_s == pytest.approx(expected, rel=0.02)
    shape, gpu, work = DENOISERS["sd3.5-medium"], gpu_of("h200"), DenoisingWork(samples=16)
    training = plan_denoiser(shape, gpu, 8, work).seconds["training"]
    switches = speed.sleep_s + speed.wake_s + speed.weights_s
    assert run.steps[0]["update_s"] == pytest.approx(training + switches)


def test_judges_of_pictures_read_their_patches():
    case = simulated(judges=[{"name": "judge", "model": "7B"}])
    assert case.read_by_judges(20) == 512 * 512 // 28**2 == 334
    assert simulated(denoiser={"picture_tokens": 9}).read_by_judges(20) == 9
    runs = {name: simulate(case, name) for name in ("dynamic", "colocated")}
    assert all(run.summary()["moves"] > 0 for run in runs.values())
    with pytest.raises(ValidationError, match="expected neither policy nor lengths"):
        simulated(policy={"model": "7B"})
    with pytest.raises(UserError, match=r"denoiser\.model dalle: expected one of"):
        simulated(denoiser={"model": "dalle"}).costs(1)


def test_the_command(capsys):
    assert main(["plan", "--denoiser", "flux", "--gpus", "8", "--prompts", "8", "--samples", "8", "--kl"]) == 0
    printed = capsys.readouterr().out
    assert "11.8B parameters, 1,536 tokens" in printed and "8 x 8 = 64 pictures of 512 x 512" in printed
    assert main(["plan", "--denoiser", "dalle", "--gpus", "1"]) == 2
    assert main(["plan", "--denoiser", "flux", "--gpus", "1", "--trained-steps", "20"]) == 2
