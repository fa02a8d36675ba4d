"""A training step of a diffusion model on one GPU: time by stage, memory and bytes, beside a plain loop of diffusers.

    python bench/gpu_diffusion.py --json diffusion.json                  # one H200
    python bench/gpu_diffusion.py --prompts 4 --json diffusion.json      # half of the work, less than 5 minutes
    python bench/gpu_diffusion.py --tiny                                 # a rehearsal on a CPU, about a minute

Work: random weights in the shape of Stable Diffusion 3.5 medium (2.2B parameters, two CLIP text encoders, no T5, the
VAE of SD3), 8 prompts x 8 samples x 20 denoising steps at 512 x 512 pixels with guidance: two passes per step, 64
pictures in one batch. All steps but the last are stochastic and trained (--trained for a window).

- gcore: `gcore train` with runtime=local, in one process, so that functions of the engine can be timed. The first step
  is not counted: it compiles and allocates.
- plain: the same transformer, text encoders and VAE in a loop over diffusers' modules, with the same SDE, guidance and
  logprobs, and nothing else. It trains as the script of Flow-GRPO for this model does: one denoising step of a
  micro-batch after the other (--micro pictures, less if they do not fit), both halves of the guidance in one pass,
  clipped ratios of logprobs, the KL of the Gaussians (--kl), float32 weights under bfloat16 autocast, no checkpointing
  (--plain-checkpointing), clipped gradients, AdamW. It denoises with a copy in bfloat16. A short repetition comes first
  and is not counted.

Denoising is what happens between two decoded batches: network, sampler, noise, logprobs. Text encoder, VAE and files
are timed apart. Shares of the matrix rate count the FLOPs of gcore/cost/denoisers.py, three passes for a trained one,
whatever is recomputed; the rate is that of a large product of matrices in the same process. Needs diffusers. Memory:
bytes that torch has allocated, at most, while generating and while training. Bytes of controllers: requests, responses
and samples on all links, beside the bytes of the latents in files.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import choose_sizes, mfu, step_rows, write_json  # noqa: E402
from bench.worker import TARGET, finish, run_worker, save  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "sd3.5-medium": {
        "layers": 24,
        "heads": 24,
        "head": 64,
        "channels": 16,
        "dual": 13,
        "clips": [(768, 3072, 12, 12), (1280, 5120, 32, 20)],  # hidden, intermediate, layers, heads
        "joint": 4096,
        "vae": (128, 256, 512, 512),
        "positions": 384,
    },
    "tiny": {
        "layers": 2,
        "heads": 2,
        "head": 8,
        "channels": 4,
        "dual": 1,
        "clips": [(16, 16, 2, 2), (16, 16, 2, 2)],
        "joint": 32,
        "vae": (4, 4, 4, 4),
        "positions": 8,
    },
}
LEVEL, GUIDANCE, SHIFT = 0.7, 4.5, 3.0
LR, CLIP = 1e-6, 0.2


# ---- the model -------------------------------------------------------------------------------------------------------


def write_model(args: argparse.Namespace) -> None:
    """The folder of a pipeline with random weights, in the precision of the engine."""
    import torch
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
    from diffusers import StableDiffusion3Pipeline as Pipeline
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    shape, dtype, device = SHAPES[args.shape], dtype_of(args), device_of(args)
    width = shape["heads"] * shape["head"]
    tokenizer = tokenizer_in(args.folder.with_name("words"))
    torch.manual_seed(0)
    with torch.device(device):
        clips = [
            CLIPTextModelWithProjection(
                CLIPTextConfig(
                    vocab_size=len(tokenizer),
                    hidden_size=hidden,
                    intermediate_size=intermediate,
                    num_hidden_layers=layers,
                    num_attention_heads=heads,
                    projection_dim=hidden,
                    max_position_embeddings=77,
                    eos_token_id=1,
                    bos_token_id=0,
                )
            ).to(dtype)
            for hidden, intermediate, layers, heads in shape["clips"]
        ]
        transformer = SD3Transformer2DModel(
            sample_size=128,
            patch_size=2,
            in_channels=shape["channels"],
            num_layers=shape["layers"],
            attention_head_dim=shape["head"],
            num_attention_heads=shape["heads"],
            joint_attention_dim=shape["joint"],
            caption_projection_dim=width,
            pooled_projection_dim=sum(clip[0] for clip in shape["clips"]),
            out_channels=shape["channels"],
            pos_embed_max_size=shape["positions"],
            dual_attention_layers=tuple(range(shape["dual"])),
            qk_norm="rms_norm",
        ).to(dtype)
        vae = AutoencoderKL(
            block_out_channels=shape["vae"],
            layers_per_block=2,
            norm_num_groups=min(32, shape["vae"][0]),
            latent_channels=shape["channels"],
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            scaling_factor=1.5305,
            shift_factor=0.0609,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ).to(dtype)
    Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae,
        text_encoder=clips[0],
        tokenizer=tokenizer,
        text_encoder_2=clips[1],
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    ).save_pretrained(args.folder)
    save({"parameters": sum(p.numel() for p in transformer.parameters())})


def tokenizer_in(folder: Path) -> Any:
    from transformers import CLIPTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77)


def device_of(args: argparse.Namespace) -> str:
    return "cpu" if args.tiny else "cuda"


def dtype_of(args: argparse.Namespace) -> Any:
    import torch

    return torch.float32 if args.tiny else torch.bfloat16


def prompts_of(args: argparse.Namespace, step: int = 0) -> list[str]:
    """Others at every step: an engine encodes a prompt once."""
    words = ("cat", "dog", "sun", "tree", "house", "boat", "bird", "lamp")
    return [f"a picture of a {words[i % 8]} number {step} {i}" for i in range(args.prompts)]


def about_device(device: str) -> dict[str, Any]:
    """Its name and matrix rate, and the library of its attention."""
    import torch
    from torch.nn.attention import SDPBackend

    from bench.gpu_train import device_name, matrix_rate

    place, dtype = torch.device(device), torch.bfloat16 if device == "cuda" else torch.float32
    heads = torch.zeros(2, 24, 1024, 64, device=place, dtype=dtype, requires_grad=True)
    attention = SDPBackend(torch._fused_sdp_choice(heads, heads, heads)).name.lower()
    return {"device": device_name(place), "matrix rate": matrix_rate(place), "attention": attention}


class Clock:
    """Seconds of functions, with the device idle before and after."""

    def __init__(self, device: str) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._device = device

    def now(self) -> float:
        import torch

        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapped(*values: Any, **named: Any) -> Any:
            started = self.now()
            try:
                return function(*values, **named)
            finally:
                self.seconds[name] += self.now() - started

        return wrapped


def peak_gb(device: str) -> float:
    """Since the last call."""
    import torch

    if device == "cpu":
        return float("nan")
    found = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return found


# ---- the plain loop --------------------------------------------------------------------------------------------------


def run_plain(args: argparse.Namespace) -> None:
    import torch
    from diffusers import StableDiffusion3Pipeline

    device, dtype, clock = device_of(args), dtype_of(args), Clock(device_of(args))
    about = about_device(device)
    absent: Any = dict.fromkeys(("text_encoder_3", "tokenizer_3", "image_encoder", "feature_extractor"))
    pipe = StableDiffusion3Pipeline.from_pretrained(
        str(args.folder), torch_dtype=dtype, local_files_only=True, **absent
    ).to(device)
    trained = copy.deepcopy(pipe.transformer).float().train()
    reference = copy.deepcopy(pipe.transformer) if args.kl else None
    if args.plain_checkpointing:
        trained.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(trained.parameters(), LR, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda")
    found: list[dict[str, float]] = []
    for repetition in range(args.steps + 1):
        clock.seconds.clear()
        peak_gb(device)
        only = 2 if repetition == 0 else args.denoising_steps  # the first one is short
        with torch.inference_mode():
            embeds, pooled = clock.timed("text encoder", plain_encode)(pipe, args)
            states, logprobs = clock.timed("denoising", plain_denoise)(pipe.transformer, embeds, pooled, args, only)
            pictures = clock.timed("VAE", plain_decode)(pipe.vae, states[-1])
        generating = peak_gb(device)
        scores = torch.tensor([float(picture.mean()) for picture in pictures], device=device)
        scores = scores.view(args.prompts, args.samples)
        advantages = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)).flatten()
        steps = range(len(logprobs))[-args.trained or None :]
        work = (torch.stack(states).clone(), torch.stack(logprobs).clone(), embeds.clone(), pooled.clone(), advantages)
        del states, logprobs, embeds, pooled, pictures
        args.micro = clock.timed("training", plain_train)(trained, reference, optimizer, work, steps, args)
        weights = [list(network.parameters()) for network in (pipe.transformer, trained)]
        with torch.no_grad():
            clock.timed("weights", torch._foreach_copy_)(*weights)
        memory = {"generating GB": generating, "training GB": peak_gb(device), "micro-batch": args.micro}
        found.append({**clock.seconds, **memory, "step": sum(clock.seconds.values())})
        save({**about, "steps": found[1:]})


def plain_encode(pipe: Any, args: argparse.Namespace) -> tuple[Any, Any]:
    """For every sample: without the prompt, then with it."""
    import torch

    device = pipe.transformer.device
    parts: list[tuple[Any, Any]] = []
    for text in ("", *prompts_of(args)):
        embeds, _, pooled, _ = pipe.encode_prompt(text, None, None, device=device, do_classifier_free_guidance=False)
        parts.append((embeds, pooled))
    rows = [0] * (args.prompts * args.samples) + [1 + i for i in range(args.prompts) for _ in range(args.samples)]
    return torch.cat([parts[i][0] for i in rows]), torch.cat([parts[i][1] for i in rows])


def plain_sigmas(args: argparse.Namespace) -> list[float]:
    import torch

    even = torch.linspace(1, 0, args.denoising_steps + 1, dtype=torch.float64)
    return list((SHIFT * even / (1 + (SHIFT - 1) * even)).tolist())


def plain_velocity(network: Any, x: Any, s: float, embeds: Any, pooled: Any, dtype: Any) -> Any:
    """With guidance. `embeds`, `pooled`: without the prompt, then with it."""
    import torch

    times = torch.full((2 * len(x),), 1000 * s, device=x.device)
    found = network(
        hidden_states=torch.cat([x, x]).to(dtype),
        timestep=times,
        encoder_hidden_states=embeds,
        pooled_projections=pooled,
        return_dict=False,
    )[0].float()
    empty, prompted = found.chunk(2)
    return empty + GUIDANCE * (prompted - empty)


def plain_gaussian(x: Any, v: Any, s: float, following: float, second: float) -> tuple[Any, float]:
    """Mean and standard deviation of a step of Flow-GRPO's SDE."""
    ds, inside = following - s, s if s < 1 else second
    g2 = LEVEL**2 * inside / (1 - inside)
    mean = x * (1 + g2 / (2 * s) * ds) + v * (1 + g2 * (1 - s) / (2 * s)) * ds
    return mean, (-g2 * ds) ** 0.5


