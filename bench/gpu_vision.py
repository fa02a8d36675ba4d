"""A whole GRPO step of a vision-language model on one GPU: G-Core beside TRL's GRPOTrainer, on the same work.

    python bench/gpu_vision.py --json vision.json                # one H200, with vLLM
    python bench/gpu_vision.py --engine embedded --only gcore    # without vLLM (it needs torchvision for Qwen-VL)
    python bench/gpu_vision.py --cpu                             # a rehearsal with a tiny model, without vLLM

Work: the shape of Qwen2.5-VL-3B with random weights, 32 prompts with one image of 448 x 448 pixels each (256 tokens)
and 8 responses of 128 tokens; the end-of-sequence token is ignored. Rewards depend on prompt and sibling only. The
first step is not counted. Every system runs in a process of its own.

Systems:
- gcore: `gcore train` as a user starts it
- trl: GRPOTrainer with its defaults (gradient checkpointing, bfloat16 autocast), the processor of transformers with its
  image processor for Pillow, as G-Core has it. With --engine embedded and on a CPU it generates with transformers.

Columns: seconds by stage; MB through the busiest controller in a step: requests, responses and samples, and the pixels
that it decoded (a file of a dataset is decoded once per step, its tensors travel by reference).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import choose_sizes, some_of, step_rows, write_json  # noqa: E402
from bench.gpu_step import BETAS, LR, STAGES, run_recipe, total_steps, without_fingerprints  # noqa: E402
from bench.trl_steps import TrlSteps, grpo_config  # noqa: E402
from bench.worker import TARGET, add_arguments, finish, run_worker, save  # noqa: E402

TEXT = {  # hidden, intermediate, layers, heads, KV heads, vocabulary, sections of M-RoPE
    "3B": (2048, 11008, 36, 16, 2, 151_936, [16, 24, 24]),
    "tiny": (64, 128, 2, 4, 2, 64, [4, 2, 2]),
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
SYSTEMS = ("gcore", "trl")


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


def run_gcore(args: argparse.Namespace) -> None:
    here, folder = Path(__file__).resolve(), Path(tempfile.mkdtemp(prefix="run-", dir=Path(os.environ[TARGET]).parent))
    data = args.folder / f"images-{args.edge}" / "rows.jsonl"
    rows = rows_of(args)
    data.write_text(
        "".join(json.dumps({**row, "images": [Path(p).name for p in row["images"]]}) + "\n" for row in rows)
    )
    longest = args.prompt_length + image_tokens(args) + 8
    tree: dict[str, Any] = {
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

    def save_with_bytes(result: dict[str, Any]) -> None:
        of_steps = bytes_of(folder / tree["run"]["name"])
        save({**result, "steps": [{**step, **own} for step, own in zip(result["steps"], of_steps, strict=False)]})

    run_recipe(tree, folder, args, save_with_bytes)


def bytes_of(folder: Path) -> list[dict[str, float]]:
    of_row = {"payload": "controller/bytes", "pixels": "controller/media_bytes"}
    return [{name: row.get(key, 0) for name, key in of_row.items()} for row in step_rows(folder)]


def image_tokens(args: argparse.Namespace) -> int:
    return int((args.edge // TOWER[args.model][4] // 2) ** 2) + 2


# ---- TRL -------------------------------------------------------------------------------------------------------------


def run_trl(args: argparse.Namespace) -> None:
    for name, value in {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
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
    same_length = {"ignore_eos": True, "detokenize": False} if uses_vllm else {"min_new_tokens": args.tokens}
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
        steps.watch(trainer, uses_vllm)
        trainer.train()


# ---- the experiment --------------------------------------------------------------------------------------------------


def main() -> None:
    args = parse()
    if args.worker:
        return {"model": write_model, "gcore": run_gcore, "trl": run_trl}[args.worker](args)
    work = args.work or Path(tempfile.mkdtemp(prefix="gpu-vision-"))
    args.folder = args.folder or work / f"model-{args.model}"
    args.folder.mkdir(parents=True, exist_ok=True)
    names = ("model", "steps", "prompts", "siblings", "tokens", "micro", "edge", "engine", "controllers", "folder")
    arguments = [f"--{name}={getattr(args, name)}" for name in names] + [f"--prompt-length={args.prompt_length}"]
    arguments += [*(["--cpu"] if args.cpu else []), *(f"--set={override}" for override in args.set)]
    if not (args.folder / "config.json").exists():
        run_worker(__file__, "model", arguments, work, 300)
    record: dict[str, Any] = {"settings": vars(args), "systems": {}}
    for system in args.only:
        record["systems"][system] = run_worker(__file__, system, arguments, work, args.limit)
        write_json(args.json, record)
        show(record, args)  # of the systems so far: a caller may have a time limit
        sys.stdout.flush()
    finish()


def show(record: dict[str, Any], args: argparse.Namespace) -> None:
    print(
        f"Qwen2.5-VL {args.model}, {args.prompts} prompts x {args.siblings} x {args.tokens} tokens, one image of "
        f"{args.edge} x {args.edge} each, engine {args.engine}"
    )
    head = f"{'':<8}{'s/step':>9}{'best':>9}" + "".join(f"{stage:>13}" for stage in STAGES)
    print(head + f"{'start s':>9}{'payload, MB':>13}{'pixels, MB':>12}\n" + "-" * (len(head) + 34))
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
        print(
            f"{system:<8}{middle('step'):>9.2f}{min(step['step'] for step in steps):>9.2f}"
            + "".join(f"{middle(stage):>13.2f}" for stage in STAGES)
            + f"{found['start_s']:>9.0f}{bytes_text}"
            + (f"  {found['error']}" if "error" in found else "")
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=some_of(SYSTEMS), default=list(SYSTEMS), help="gcore,trl")
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
