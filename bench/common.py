"""What several benches need: rows of a run, pages with tables, groups of processes, and shapes of models.

A bench adds the repository to `sys.path` before it imports this, because it is also called from other folders.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gcore.config.tree import Config  # noqa: E402
from gcore.cost.costs import peak_flops  # noqa: E402
from gcore.cost.shapes import SHAPES as KNOWN_SHAPES  # noqa: E402
from gcore.cost.shapes import Shape  # noqa: E402
from gcore.observe.metrics import read_rows  # noqa: E402

SHAPES = {
    **{size: KNOWN_SHAPES[size] for size in ("0.5B", "1.5B", "7B", "14B", "32B")},
    "small": Shape("small", layers=4, hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32, vocab=512),
    "tiny": Shape(
        "tiny", layers=2, hidden=64, intermediate=128, heads=2, kv_heads=1, head_dim=32, vocab=512, tied=True
    ),
    "qwen3-1.7B": Shape("qwen3-1.7B", 28, 2048, 6144, heads=16, kv_heads=8, head_dim=128, vocab=151_936, tied=True),
    "qwen3.5-2B": Shape("qwen3.5-2B", 24, 2048, 6144, heads=8, kv_heads=2, head_dim=256, vocab=248_320, tied=True),
    "qwen3.5-8B-A1B": Shape(
        "qwen3.5-8B-A1B", 24, 2048, 512, 8, 2, 256, vocab=248_320, tied=True, experts=96, active_experts=9
    ),  # with the shared expert
    "qwen3.5-tiny": Shape("qwen3.5-tiny", 4, 64, 128, heads=4, kv_heads=2, head_dim=32, vocab=512, tied=True),
}
DELTA_RULE = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
FAMILIES: dict[str, dict[str, Any]] = {  # of those that are no Qwen2: keys of config.json
    "qwen3-1.7B": {"model_type": "qwen3"},
    "qwen3.5-2B": {"model_type": "qwen3_5_text", **dict(zip(DELTA_RULE, (16, 16, 128, 128), strict=True))},
    "qwen3.5-8B-A1B": {
        "model_type": "qwen3_5_moe_text",
        **dict(zip(DELTA_RULE, (16, 16, 128, 128), strict=True)),
        **{"num_experts": 96, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    },
    "qwen3.5-tiny": {"model_type": "qwen3_5_text", **dict(zip(DELTA_RULE, (2, 2, 64, 64), strict=True))},
}


def step_rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics of the training steps of a run, so far."""
    return [row for row in read_rows(folder) if "samples_digest" in row]


def merged(*trees: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of recipes; later trees win."""
    both: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            section = isinstance(value, dict) and isinstance(both.get(key, {}), dict)
            both[key] = merged(both.get(key, {}), value) if section else value
    return both


# ---- what a bench writes ---------------------------------------------------------------------------------------------


def write_json(path: Path | str | None, value: Any) -> None:
    """`path`: of --json; None: nothing is written."""
    if path is not None:
        Path(path).write_text(json.dumps(value, indent=1, default=str) + "\n")


def markdown(head: Sequence[str], rows: Sequence[Sequence[Any]], aligned: Sequence[str] = ()) -> str:
    """A table. `aligned`: "---" or "---:" of each column."""
    lines = [head, aligned or ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace the part of a page between two marks."""
    before, rest = page.read_text().split(begin, 1)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end, 1)[1]}")


def mfu(flops_per_s: float, device: str) -> str:
    """Share of the dense bfloat16 rate that the maker of the GPU publishes; a dash if that is unknown."""
    peak = peak_flops(device)
    return f"{flops_per_s / peak:.1%}" if peak else "-"


# ---- arguments -------------------------------------------------------------------------------------------------------


def choose_sizes(args: Namespace, is_tiny: bool, sizes: Mapping[str, tuple[Any, Any]]) -> None:
    """Arguments that were not given. `sizes`: the value of each on a GPU, and in a rehearsal."""
    for name, values in sizes.items():
        if getattr(args, name) is None:
            setattr(args, name, values[is_tiny])


def some_of(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    """The type of an argument: names, joined by commas."""

    def read(text: str) -> list[str]:
        if unknown := sorted(set(text.split(",")) - set(allowed)):
            raise ArgumentTypeError(f"{unknown}: expected some of {', '.join(allowed)}")
        return text.split(",")

    return read


# ---- groups of processes ---------------------------------------------------------------------------------------------


def free_address() -> str:
    """Of this machine, with a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def run_members(member: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Call `member(rank, size, address, *args)`, each in a new process. Returns their answers, by rank."""
    context, address = multiprocessing.get_context("spawn"), free_address()
    with ProcessPoolExecutor(size, mp_context=context) as processes:
        calls = [processes.submit(member, rank, size, address, *args) for rank in range(size)]
        return [call.result() for call in calls]


# ---- models ----------------------------------------------------------------------------------------------------------


def model_config(size: str, **changes: Any) -> Any:
    """Of transformers. Its weights are made by the processes that use them."""
    from transformers import AutoConfig

    shape, family = SHAPES[size], FAMILIES.get(size, {})
    changes = {**({**family, "head_dim": shape.head_dim} if family else {}), **changes}
    return AutoConfig.for_model(
        changes.pop("model_type", "qwen2"),
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        **{"tie_word_embeddings": shape.tied, **changes},
    )


def trainer_config(**training: Any) -> Config:
    """Of a trainer rank that a bench gives its network and its samples."""
    return Config.model_validate(
        {
            "run": {"name": "bench", "steps": 100},
            "model": {"build": {"alphabet": "0123456789"}},
            "data": {"train": {"task": "arithmetic"}, "max_prompt_length": 4},
            "generation": {"max_response_length": 8},
            "rewards": {"functions": [{"name": "exact", "path": "gcore.rewarding.rules:exact_answer"}]},
            "sampling": {"prompts_per_step": 4, "samples_per_prompt": 8},
            "training": training,
        }
    )


if __name__ == "__main__":  # a part of other benches
    print(__doc__)