def plain_logprob(x: Any, mean: Any, std: float) -> Any:
    """Without constants."""
    return (-((x - mean) ** 2) / (2 * std**2)).flatten(1).mean(1)


def plain_denoise(
    network: Any, embeds: Any, pooled: Any, args: argparse.Namespace, only: int
) -> tuple[list[Any], list[Any]]:
    """The latents before and after each of the first `only` steps, and the logprobs of the stochastic ones."""
    import torch

    number, side = args.prompts * args.samples, args.pixels // 8
    sigmas = plain_sigmas(args)
    x = torch.randn(number, SHAPES[args.shape]["channels"], side, side, device=embeds.device)
    states, logprobs = [x], list[Any]()
    for i, (s, following) in itertools.islice(enumerate(itertools.pairwise(sigmas)), only):
        v = plain_velocity(network, x, s, embeds, pooled, embeds.dtype)
        if i == args.denoising_steps - 1:
            x = x + v * (following - s)
        else:
            mean, std = plain_gaussian(x, v, s, following, sigmas[1])
            x = mean + std * torch.randn_like(x)
            logprobs.append(plain_logprob(x, mean, std))
        states.append(x)
    torch.stack(logprobs).cpu()
    return states, logprobs


def plain_train(
    network: Any, reference: Any, optimizer: Any, work: tuple[Any, ...], steps: Sequence[int], args: argparse.Namespace
) -> int:
    """One update of all pictures. Returns the size of micro-batches: half of it, until one fits."""
    import torch

    while True:
        try:
            plain_backward(network, reference, work, steps, args)
            break
        except torch.OutOfMemoryError:
            if args.micro == 1:
                raise
        args.micro //= 2  # here the error no longer holds its tensors
        optimizer.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return int(args.micro)


