"""Python's share of generation, on a CPU: a decoding step of the vLLM engine by its parts, and the text of responses.

    python bench/engine_cost.py step [--sequences 32 128 256 512] [--tokens 128] [--json FILE]
    python bench/engine_cost.py text [--responses 256] [--tokens 4096]

`step`: a model of one layer and 64 dimensions, so that Python dominates. CPU time of the engine's thread, in
microseconds per sequence and step, of a batch that only decodes: `schedule` and `update` are vLLM's scheduler before
and after the model, `model` is its model runner with the sampler, `vllm` the rest of vLLM's core, `ours` is
generation/vllm.py and engine_shell.py. CPU time does not depend on other processes of the machine, except by caches.

`text`: the longest time between two turns of the event loop, which wakes every millisecond, while all responses of a
batch are decoded: by calls of `tokenizer.decode` on the event loop, by the same calls in a thread, and by
content/decoding.py. The best of five runs.
"""

from __future__ import annotations

import argparse
import asyncio
import glob
import os
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.common import write_json

PROMPT, VOCABULARY = 16, 512
PARTS = ("schedule", "update", "model", "vllm", "ours")


def write_tiny_model(folder: Path) -> Path:
    from transformers import Qwen2Config

    Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
        dtype="float32",
    ).save_pretrained(folder)
    return folder


class Clock:
    """CPU seconds of the calling thread inside of methods, each without the methods that it calls."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inside: list[str] = []
        self._since = 0.0

    def _switch(self, now: float) -> None:
        if self._inside:
            self.seconds[self._inside[-1]] += now - self._since
        self._since = now

    def wrap(self, owner: Any, method: str, part: str) -> None:
        original = getattr(owner, method)

        def timed(*args: Any, **options: Any) -> Any:
            self._switch(time.thread_time())
            self._inside.append(part)
            try:
                return original(*args, **options)
            finally:
                self._switch(time.thread_time())
                self._inside.pop()

        setattr(owner, method, timed)


def measure_step(folder: Path, num_sequences: int, tokens: int) -> dict[str, float]:
    import numpy as np

    from gcore.content.tokens import Tokens
    from gcore.generation.engine_shell import SteppedEngine
    from gcore.generation.spec import LibraryOptions
    from gcore.generation.vllm import VllmBackend
    from gcore.types import Request, SamplingParams

    options = LibraryOptions(
        num_sequences, PROMPT + tokens, dtype="float32", seeds=False, dummy=True, cpu_cache_gib=0.5
    )
    engine: Any = SteppedEngine(VllmBackend(folder, options))
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=tokens)
    requests = [
        Request(Tokens(rng.integers(10, VOCABULARY, PROMPT).astype(np.int32)), params, i) for i in range(num_sequences)
    ]
    backend, clock = engine.backend, Clock()
    core = backend.core.engine_core.engine_core
    asyncio.run(engine.generate(requests))  # imports, allocations
    for owner, method, part in (
        (core.scheduler, "schedule", "schedule"),
        (core.scheduler, "update_from_output", "update"),
        (core.model_executor, "execute_model", "model"),
        (core.model_executor, "sample_tokens", "model"),
        (backend.core.engine_core, "get_output", "vllm"),
        (backend, "step", "ours"),
        (engine, "_record", "ours"),
        (engine, "_admit", "ours"),
    ):
        clock.wrap(owner, method, part)
    decoding: list[float] = [0, 0.0]  # steps that only decode; their wall seconds
    admit, step = backend.admit, backend.step

    def admit_and_restart(jobs: Any) -> Any:
        clock.seconds.clear()  # prefill is not measured
        return admit(jobs)

    def count() -> Any:
        began = time.perf_counter()
        found = step()
        decoding[0] += found.num_tokens == num_sequences
        decoding[1] += time.perf_counter() - began
        return found

    backend.admit, backend.step = admit_and_restart, count
    asyncio.run(engine.generate(requests))
    engine.close()
    each = 1e6 / decoding[0] / num_sequences
    found = {part: clock.seconds[part] * each for part in PARTS}
    return found | {"sum": sum(found.values()), "wall": decoding[1] * each}


def steps(sequences: list[int], tokens: int) -> list[dict[str, float]]:
    rows = []
    columns = (*PARTS, "sum", "wall")
    print(f"{'sequences':>9}" + "".join(f"{column:>10}" for column in columns) + "   us per sequence and step")
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_tiny_model(Path(temporary))
        for count in sequences:
            row = measure_step(folder, count, tokens)
            print(f"{count:>9}" + "".join(f"{row[column]:>10.2f}" for column in columns), flush=True)
            rows.append({"sequences": count, **row})
    return rows


# ---- text ---------------------------------------------------------------------------------------------------------


def make_tokenizer() -> Any:
    """Byte pairs, 8,000 of them, trained on Python's own library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    files = sorted(glob.glob(sysconfig.get_paths()["stdlib"] + "/*.py"))[:60]
    library.train(files, trainers.BpeTrainer(vocab_size=8000, special_tokens=["<eos>"], show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<eos>")


async def longest_block(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of the work, and the longest time between two turns of the event loop while it runs."""
    task, longest = asyncio.ensure_future(work()), 0.0
    began = last = time.perf_counter()
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    await task
    return time.perf_counter() - began, longest


def texts(num_responses: int, tokens: int) -> list[dict[str, Any]]:
    import numpy as np

    from gcore.content.decoding import Detokenizer

    tokenizer, rng, group = make_tokenizer(), np.random.default_rng(0), 8
    decoder = Detokenizer(tokenizer)
    responses = [rng.integers(1, len(tokenizer), tokens).astype(np.int32) for _ in range(num_responses)]
    groups = [responses[i : i + group] for i in range(0, num_responses, group)]

    def decode(group: Any) -> list[str]:
        return [tokenizer.decode(ids, skip_special_tokens=True) for ids in group]

    async def on_loop(group: Any) -> list[str]:
        return decode(group)

    async def in_thread(group: Any) -> list[str]:
        return await asyncio.to_thread(decode, group)

    rows, expected = [], None
    print(f"{num_responses} responses of {tokens} tokens, in groups of {group} that end at the same time")
    for name, way in {"event loop": on_loop, "thread": in_thread, "decoding.py": decoder.texts}.items():
        results: list[Any] = []

        async def all_groups(way: Any = way, results: Any = results) -> None:
            results[:] = await asyncio.gather(*map(way, groups))

        runs = [asyncio.run(longest_block(all_groups)) for _ in range(5)]
        expected = expected or list(results)
        assert results == expected, f"{name} gives another text"
        seconds, blocked = (min(run[i] for run in runs) for i in (0, 1))
        print(f"{name:>12}: {seconds:6.3f} s, event loop blocked for at most {blocked * 1e3:8.1f} ms")
        rows.append({"way": name, "seconds": seconds, "blocked_s": blocked})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["step", "text"])
    parser.add_argument("--sequences", type=int, nargs="+", default=[32, 128, 256, 512])
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.part == "step":
        rows: list[Any] = steps(given.sequences, given.tokens or 128)
    else:
        rows = texts(given.responses, given.tokens or 4096)
    write_json(given.json, rows)


if __name__ == "__main__":
    main()
