"""Diffusion models in `gcore plan --denoiser` and in the scenarios of `gcore simulate`: FLOPs, seconds and bytes.

    shape, pixels, text ──> tokens of a pass ──> FLOPs of a pass ──Gpu, Efficiency──┬──> plan: seconds by stage
                                                                                    ├──> ReplicaSpeed of simulations
                                     parameters, activations ──> bytes by part──────┘

A pass has 2 FLOPs per token and parameter of the matrix products, and 4 n^2 width per layer for the attention of its n
tokens to each other. Generation makes `steps` passes per sample, twice with guidance; training three times as much for
each trained step (forward and backward), at a lower rate for layers that are recomputed (Efficiency). An estimate:
the rates were measured with language models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gcore.cost.costs import ENGINE, GB, MEMORY_FRACTION, REACH, Gpu
from gcore.cost.replica_speed import ReplicaSpeed
from gcore.cost.workload import UPDATE, CostModel
from gcore.types import UserError

VAE_FLOPS = 9.6e6  # per pixel, of the decoder with 128 to 512 channels of SD3 and Flux: counted on its network
VAE_PARAMETERS = 84e6  # encoder and decoder of SD3 and Flux
STATE_BYTES = 16  # of a trained parameter: weight, gradient and two moments in float32
SERVED_BYTES = 2
LATENTS = 16 / 64 * 4  # bytes per pixel of the latents of one denoising step: 16 channels, 8 x 8 pixels, float32
MOST_ACTIVATIONS = 76.0  # of the networks below: DenoiserShape.activations
COMPILED_SHARE = 0.5  # of these, if layers are compiled: those of Stable Diffusion 3.5 medium keep 35 of 76
TEXT = 256  # tokens that a text encoder reads at least


@dataclass(frozen=True)
class DenoiserShape:
    """DenoiserShape("sd3.5-large", layers=38, hidden=2432, text=333). `per_token`: parameters of a layer that multiply
    one token, in units of hidden^2; `per_layer`: all parameters of a layer."""

    name: str
    layers: int
    hidden: int
    text: int  # tokens of the prompt that pass through the layers
    per_token: float = 12.0
    per_layer: float = 36.0  # two streams, for picture and text: 12 each, and 6 each for the condition
    singles: int = 0  # more layers with one stream: 12, and 3 for the condition
    frames: int = 1  # latent frames of a video
    encoder: float = 5.6e9  # parameters of the text encoders
    activations: float = 62.0  # bytes that a layer keeps for the backward pass, per token and hidden number
    embeds_guidance: bool = False  # guidance is an input of the network: one pass

    @property
    def parameters(self) -> float:
        return (self.per_layer * self.layers + 15.0 * self.singles) * self.hidden**2

    @property
    def depth(self) -> int:
        return self.layers + self.singles

    def tokens(self, pixels: int) -> int:
        """Of a square picture: patches of 16 x 16 pixels, and the prompt."""
        return (pixels // 16) ** 2 * self.frames + self.text

    @property
    def cost(self) -> CostModel:
        """In the units of the layout of samples: every token attends to all."""
        flops = 2 * self.per_token * self.hidden**2 * self.depth
        return CostModel(crossover=2 * flops / (4 * self.hidden * self.depth), causal=False, flops=flops)

    def pass_flops(self, pixels: int) -> float:
        return self.cost.of(self.tokens(pixels)) * self.cost.flops

    def pass_bytes(self, pixels: int, checkpointing: bool) -> float:
        """That one pass keeps for its backward pass, in bfloat16. With checkpointing: the inputs of all layers, and
        what one layer keeps."""
        one = self.tokens(pixels) * self.hidden
        if not checkpointing:
            return one * self.activations * self.depth
        return one * (SERVED_BYTES * self.depth + self.activations)


DENOISERS = {
    shape.name: shape
    for shape in (
        # 13 of its layers attend twice
        DenoiserShape("sd3.5-medium", 24, 1536, 333, per_token=13.6, per_layer=39.6, activations=76),
        DenoiserShape("sd3.5-large", 38, 2432, 333),
        DenoiserShape("flux", 19, 3072, 512, singles=38, encoder=4.9e9, activations=57, embeds_guidance=True),
        DenoiserShape("qwen-image", 60, 3072, 256, encoder=8.3e9),
        DenoiserShape("wan-1.3b", 30, 1536, 0, per_token=19.7, per_layer=19.7, frames=21),
        DenoiserShape("wan-14b", 40, 5120, 0, per_token=13.4, per_layer=13.4, frames=21),
    )
}


def shape_of(layers: int, singles: int, hidden: int) -> DenoiserShape | None:
    """One of those above, if it has these layers: its FLOPs are known."""
    asked = (layers, singles, hidden)
    return next((s for s in DENOISERS.values() if (s.layers, s.singles, s.hidden) == asked), None)


@dataclass(frozen=True)
class DenoisingWork:
    """A training step. DenoisingWork(prompts=8, samples=8, steps=20, trained=4, pixels=512)"""

    prompts: int = 8
    samples: int = 8
    steps: int = 20
    trained: int | None = None  # stochastic steps: those of a window; None: all except the last
    pixels: int = 512  # height and width
    guidance: bool = True
    kl: bool = False
    checkpointing: bool | Literal["auto"] = True  # auto: of the layers that do not fit
    batch: int = 16  # pictures that an engine denoises at the same time

    def __post_init__(self) -> None:
        if self.pixels % 16:
            raise UserError(f"--pixels {self.pixels}: expected a multiple of 16")
        if not 1 <= self.num_trained < self.steps:
            raise UserError(f"--trained-steps {self.trained}: expected 1 to --denoising-steps - 1 = {self.steps - 1}")

    @property
    def num_trained(self) -> int:
        return self.steps - 1 if self.trained is None else self.trained

    def passes(self, shape: DenoiserShape) -> int:
        """Of a denoising step."""
        return 2 if self.guidance and not shape.embeds_guidance else 1


@dataclass(frozen=True)
class DenoisingPlan:
    """Seconds of a step by stage, and bytes per GPU by part while it generates and while it trains: engine and trainer
    share the GPUs, and the engine sleeps during the update."""

    seconds: dict[str, float]
    rollout: dict[str, float]
    update: dict[str, float]
    fits: bool
    recomputed: int  # layers

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())


def plan_denoiser(shape: DenoiserShape, gpu: Gpu, gpus: int, work: DenoisingWork) -> DenoisingPlan:
    if gpus < 1:
        raise UserError(f"--gpus {gpus}: expected at least 1")
    number = work.prompts * work.samples
    seconds = {
        "text encoder": encoder_s(shape, gpu) * max(shape.text, TEXT) * (work.prompts + 1) / gpus,
        "generation": number * work.steps * denoising_step_s(shape, gpu, work) / gpus,
        "VAE": number * vae_s(shape, gpu, work) / gpus,
        **training_times(shape, gpu, gpus, work),
        "weights": gpu.collective_s(SERVED_BYTES * shape.parameters, gpu.per_node),  # within a machine
    }
    state = STATE_BYTES * shape.parameters / gpus
    rollout = {**engine_bytes(shape, work), "trainer": state}
    share = recomputed_share(shape, gpu, gpus, work)
    update = {
        "trainer": state,
        "reference": SERVED_BYTES * shape.parameters / gpus if work.kl else 0.0,
        "activations": share * sample_bytes(shape, work, True) + (1 - share) * sample_bytes(shape, work, False),
    }
    most = max(sum(rollout.values()), sum(update.values()))
    fits = most < MEMORY_FRACTION * gpu.memory_gb * GB
    return DenoisingPlan(seconds, rollout, update, fits, round(share * shape.depth))


def sample_bytes(shape: DenoiserShape, work: DenoisingWork, recomputed: bool) -> float:
    """What the passes of one sample keep, which are in one micro-batch. `auto` is for compiled layers."""
    compiled = COMPILED_SHARE if work.checkpointing == "auto" and not recomputed else 1.0
    return work.num_trained * work.passes(shape) * shape.pass_bytes(work.pixels, recomputed) * compiled


def recomputed_share(shape: DenoiserShape, gpu: Gpu, gpus: int, work: DenoisingWork) -> float:
    """Of the layers."""
    if work.checkpointing != "auto":
        return float(work.checkpointing)
    free = MEMORY_FRACTION * gpu.memory_gb * GB - STATE_BYTES * shape.parameters / gpus
    keep = int(shape.depth * free / sample_bytes(shape, work, False))
    return 1 - min(max(keep, 0), shape.depth) / shape.depth


def training_times(shape: DenoiserShape, gpu: Gpu, gpus: int, work: DenoisingWork) -> dict[str, float]:
    """Seconds of the update phase by stage, without the engines."""
    share = recomputed_share(shape, gpu, gpus, work)
    passes = work.prompts * work.samples * work.num_trained * work.passes(shape)
    flops = passes * shape.pass_flops(work.pixels)
    return {
        "preparation": gpu.compute_s(flops, REACH.logprobs, gpus) if work.kl else 0.0,
        "training": gpu.compute_s(UPDATE * flops * share, REACH.training_recomputed, gpus)
        + gpu.compute_s(UPDATE * flops * (1 - share), REACH.training, gpus),
    }


def denoising_step_s(shape: DenoiserShape, gpu: Gpu, work: DenoisingWork) -> float:
    """Seconds of one denoising step of one picture, in a batch that is limited by arithmetic."""
    return gpu.compute_s(shape.pass_flops(work.pixels) * work.passes(shape), REACH.prefill)


def vae_s(shape: DenoiserShape, gpu: Gpu, work: DenoisingWork) -> float:
    """Seconds to decode one picture or video."""
    frames = 1 if shape.frames == 1 else 4 * (shape.frames - 1) + 1
    return gpu.compute_s(VAE_FLOPS * work.pixels**2 * frames, REACH.prefill)


def encoder_s(shape: DenoiserShape, gpu: Gpu) -> float:
    """Seconds of the text encoders per token."""
    return gpu.compute_s(2 * shape.encoder, REACH.prefill)


def engine_bytes(shape: DenoiserShape, work: DenoisingWork) -> dict[str, float]:
    """Of an engine that generates. The latents of all steps stay on the GPU until a sample ends."""
    working = work.passes(shape) * shape.tokens(work.pixels) * shape.hidden * shape.activations
    latents = (work.steps + 1) * LATENTS * work.pixels**2 * shape.frames
    return {
        "transformer": SERVED_BYTES * shape.parameters,
        "text encoders": SERVED_BYTES * shape.encoder,
        "VAE": SERVED_BYTES * VAE_PARAMETERS,
        "batch": work.batch * (working + latents),
    }


def replica_speed(shape: DenoiserShape, gpu: Gpu, work: DenoisingWork) -> ReplicaSpeed:
    """A simulated engine on one GPU. A denoising step of b pictures reads the weights or computes b steps, whichever
    takes longer; as a line: the weights are the fixed part. The VAE is spread over the steps of a picture. The prefill
    is the text encoder."""
    read_s = gpu.memory_s(SERVED_BYTES * shape.parameters)
    step_s = denoising_step_s(shape, gpu, work)
    held = sum(engine_bytes(shape, work).values())
    if held > MEMORY_FRACTION * gpu.memory_gb * GB:
        raise UserError(
            f"denoiser.model={shape.name} on {gpu.name}: an engine needs {held / GB:.0f} GB with batch={work.batch}; "
            f"expected at most {MEMORY_FRACTION * gpu.memory_gb:.0f} GB (keys: denoiser.batch, gpu)"
        )
    return ReplicaSpeed(
        base_s=max(0.0, read_s - step_s) + ENGINE.step_s,
        per_sequence_s=step_s + vae_s(shape, gpu, work) / work.steps,
        prefill_s_per_token=encoder_s(shape, gpu),
        max_concurrent=work.batch,
        sleep_s=ENGINE.sleep_s,
        wake_s=ENGINE.wake_s + gpu.host_s(SERVED_BYTES * (shape.encoder + VAE_PARAMETERS)),
        weights_s=ENGINE.update_s + SERVED_BYTES * shape.parameters / (ENGINE.update_gb_s * GB),
    )


def denoiser_of(name: str, key: str = "--denoiser") -> DenoiserShape:
    if name.lower() not in DENOISERS:
        raise UserError(f"{key} {name}: expected one of {', '.join(DENOISERS)}")
    return DENOISERS[name.lower()]


def lines(shape: DenoiserShape, gpu: Gpu, gpus: int, work: DenoisingWork) -> list[str]:
    """The plan as text."""
    plan, number, edge = plan_denoiser(shape, gpu, gpus, work), work.prompts * work.samples, work.pixels
    twice = ", two passes per step (guidance)" if work.passes(shape) == 2 else ""
    return [
        f"{shape.name}: {shape.parameters / 1e9:.1f}B parameters, {shape.tokens(edge):,} tokens, "
        f"{shape.pass_flops(edge) / 1e12:.1f} TFLOP per pass",
        f"step: {work.prompts} x {work.samples} = {number} pictures of {edge} x {edge} pixels, "
        f"{work.steps} steps, {work.num_trained} of them trained{twice}",
        f"one denoising step of a picture: {1e3 * denoising_step_s(shape, gpu, work):.2f} ms; its VAE: "
        f"{1e3 * vae_s(shape, gpu, work):.2f} ms",
        f"on {gpus} x {gpu.title}: {plan.step_s:.1f} s per step, an estimate by FLOPs",
        *(f"  {name:<14}{seconds:>9.2f} s" for name, seconds in plan.seconds.items() if seconds),
        f"GB of one GPU while it generates, {work.batch} pictures at a time: {_parts(plan.rollout)}",
        f"GB while it trains on one sample per micro-batch, {plan.recomputed} of {shape.depth} layers recomputed: "
        f"{_parts(plan.update)}",
        *([] if plan.fits else [f"does not fit in {MEMORY_FRACTION:.0%} of {gpu.memory_gb:.0f} GB"]),
    ]


def _parts(sizes: dict[str, float]) -> str:
    parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in sizes.items() if size)
    return f"{parts}; sum {sum(sizes.values()) / GB:.1f}"