def plain_backward(
    network: Any, reference: Any, work: tuple[Any, ...], steps: Sequence[int], args: argparse.Namespace
) -> None:
    import torch

    states, logprobs, embeds, pooled, advantages = work
    number, sigmas, device = len(advantages), plain_sigmas(args), embeds.device
    for chosen in torch.randperm(number, device=device).split(args.micro):
        both = torch.cat([chosen, number + chosen])
        condition = embeds[both], pooled[both]
        for i in steps:
            x, after, s = states[i][chosen], states[i + 1][chosen], sigmas[i]
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                v = plain_velocity(network, x, s, *condition, embeds.dtype)
            mean, std = plain_gaussian(x, v, s, sigmas[i + 1], sigmas[1])
            ratio = torch.exp(plain_logprob(after, mean, std) - logprobs[i][chosen])
            gain = advantages[chosen]
            loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - CLIP, 1 + CLIP)).sum()
            if reference is not None:
                with torch.no_grad():
                    v = plain_velocity(reference, x, s, *condition, embeds.dtype)
                other, _ = plain_gaussian(x, v, s, sigmas[i + 1], sigmas[1])
                loss = loss + args.kl * ((mean - other) ** 2).flatten(1).mean(1).sum() / (2 * std**2)
            (loss / (number * len(steps))).backward()


