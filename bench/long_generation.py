"""A prompt of up to 128k tokens through an engine, and the same sample through the trainer's network.

    python bench/long_generation.py --prompt 16384,131072 --response 64

A small Qwen3 with random weights (one layer, float32) answers one prompt, with two responses that share its prefill.
Printed per length: seconds until both have one token, seconds until they have all, growth of the peak memory of this
process in the engine, and the largest difference between the logprobs of engine and trainer. Seconds are those of this
machine, with one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gcore.content.tokens import Tokens  # noqa: E402
from gcore.generation.embedded import EmbeddedBackend  # noqa: E402
from gcore.generation.engine_shell import SteppedEngine  # noqa: E402
from gcore.generation.noise import noise_key  # noqa: E402
from gcore.training.logprob_model import LogprobModel, to_tensors  # noqa: E402
from gcore.types import MicroBatch, Request, Sample, SamplingParams  # noqa: E402

VOCABULARY = 64


def network_of(max_length: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=max_length,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(prompt_length: int, response: int) -> dict[str, float]:
    network = network_of(prompt_length + response)
    engine = SteppedEngine(EmbeddedBackend(network, max_concurrent=2, max_length=prompt_length + response))
    prompt = np.random.default_rng(0).integers(3, VOCABULARY, prompt_length).astype(np.int32)

    def ask(steps: int) -> list[Any]:
        params = SamplingParams(max_tokens=steps, temperature=1.0)
        return asyncio.run(engine.generate([Request(Tokens(prompt), params, noise_key(0, i)) for i in range(2)]))

    before, started = peak_mb(), time.perf_counter()
    ask(1)
    first_s, started = time.perf_counter() - started, time.perf_counter()
    found = ask(response)
    all_s = time.perf_counter() - started
    grown = peak_mb() - before
    engine.close()
    steps = found[0].content.tokens_S
    sample = Sample(
        0,
        0,
        Tokens.split(np.concatenate([prompt, steps]), len(steps)),
        np.ones(len(steps), bool),
        np.zeros(len(steps), np.float32),
    )
    width = -(-(prompt_length + response) // 32) * 32
    packed = to_tensors(MicroBatch(((sample.key,),), width), {sample.key: sample}, torch.device("cpu"))
    with torch.no_grad():
        trained, _ = LogprobModel(network).eval()(packed)
    difference = float(np.abs(trained.numpy() - found[0].logprobs_S).max())
    return {
        "prompt": prompt_length,
        "first_s": first_s,
        "all_s": all_s,
        "grown_mb": grown,
        "difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=lambda text: [int(n) for n in text.split(",")], default=[16384, 131072])
    parser.add_argument("--response", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| prompt, tokens | one token each, s | all tokens, s | memory, MB | engine - trainer logprobs |")
    print("|---:|---:|---:|---:|---:|")
    for length in args.prompt:
        row = measure(length, args.response)
        print(
            f"| {length:,} | {row['first_s']:.1f} | {row['all_s']:.1f} | {row['grown_mb']:,.0f} "
            f"| {row['difference']:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
