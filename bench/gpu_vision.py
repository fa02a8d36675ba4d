"""A whole GRPO step of a vision-language model on one GPU: G-Core beside TRL's GRPOTrainer, on the same work.

    python bench/gpu_vision.py --json vision.json                # one H200, with vLLM
    python bench/gpu_vision.py --only train --profile            # training alone, without vLLM
    python bench/gpu_vision.py --engine embedded --only gcore    # without vLLM
    python bench/gpu_vision.py --cpu                             # a rehearsal with a tiny model, without vLLM

Work: the shape of Qwen2.5-VL-3B with random weights, 32 prompts with one image of 448 x 448 pixels each (256 tokens)
and 8 responses of 128 tokens; the end-of-sequence token is ignored. Rewards depend on prompt and sibling only. The
first step is not counted. Every system runs in a process of its own.

Systems:
- gcore: `gcore train` as a user starts it
- trl: GRPOTrainer with its defaults (gradient checkpointing, bfloat16 autocast), the processor of transformers with its
  image processor for Pillow, as G-Core has it. With --engine embedded and on a CPU it generates with transformers.
- train: the update of G-Core's trainer rank alone, with random responses. `preparation` is a pass without gradients
  over the same samples, which this recipe does not need. --profile prints the kernels of one update and the gaps
  between them.

Columns: seconds by stage; model FLOPs of training per second over the rate of a large matrix product that the same
command measures, and over the published rate of the GPU (MFU): of the decoder for every sample, of the head for every
step, and of the tower once per image; MB through the busiest controller in a step: requests, responses and samples, and
the pixels that it decoded (a file of a dataset is decoded once per step, its tensors travel by reference).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import choose_sizes, mfu, some_of, step_rows, write_json  # noqa: E402
from bench.gpu_step import (  # noqa: E402
    BETAS,
    LR,
    STAGES,
    measure_rate,
    run_recipe,
    total_steps,
    without_fingerprints,
)
from bench.trl_steps import TrlSteps, grpo_config  # noqa: E402
from bench.worker import TARGET, add_arguments, finish, run_worker, save, started_at  # noqa: E402

TEXT = {  # hidden, intermediate, layers, heads, KV heads, vocabulary, sections of M-RoPE
    "3B": (2048, 11008, 36, 16, 2, 151_936, [16, 24, 24]),
    "tiny": (64, 128, 2, 2, 1, 64, [8, 4, 4]),
}
TOWER = {  # hidden, intermediate, layers, heads, patch, window, layers with full attention
    "3B": (1280, 3420, 32, 16, 14, 112, [7, 15, 23, 31]),
    "tiny": (32, 48, 2, 2, 4, 16, [1]),
}
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)
SYSTEMS = ("gcore", "trl", "train")
VLLM_VARIABLES = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


# ---- the model and the work: the same for both systems ---------------------------------------------------------------


def tokenizer_of() -> Any:
    from gcore.prompts.tokenizer import build_char_tokenizer

    made = build_char_tokenizer("0123456789+=")
    made.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    made._set_model_specific_special_tokens({"image_token": SPECIAL[2], "video_token": SPECIAL[3]})
    made.chat_template = TEMPLATE
    return made


def image_settings(args: argparse.Namespace) -> dict[str, Any]:
    half, patch = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}, TOWER[args.model][4]
    edge = args.edge**2
    return {**half, "patch_size": patch, "merge_size": 2, "size": {"shortest_edge": edge, "longest_edge": edge}}


def write_model(args: argparse.Namespace) -> None:
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = tokenizer_of()
    hidden, inner, layers, heads, kv_heads, vocabulary, sections = TEXT[args.model]
    tower, tower_inner, depth, tower_heads, patch, window, full = TOWER[args.model]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    marks = ("vision_start", "vision_end", "image", "video")
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(t) for name, t in zip(marks, SPECIAL, strict=True)}
    text: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
    }
    text |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "rope_parameters": rope}
    text |= {"max_position_embeddings": 4096, "tie_word_embeddings": True}
    text |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    vision: dict[str, Any] = {
        "hidden_size": tower,
        "intermediate_size": tower_inner,
        "depth": depth,
        "num_heads": tower_heads,
    }
    vision |= {"patch_size": patch, "window_size": window, "fullatt_block_indexes": full, "out_hidden_size": hidden}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    device = "cuda" if torch.cuda.is_available() and not args.cpu else "cpu"
    with torch.device(device):
        torch.manual_seed(0)
        network = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    network.cpu().save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    (args.folder / "preprocessor_config.json").write_text(json.dumps(image_settings(args)))


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All prompts of a run, in order, with their images as files. Written once."""
    from PIL import Image

    folder, found = args.folder / f"images-{args.edge}", list[dict[str, Any]]()
    folder.mkdir(exist_ok=True)
    for number in range(total_steps(args) * args.prompts):
        file, random = folder / f"{number}.png", np.random.default_rng([5, number])
        if not file.exists():
            pixels = random.integers(0, 256, (args.edge // 8, args.edge // 8, 3), dtype=np.uint8)
            Image.fromarray(pixels.repeat(8, 0).repeat(8, 1)).save(file)
        text = "".join(random.choice(list("0123456789"), args.prompt_length))
        found.append({"prompt": text, "images": [str(file)], "answer": "0", "number": number})
    return found


def numbered(prompts: Any, completions: Sequence[Any], number: Sequence[int], **_: Any) -> list[float]:
    """Rewards that differ between siblings. The text of a random model has no meaning."""
    seen: Counter[int] = Counter()
    found = []
    for each in number:
        found.append(zlib.crc32(f"{each}/{seen[each]}".encode()) / 2**32)
        seen[each] += 1
    return found


async def whole(ctx: Any, prompt: Any) -> list[Any]:
    """G-Core's workflow: no response ends before its limit of tokens."""
    scored: list[Any] = await ctx.reward(await ctx.generate(prompt, stop_tokens=()))
    return scored


# ---- G-Core ----------------------------------------------------------------------------------------------------------


def gcore_tree(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    here = Path(__file__).resolve()
    data = args.folder / f"images-{args.edge}" / "rows.jsonl"
    rows = rows_of(args)
    data.write_text(
        "".join(json.dumps({**row, "images": [Path(p).name for p in row["images"]]}) + "\n" for row in rows)
    )
    longest = args.prompt_length + image_tokens(args) + 8
    return {
        # More steps than are made: a run that ends writes a checkpoint, which is not measured here.
        "run": {"name": "step", "dir": str(folder), "steps": total_steps(args) + 100},
        "model": {"path": str(args.folder)},
        "data": {"train": {"path": str(data)}, "shuffle": False, "max_prompt_length": longest},
        "controllers": args.controllers,
        "workflow": f"{here}:whole",
        "generation": {
            "engine": args.engine,
            "max_response_length": args.tokens,
            "max_concurrent": args.prompts * args.siblings,
        },
        "rewards": {"functions": [{"name": "numbered", "path": f"{here}:numbered"}]},
        "sampling": {"prompts_per_step": args.prompts, "samples_per_prompt": args.siblings},
        "training": {
            "device": "cpu" if args.cpu else "cuda",
            "lr": LR,
            "betas": list(BETAS),
            "max_tokens_per_gpu": args.micro * (longest + args.tokens),
        },
        "checkpoint": {"every": 0},
        "observe": {"progress": "plain", "trackers": [], "samples_per_step": 0},
        **({"placement": {"trainer": {"ranks": 1, "threads": 1}, "policy": {"replicas": 1}}} if args.cpu else {}),
    }


def run_gcore(args: argparse.Namespace) -> None:
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=Path(os.environ[TARGET]).parent))
    tree = gcore_tree(args, folder)

    def save_with_bytes(result: dict[str, Any]) -> None:
        of_steps = bytes_of(folder / tree["run"]["name"])
        save({**result, "steps": [{**step, **own} for step, own in zip(result["steps"], of_steps, strict=False)]})

    run_recipe(tree, folder, args, save_with_bytes)


def run_training(args: argparse.Namespace) -> None:
    """The updates of a trainer rank, as `gcore train` makes it, without engine and controllers."""
    import torch

    from bench.gpu_train import show_profile, synchronize
    from gcore.config.load import load_config
    from gcore.modalities.language import Language
    from gcore.observe.trace import Tracer
    from gcore.preparation.balance import make_layout
    from gcore.preparation.samples import meta_of
    from gcore.protocols import Rendezvous
    from gcore.runtime.gloo import join
    from gcore.training.rank import TrainerRank, micros_of
    from gcore.types import Topology

    folder = Path(tempfile.mkdtemp(prefix="train-", dir=Path(os.environ[TARGET]).parent))
    recipe = folder / "step.yaml"
    recipe.write_text(json.dumps(gcore_tree(args, folder)))
    config = load_config(recipe, args.set)
    device = torch.device("cpu") if args.cpu else torch.device("cuda", 0)
    join(Rendezvous(0, 1, None), "gloo" if args.cpu else "nccl", device=device)
    dtype = torch.float32 if args.cpu else torch.bfloat16
    kind = Language(config, folder / "media")
    rank = TrainerRank(config, lambda: kind.backend(Topology(1), 1, device, dtype), 0, 1, Tracer(None, "trainer-0"))
    steps, start_s = list[dict[str, Any]](), time.time() - started_at()

    async def step(number: int) -> dict[str, Any]:
        samples = samples_of(args, kind, number)
        metas, info = [meta_of(sample) for sample in samples], await rank.info()
        limits: dict[str, Any] = {"max_tokens": config.training.max_tokens_per_gpu, "padded": info.padded}
        (batch,) = make_layout(metas, step=1, num_ranks=1, mini_batches=1, cost=kind.cost_model(info), **limits)
        batch = dataclasses.replace(batch, advantages={s.key: s.reward or 0.0 for s in samples})
        await rank.push(0, samples)
        synchronize(device)
        began = time.perf_counter()
        await rank.compute(rank.backend.outputs, "policy", micros_of(batch), rank._data)
        synchronize(device)
        prepared = time.perf_counter()
        await rank.update(batch)
        synchronize(device)
        took = {"preparation": prepared - began, "training": time.perf_counter() - prepared}
        return {"counted": number > 0, "step": sum(took.values()), "generation": 0.0, "weights": 0.0, **took}

    for number in range(total_steps(args)):
        steps.append(asyncio.run(step(number)))
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
        save({"start_s": start_s, "steps": steps, "peak_gib": peak})
    if args.profile:
        show_profile(lambda: asyncio.run(step(0)))


def samples_of(args: argparse.Namespace, kind: Any, step: int) -> list[Any]:
    """Of a training step: prompts with their images, and random responses."""
    from gcore.content.tokens import Tokens
    from gcore.types import Sample

    templater, random, found = kind.templater("train"), np.random.default_rng(step), list[Any]()
    for row in rows_of(args)[step * args.prompts : (step + 1) * args.prompts]:
        prompt = templater.content(row)[2]
        for sibling, reward in enumerate(numbered(None, [None] * args.siblings, [row["number"]] * args.siblings)):
            answer = Tokens.steps(random.integers(3, 12, args.tokens).astype(np.int32))
            mask_S, logprobs_S = np.ones(args.tokens, np.bool_), np.full(args.tokens, -2.0, np.float32)
            content = prompt.extended(answer)
            found.append(Sample(row["number"], sibling, content, mask_S, logprobs_S, reward=reward - 0.5))
    return found


def training_flops(args: argparse.Namespace) -> float:
    """Model FLOPs of an update: every sample in the decoder, every image once in the tower."""
    from gcore.cost.shapes import shape_of
    from gcore.cost.workload import UPDATE

    cost = shape_of(str(args.folder)).cost
    samples, length = args.prompts * args.siblings, args.prompt_length + image_tokens(args) + 1 + args.tokens
    work = samples * (cost.of(length) + cost.head * args.tokens) + args.prompts * cost.of_medium("image", args.edge**2)
    return UPDATE * cost.flops * work


def bytes_of(folder: Path) -> list[dict[str, float]]:
    of_row = {"payload": "controller/bytes", "pixels": "controller/media_bytes"}
    return [{name: row.get(key, 0) for name, key in of_row.items()} for row in step_rows(folder)]


def image_tokens(args: argparse.Namespace) -> int:
    return int((args.edge // TOWER[args.model][4] // 2) ** 2) + 2


# ---- TRL -------------------------------------------------------------------------------------------------------------


def run_trl(args: argparse.Namespace) -> None:
    for name, value in VLLM_VARIABLES.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    without_fingerprints()
    from datasets import Dataset
    from PIL import Image
    from trl import GRPOTrainer

    from gcore.media.images import make_processor

    processor = make_processor("qwen2_5_vl", image_settings(args), {}, tokenizer_of())
    processor.chat_template = TEMPLATE
    processor.tokenizer.padding_side = "left"
    steps = TrlSteps(args.cpu, lambda number: {"counted": number > 0})
    rows = [
        {
            "prompt": [{"role": "user", "content": r["prompt"]}],
            "images": [Image.open(r["images"][0])],
            "number": r["number"],
        }
        for r in rows_of(args)
    ]
    uses_vllm = args.engine == "vllm"
    vllm: dict[str, Any] = {
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_enable_sleep_mode": False,
    }
    vllm["vllm_max_model_length"] = args.prompt_length + image_tokens(args) + 8 + args.tokens
    same_length: dict[str, Any] = {"min_new_tokens": args.tokens}
    if uses_vllm:  # a placeholder in a response would have no features; with transformers, TRL suppresses it
        no_placeholder = {processor.image_token_id: -100.0}
        same_length = {"ignore_eos": True, "detokenize": False, "logit_bias": no_placeholder}
    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = GRPOTrainer(
            model=str(args.folder),
            processing_class=processor,
            reward_funcs=numbered,
            train_dataset=Dataset.from_list(rows),
            args=grpo_config(
                folder,
                args.cpu,
                LR,
                BETAS,
                per_device_train_batch_size=args.micro,
                gradient_accumulation_steps=args.prompts * args.siblings // args.micro,
                num_generations=args.siblings,
                max_completion_length=args.tokens,
                shuffle_dataset=False,
                use_vllm=uses_vllm,
                **(vllm if uses_vllm else {}),
                generation_kwargs=same_length,
                max_steps=total_steps(args),
            ),
            callbacks=[steps.callback()],
        )
        if uses_vllm:
            vllm_side: Any = trainer.vllm_generation
            vllm_side.llm.generate = with_one_placeholder(vllm_side.llm.generate, processor.image_token_id)
            if args.cpu:  # vLLM's CPU build packs weights: they cannot be written in place
                vllm_side.sync_weights = lambda: None
        steps.watch(trainer, uses_vllm)
        trainer.train()


def with_one_placeholder(generate: Callable[..., Any], image_token: int) -> Callable[..., Any]:
    """vLLM's `LLM.generate` with one placeholder per image. TRL 1.16 passes prompts in which the processor has already
    put one per feature, and vLLM replaces the first of them by all features once more (TRL's issue 6294)."""

    def generate_with_images(prompts: list[dict[str, Any]], **rest: Any) -> Any:
        for prompt in prompts:
            tokens = prompt["prompt_token_ids"]
            before = [None, *tokens[:-1]]
            kept = [t for t, last in zip(tokens, before, strict=True) if t != image_token or last != image_token]
            prompt["prompt_token_ids"] = kept
        return generate(prompts, **rest)

    return generate_with_images


# ---- the experiment --------------------------------------------------------------------------------------------------


def main() -> None:
    args = parse()
    if args.worker:
        if args.worker == "rate":
            return measure_rate()
        return {"model": write_model, "gcore": run_gcore, "trl": run_trl, "train": run_training}[args.worker](args)
    work = args.work or Path(tempfile.mkdtemp(prefix="gpu-vision-"))
    args.folder = args.folder or work / f"model-{args.model}"
    args.folder.mkdir(parents=True, exist_ok=True)
    names = ("model", "steps", "prompts", "siblings", "tokens", "micro", "edge", "engine", "controllers", "folder")
    arguments = [f"--{name}={getattr(args, name)}" for name in names] + [f"--prompt-length={args.prompt_length}"]
    arguments += [f"--{name}" for name in ("cpu", "profile") if getattr(args, name)]
    arguments += [f"--set={override}" for override in args.set]
    if not (args.folder / "config.json").exists():
        run_worker(__file__, "model", arguments, work, 300)
    record: dict[str, Any] = {"settings": vars(args), "flops": training_flops(args), "systems": {}}
    record |= run_worker(__file__, "rate", arguments, work, 120)
    for system in args.only:
        record["systems"][system] = run_worker(__file__, system, arguments, work, args.limit)
        write_json(args.json, record)
        show(record, args)  # of the systems so far: a caller may have a time limit
        if args.profile and system == "train":
            print((work / "train.log").read_text())
        sys.stdout.flush()
    finish()


def show(record: dict[str, Any], args: argparse.Namespace) -> None:
    rate, device = record.get("rate", float("nan")), str(record.get("device"))
    print(
        f"Qwen2.5-VL {args.model}, {args.prompts} prompts x {args.siblings} x {args.tokens} tokens, one image of "
        f"{args.edge} x {args.edge} each, engine {args.engine}, {device}, matrix rate {rate / 1e12:.0f} TFLOP/s"
    )
    head = f"{'':<8}{'s/step':>9}{'best':>9}" + "".join(f"{stage:>13}" for stage in STAGES)
    head += f"{'of rate':>9}{'MFU':>8}{'start s':>9}{'payload, MB':>13}{'pixels, MB':>12}"
    print(head + "\n" + "-" * len(head))
    for system, found in record["systems"].items():
        steps = [step for step in found.get("steps", ()) if step["counted"]]
        if not steps:
            print(f"{system:<8}  no step: {found.get('error', 'unknown')}")
            continue

        def middle(name: str, steps: list[dict[str, Any]] = steps) -> float:
            return statistics.median(step[name] for step in steps)

        bytes_text = "".join(
            f"{middle(name) / 1e6:>{width}.2f}" if name in steps[0] else f"{'-':>{width}}"
            for name, width in (("payload", 13), ("pixels", 12))
        )
        flops = record["flops"] / middle("training")
        print(
            f"{system:<8}{middle('step'):>9.2f}{min(step['step'] for step in steps):>9.2f}"
            + "".join(f"{middle(stage):>13.2f}" for stage in STAGES)
            + f"{flops / rate:>9.1%}{mfu(flops, device):>8}{found['start_s']:>9.0f}{bytes_text}"
            + (f"  {found['error']}" if "error" in found else "")
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=some_of(SYSTEMS), default=["gcore", "trl"], help=",".join(SYSTEMS))
    parser.add_argument("--profile", action="store_true", help="of `train`: kernels and gaps of one update")
    parser.add_argument("--steps", type=int, default=3, help="counted steps")
    parser.add_argument("--model", choices=TEXT, default=None, help="3B; tiny with --cpu")
    parser.add_argument("--engine", choices=("vllm", "embedded"), default=None, help="vllm; embedded with --cpu")
    parser.add_argument("--controllers", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=None, help="32; 4 with --cpu")
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=None, help="of a response: 128; 8 with --cpu")
    parser.add_argument("--edge", type=int, default=None, help="of an image in pixels: 448; 32 with --cpu")
    parser.add_argument("--prompt-length", type=int, default=16, help="tokens of text")
    parser.add_argument("--micro", type=int, default=None, help="sequences per micro-batch: 32; 8 with --cpu")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for gcore, as in `gcore train`")
    add_arguments(parser)
    parser.set_defaults(limit=300)
    args = parser.parse_args()
    sizes = {"model": ("3B", "tiny"), "engine": ("vllm", "embedded"), "prompts": (32, 4), "tokens": (128, 8)}
    sizes |= {"edge": (448, 32), "micro": (32, 8)}
    choose_sizes(args, args.cpu, sizes)
    args.mix = ["fixed"]  # as bench/gpu_step.py names it
    return args


if __name__ == "__main__":
    main()