def plain_decode(vae: Any, latents: Any) -> Any:
    import torch

    scaled = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
    return torch.cat([vae.decode(part, return_dict=False)[0].float().cpu() for part in scaled.split(8)])


# ---- G-Core ----------------------------------------------------------------------------------------------------------


def reward(images: Any, prompts: Any, **_: Any) -> list[float]:
    """Differs between siblings. A random model's pictures have no meaning."""
    return [float(image.mean()) + i for i, image in enumerate(images)]


def run_gcore(args: argparse.Namespace) -> None:
    from bench.gpu_train import show_profile
    from gcore.config.load import load_config
    from gcore.content import media
    from gcore.diffusion.pipelines import PipelineDenoiser
    from gcore.driver.supervise import run
    from gcore.generation.diffusion import DiffusionBackend
    from gcore.protocols import UpdateStats
    from gcore.training.denoise_model import LayersThatFit
    from gcore.training.rank import TrainerRank
    from gcore.training.state import TrainedName
    from gcore.types import TrainBatch

    device = device_of(args)
    clock, peaks, about, updates = Clock(device), dict[str, float](), about_device(device), itertools.count(1)
    watched: list[tuple[Any, str, str]] = [
        (PipelineDenoiser, "encode", "text encoder"),
        (PipelineDenoiser, "decode", "VAE"),
        (DiffusionBackend, "step", "engine steps"),
        (media, "store", "files"),
    ]
    for owner, name, part in watched:
        setattr(owner, name, clock.timed(part, getattr(owner, name)))
    train = TrainerRank._train

    def measured(self: TrainerRank, network: TrainedName, batch: TrainBatch) -> UpdateStats:
        peaks["generating GB"] = max(peaks.get("generating GB", 0.0), peak_gb(device))
        if args.profile and next(updates) == args.steps + 1:  # the last of the counted steps
            found: list[UpdateStats] = []
            show_profile(lambda: found.append(train(self, network, batch)))
            (stats,) = found
        else:
            stats = train(self, network, batch)
        peaks["training GB"] = max(peaks.get("training GB", 0.0), peak_gb(device))
        return stats

    begin = LayersThatFit.begin

    def counted(self: LayersThatFit, num_rows: int) -> None:
        begin(self, num_rows)
        peaks["layers recomputed"] = max(peaks.get("layers recomputed", 0.0), self.recomputed)

    TrainerRank._train = measured  # type: ignore[method-assign]
    LayersThatFit.begin = counted  # type: ignore[method-assign]
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=Path(os.environ[TARGET]).parent))
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps(tree_of(args, folder)))  # JSON is YAML
    config = load_config(recipe, args.set)
    watch = threading.Thread(target=watch_run, args=(config.run.folder, args, clock, peaks, about), daemon=True)
    watch.start()
    run(config)


