"""Bytes that ranks send when they share a row of samples (gcore/training/context.py), counted, against the formula.

    python bench/context.py --tokens 2048 --json context.json

One micro-batch of three packed samples is trained by 1, 2 and 4 processes on this CPU (gloo, float32), with Ulysses and
with ring attention: forward and backward pass, without optimizer. A process sends, per layer, with k ranks, L tokens
per rank, H query heads, G key heads, size D of a head, and E bytes per element:

    ulysses  forward   2 (H + m) L D E (k - 1) / k     queries, keys and values, then outputs; m = lcm(G, k) key heads
             backward  the same
    ring     forward   2 G L D E (k - 1)               keys and values pass k - 1 times
             backward  2 G L D (E + 4) (k - 1)         keys and values again, and their gradients in float32

With activation checkpointing the forward pass counts twice. The bench fails if a count differs from the formula, or if
the loss differs from that of one process. `seconds` is the time of one step on this machine, whose processes share its
cores: it compares nothing but the cost of running the code.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import markdown, run_members, trainer_config, write_json  # noqa: E402
from gcore.content.tokens import Tokens  # noqa: E402
from gcore.protocols import Rendezvous  # noqa: E402
from gcore.runtime.gloo import join  # noqa: E402
from gcore.training import objective  # noqa: E402
from gcore.training.backend import NewNetwork  # noqa: E402
from gcore.training.context import padding_of  # noqa: E402
from gcore.training.fsdp import FsdpBackend  # noqa: E402
from gcore.training.objective import StepData  # noqa: E402
from gcore.types import MicroBatch, MiniBatch, Sample  # noqa: E402

LAYERS, HEAD_SIZE, ELEMENT = 2, 16, 4
CASES = [  # ranks, method, query heads, key heads, activation checkpointing
    (1, "ulysses", 8, 2, False),
    *((k, method, 8, 2, False) for k in (2, 4) for method in ("ulysses", "ring")),
    (4, "ulysses", 8, 8, False),
    (4, "ring", 8, 8, False),
    (4, "ring", 8, 2, True),
]


class SentBytes:
    """Bytes that this process sends to others by all-to-all and from rank to rank, while the block runs."""

    def __enter__(self) -> SentBytes:
        self.total, self._plain = 0, (dist.all_to_all_single, dist.batch_isend_irecv)

        def all_to_all(received: torch.Tensor, sent: torch.Tensor, group: Any) -> None:
            size = dist.get_world_size(group)
            self.total += sent.nbytes * (size - 1) // size
            self._plain[0](received, sent, group=group)

        def pass_on(ops: list[dist.P2POp]) -> Any:
            self.total += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
            return self._plain[1](ops)

        self._set(all_to_all, pass_on)
        return self

    def __exit__(self, *error: object) -> None:
        self._set(*self._plain)

    @staticmethod
    def _set(all_to_all: Any, pass_on: Any) -> None:
        dist.all_to_all_single, dist.batch_isend_irecv = all_to_all, pass_on


def formula(k: int, method: str, heads: int, key_heads: int, checkpointing: bool, tokens: int) -> int:
    """Bytes that a rank sends in one step. `tokens`: of the padded row."""
    part, forwards = tokens // k * HEAD_SIZE, 2 if checkpointing else 1
    if method == "ulysses":
        once = 2 * (heads + math.lcm(key_heads, k)) * part * ELEMENT * (k - 1) // k
        return LAYERS * once * (forwards + 1)
    once = 2 * key_heads * part * (k - 1)
    return LAYERS * once * (forwards * ELEMENT + ELEMENT + 4)


def network_of(heads: int, key_heads: int, tokens: int) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=HEAD_SIZE,
        max_position_embeddings=tokens,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def samples_of(tokens: int) -> list[Sample]:
    """Three quarters, a fifth, and the rest of the tokens; the second half of each is the response."""
    lengths = [tokens * 3 // 4, tokens // 5]
    rng, found = np.random.default_rng(0), []
    for i, length in enumerate([*lengths, tokens - sum(lengths)]):
        numbers = rng.integers(4, 64, length).astype(np.int32)
        steps = length // 2
        found.append(Sample(i, 0, Tokens.split(numbers, steps), np.ones(steps, bool), np.zeros(steps, np.float32)))
    return found


def run_case(case: tuple[int, str, int, int, bool], tokens: int) -> dict[str, Any]:
    k, method, heads, key_heads, checkpointing = case
    samples = samples_of(tokens)
    config = trainer_config(context_attention=method, activation_checkpointing=checkpointing)
    policy = NewNetwork(lambda: network_of(heads, key_heads, tokens))
    backend = FsdpBackend(config, {"policy": policy}, torch.device("cpu"), torch.float32)
    micro = MicroBatch((tuple(s.key for s in samples),), tokens, k)
    mini = MiniBatch((micro,), sum(s.num_steps for s in samples), len(samples))
    data, loss = StepData({s.key: s for s in samples}), objective.demonstrations(mini)
    start = time.perf_counter()
    with SentBytes() as sent:
        metrics = backend.forward_backward((micro,), data, loss)
    seconds = time.perf_counter() - start
    multiple = padding_of(k, "ring" if method == "ring" else "ulysses")
    padded = sum(-(-s.content.size // multiple) * multiple for s in samples)
    dist.barrier()
    return {
        "ranks": k,
        "method": method if k > 1 else "-",
        "query heads": heads,
        "key heads": key_heads,
        "checkpointing": checkpointing,
        "sent": sent.total,
        "formula": formula(*case, padded),
        "loss": round(metrics["sft/loss"].total * k, 6),
        "seconds": round(seconds, 2),
    }


def member(rank: int, size: int, address: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    join(Rendezvous(rank, size, address), "gloo", timeout_s=600)
    return [run_case(case, args.tokens) for case in CASES if case[0] == size]


def run_world(size: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    first, *others = run_members(member, size, args)
    for rows in (first, *others):
        for row, own in zip(rows, first, strict=True):
            assert row["sent"] == row["formula"] == own["sent"], f"sent {row['sent']}, formula {row['formula']}"
    return list(first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = sorted({case[0] for case in CASES})
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--ranks", type=int, nargs="+", choices=sizes, default=sizes, help="processes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [row for size in args.ranks for row in run_world(size, args)]
    alone = rows[0]["loss"]
    for row in rows:
        same = (row["query heads"], row["key heads"]) == (rows[0]["query heads"], rows[0]["key heads"])
        assert not same or abs(row["loss"] - alone) < 1e-5, f"loss {row['loss']}, of one process {alone}"
    print(markdown(list(rows[0]), [list(row.values()) for row in rows]))
    write_json(args.json, {"tokens": args.tokens, "rows": rows})


if __name__ == "__main__":
    main()