def watch_run(
    run: Path, args: argparse.Namespace, clock: Clock, peaks: dict[str, float], about: dict[str, Any]
) -> None:
    """Saves every step when it is there. Ends the process after the last: a run that ends writes a checkpoint."""
    found, before = list[dict[str, float]](), dict[str, float]()
    while len(found) <= args.steps:
        time.sleep(0.02 if args.tiny else 0.2)
        rows = step_rows(run)
        if len(rows) > len(found):
            row, now = rows[len(found)], dict(clock.seconds)
            spent = {name: now[name] - before.get(name, 0.0) for name in now}
            before = now
            found.append(step_of(row, spent, run, args) | peaks)
            save({**about, "first step": found[0], "steps": found[1:]})
    os._exit(0)


def step_of(row: dict[str, Any], spent: dict[str, float], run: Path, args: argparse.Namespace) -> dict[str, float]:
    """`spent`: seconds of functions since the last step; the engine decodes inside of its last step."""
    versions = sorted(path for path in (run / "latents" / "engine-0").iterdir() if path.name.isdigit())
    sizes = [path.stat().st_size for path in versions[-1].iterdir()] if versions else []
    stages = {stage: row.get(f"timing_s/{stage}", 0.0) for stage in ("rollout", "preparation", "training", "weights")}
    return {
        "denoising": spent.get("engine steps", 0.0) - spent.get("VAE", 0.0),
        **{name: spent.get(name, 0.0) for name in ("text encoder", "VAE", "files")},
        **stages,
        "step": sum(stages.values()),
        "logprob difference": row["rollout/logprob_diff_mean"],
        "controllers MB": sum(value for name, value in row.items() if name.startswith("link/")),
        "latents MB": sum(sizes) / 1e6,
    }


def tree_of(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    data = folder / "prompts.jsonl"
    texts = [text for step in range(args.steps + 2) for text in prompts_of(args, step)]
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    denoising: dict[str, Any] = {
        "steps": args.denoising_steps,
        "noise_level": LEVEL,
        "guidance_scale": GUIDANCE,
        "shift": SHIFT,
        "height": args.pixels,
        "width": args.pixels,
    }
    if args.trained:
        denoising["window"] = {"size": args.trained}
    return {
        "run": {"name": "step", "dir": str(folder), "steps": args.steps + 2},
        "model": {"path": str(args.folder)},
        "data": {"train": {"path": str(data)}, "shuffle": False, "max_prompt_length": 128},
        "runtime": "local",
        "controllers": 1,
        "generation": {"denoising": denoising, "max_concurrent": args.prompts * args.samples},
        "rewards": {"functions": [{"name": "bright", "path": f"{Path(__file__).resolve()}:reward"}]},
        "sampling": {"prompts_per_step": args.prompts, "samples_per_prompt": args.samples},
        "algorithm": {"kl_coef": args.kl, "kl_estimator": "exact", "clip_ratio_low": CLIP, "clip_ratio_high": CLIP},
        "training": {"lr": LR, "device": device_of(args)},
        "checkpoint": {"every": 0},
        "observe": {"progress": "plain", "trackers": [], "samples_per_step": 0},
        "placement": {"trainer": {"ranks": 1, **({"threads": 1} if args.tiny else {})}, "policy": {"replicas": 1}},
    }


# ---- the experiment --------------------------------------------------------------------------------------------------

WORKERS = {"model": write_model, "plain": run_plain, "gcore": run_gcore}
LIMITS = {"model": 120, "plain": 300, "gcore": 420}  # gcore: start, compilation, two steps


def flops_of(args: argparse.Namespace) -> dict[str, float]:
    """Of a step, by part."""
    from gcore.cost.denoisers import DENOISERS, DenoiserShape

    shape = SHAPES[args.shape]
    cost = DENOISERS.get(args.shape) or DenoiserShape(args.shape, shape["layers"], shape["heads"] * shape["head"], 333)
    passes = 2 * args.prompts * args.samples * cost.pass_flops(args.pixels)
    trained = args.trained or args.denoising_steps - 1
    return {"denoising": args.denoising_steps * passes, "training": 3 * trained * passes}


def show(record: dict[str, Any], args: argparse.Namespace) -> None:
    number, flops = args.prompts * args.samples, flops_of(args)
    print(
        f"{args.shape}: {record['model'].get('parameters', 0) / 1e6:,.1f}M parameters, {number} pictures of "
        f"{args.pixels} x {args.pixels} pixels, {args.denoising_steps} steps"
    )
    best = dict[str, dict[str, float]]()
    for name in ("plain", "gcore"):
        part = record.get(name, {})
        if not part.get("steps"):
            print(f"{name}: no step: {part.get('error', 'not run')}")
            continue
        row = best[name] = min(part["steps"], key=lambda step: float(step["step"]))
        rates = {stage: flops[stage] / row[stage] for stage in flops}
        shares = ", ".join(
            f"{stage} {rate / part['matrix rate']:.1%} of the matrix rate, MFU {mfu(rate, part['device'])}"
            for stage, rate in rates.items()
        )
        print(
            f"{name}: {number * args.denoising_steps / row['denoising']:,.1f} denoising steps of a picture per second; "
            f"{shares}; {part['device'] or 'CPU'}, {part['matrix rate'] / 1e12:,.3g} TFLOP/s, {part['attention']}; "
            "seconds, GB and MB of this step:"
        )
        print("  " + ", ".join(f"{key} {value:.3g}" for key, value in row.items()))
        if first := part.get("first step"):
            stages = ("rollout", "training", "step")
            print("  the first step: " + ", ".join(f"{stage} {first[stage]:.3g}" for stage in stages))
    if len(best) == 2:
        ratios = (f"{key} {best['plain'][key] / best['gcore'][key]:.2f}" for key in ("denoising", "training", "step"))
        print(f"times as fast as the plain loop: {', '.join(ratios)}")


def main() -> None:
    args = parse()
    if args.worker:
        return WORKERS[args.worker](args)
    work = args.work or Path(tempfile.mkdtemp(prefix="gpu-diffusion-"))
    args.folder = args.folder or work / f"model-{args.shape}"
    names = ("prompts", "samples", "denoising_steps", "trained", "pixels", "steps", "folder", "micro", "kl")
    arguments = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    given = (name for name in ("tiny", "plain_checkpointing", "profile") if getattr(args, name))
    flags = (f"--{name.replace('_', '-')}" for name in given)
    arguments += [*flags, *(f"--set={override}" for override in args.set)]
    record: dict[str, Any] = {"settings": {**vars(args)}}
    for name in ("model", "plain", "gcore"):
        if name == "model" and (args.folder / "model_index.json").exists():
            record[name] = {}
            continue
        if name == "model" or name in args.only:
            record[name] = run_worker(__file__, name, arguments, work, LIMITS[name] * (4 if args.tiny else 1))
        write_json(args.json, record)
        if "error" in record["model"]:
            sys.exit("the model could not be written")
        if name in args.only:  # of the parts so far: a caller may have a time limit
            show(record, args)
            sys.stdout.flush()
    finish()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on a CPU")
    parser.add_argument("--only", nargs="+", choices=["plain", "gcore"], default=["plain", "gcore"])
    parser.add_argument("--prompts", type=int, help="8; 2 with --tiny")
    parser.add_argument("--samples", type=int, help="8; 4 with --tiny")
    parser.add_argument("--denoising-steps", type=int, help="20; 6 with --tiny")
    parser.add_argument("--trained", type=int, default=0, help="a window of trained steps; 0: all except the last")
    parser.add_argument("--pixels", type=int, help="512; 32 with --tiny")
    parser.add_argument("--steps", type=int, default=1, help="counted training steps; one more is made before them")
    parser.add_argument("--kl", type=float, default=0.0, help="weight of the KL to the first policy")
    parser.add_argument("--micro", type=int, default=8, help="plain: pictures of a micro-batch")
    parser.add_argument("--plain-checkpointing", action="store_true", help="plain: recompute all layers")
    parser.add_argument("--profile", action="store_true", help="gcore: the kernels of the last training, in gcore.log")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="overrides the recipe")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path, help="folder for models, logs and runs; default: a new one")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=list(WORKERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = {"prompts": (8, 2), "samples": (8, 4), "denoising_steps": (20, 6), "pixels": (512, 32)}
    choose_sizes(args, args.tiny, sizes)
    args.shape = "tiny" if args.tiny else "sd3.5-medium"
    return args


if __name__ == "__main__":
    main()
