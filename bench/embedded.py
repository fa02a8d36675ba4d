"""Tokens per second of the embedded engine against transformers' `generate` and its continuous batching.

    python bench/embedded.py --json embedded.json
    python bench/embedded.py --learn 1000 --only "1 process"    # what speculation gains on text that repeats itself
    python bench/embedded.py --device cuda --hidden-size 1024 --intermediate-size 3072 --layers 28 --heads 16 \
        --kv-heads 8 --vocab 8000 --prompts 32 --tokens 256 --longest 512

All contenders have the same model (default: 0.9M parameters), prompts and numbers of new tokens, sampled at temperature
1, without stop tokens. Two workloads: *fixed*, all responses equally long, and *ragged*, log-normal lengths. In the
latter, `generate`, with one length per batch, runs to the longest, and only the requested tokens count. Each contender
has its own processes, is warmed up on the same workload, and runs once per round (A B C, A B C, ...). The table shows
the median and the best round. The time is from prompts to tokens, without loading and set-up.

With --learn, the model first learns to add digit by digit, and the prompts are sums. Its answers repeat each other;
those of random weights only by chance.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import write_json  # noqa: E402
from gcore.launch.machines import detect_machine  # noqa: E402

SHAPE = {"hidden_size": 128, "intermediate_size": 384, "layers": 4, "heads": 4, "kv_heads": 4}
ALPHABET = "0123456789+="


@dataclass(frozen=True)
class Job:
    """One request: continue `prompt` (token ids) by exactly `tokens` tokens."""

    prompt: tuple[int, ...]
    tokens: int
    noise_key: int


@dataclass(frozen=True)
class Contender:
    name: str
    kind: str  # a key of KINDS
    processes: int = 1
    threads: int = 1
    passive: bool = False  # OMP_WAIT_POLICY=passive: idle threads sleep immediately; better on shared cores
    logprobs: bool = False
    seeds: str = "no"
    speculates: bool = False


@dataclass(frozen=True)
class Setting:
    device: str
    build: dict[str, Any]
    rows: int
    longest: int  # prompt and response
    weights: str | None = None  # a file, if the model has learned something


# ---- contenders: each returns a function from jobs to token lists ----------------------------------------------------


def embedded(
    setting: Setting, network: Any, contender: Contender, stack: ExitStack
) -> Callable[[list[Job]], list[list[int]]]:
    from gcore.content.tokens import Tokens, tokens_of
    from gcore.generation.embedded import EmbeddedBackend
    from gcore.generation.engine_shell import SteppedEngine
    from gcore.generation.speculation import speculation_of
    from gcore.types import Request, SamplingParams

    speculation = speculation_of("suffix" if contender.speculates else "off", network)
    engine = SteppedEngine(EmbeddedBackend(network, setting.rows, setting.longest, speculation=speculation))
    stack.callback(engine.close)
    if speculation is not None:
        stack.callback(
            lambda: print(f"proposed {speculation.proposed}, accepted {speculation.accepted}", file=sys.stderr)
        )

    def run(jobs: list[Job]) -> list[list[int]]:
        requests = [
            Request(Tokens(np.array(j.prompt, np.int32)), SamplingParams(max_tokens=j.tokens), j.noise_key)
            for j in jobs
        ]
        completions = asyncio.run(engine.generate(requests))
        assert all(len(c.logprobs_S) == c.content.num_steps for c in completions)
        return [tokens_of(c.content).tokens_S.tolist() for c in completions]

    return run


def generate(
    setting: Setting, network: Any, contender: Contender, stack: ExitStack
) -> Callable[[list[Job]], list[list[int]]]:
    import torch
    from transformers import GenerationConfig

    def run(jobs: list[Job]) -> list[list[int]]:
        width = max(len(j.prompt) for j in jobs)
        tokens = torch.zeros((len(jobs), width), dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for i, job in enumerate(jobs):
            tokens[i, width - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[i, width - len(job.prompt) :] = 1
        config = GenerationConfig(
            max_new_tokens=max(j.tokens for j in jobs), do_sample=True, temperature=1.0, top_k=0, pad_token_id=0
        )
        with torch.inference_mode():
            found = network.generate(
                tokens.to(network.device), attention_mask=mask.to(network.device), generation_config=config
            ).tolist()
        return [row[width : width + job.tokens] for row, job in zip(found, jobs, strict=True)]

    return run


def continuous(
    setting: Setting, network: Any, contender: Contender, stack: ExitStack
) -> Callable[[list[Job]], list[list[int]]]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    size = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"
    page = 32
    cpu = setting.device == "cpu"
    pages: dict[str, Any] = {size: page if cpu else 256}  # older releases call it block_size
    blocks = setting.rows * (-(-setting.longest // page) + 1)
    manager = stack.enter_context(
        network.continuous_batching_context_manager(
            generation_config=GenerationConfig(
                do_sample=True,
                temperature=1.0,
                top_k=0,
                pad_token_id=0,
                eos_token_id=-1,
                max_new_tokens=setting.longest,
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                **pages,
                num_blocks=blocks if cpu else None,
                max_batch_tokens=setting.rows if cpu else None,
                max_requests_per_batch=setting.rows,
                return_logprobs=True,
            ),
        )
    )

    def run(jobs: list[Job]) -> list[list[int]]:
        names = [manager.add_request(list(j.prompt), max_new_tokens=j.tokens) for j in jobs]
        found: dict[str, list[int]] = {}
        while len(found) < len(jobs):
            result = manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError("continuous batching returned no result within 60 s")
            if result.is_finished():
                assert result.error is None, result.error
                assert len(result.logprobs) == len(result.generated_tokens)
                found[result.request_id] = list(result.generated_tokens)
        return [found[name] for name in names]

    return run


KINDS = {"embedded": embedded, "generate": generate, "continuous batching": continuous}


# ---- processes ------------------------------------------------------------------------------------------------------


def worker(pipe: Any, contender: Contender, setting: Setting) -> None:
    """Answers every list of jobs with the token lists, until it receives None."""
    import torch

    from gcore.config.base import BuildModel, Model
    from gcore.launch.build import quiet
    from gcore.models.networks import load_model, pick_device, pick_dtype
    from gcore.prompts.tokenizer import load_tokenizer

    quiet()
    torch.set_num_threads(contender.threads)
    model = Model(build=BuildModel(**setting.build))
    device = pick_device(setting.device)
    network = load_model(model, load_tokenizer(model), 0, pick_dtype("auto", device), device)
    network.generation_config.eos_token_id = None  # no response ends early
    if setting.weights is not None:
        network.load_state_dict(torch.load(setting.weights))
    with ExitStack() as stack:
        run = KINDS[contender.kind](setting, network, contender, stack)
        pipe.send(sum(p.numel() for p in network.parameters()))
        while (jobs := pipe.recv()) is not None:
            try:
                pipe.send(run(jobs))
            except BaseException as error:
                pipe.send(f"{type(error).__name__}: {error}")
                raise


class Team:
    """The processes of one contender. Groups of siblings are divided evenly, as in a run."""

    def __init__(self, contender: Contender, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")
        self.contender = contender
        self.members = []
        policy = os.environ.get("OMP_WAIT_POLICY")
        if contender.passive:
            os.environ["OMP_WAIT_POLICY"] = "passive"
        for _ in range(contender.processes):
            here, there = context.Pipe()
            process = context.Process(target=worker, args=(there, contender, setting), daemon=True)
            process.start()
            there.close()
            self.members.append((process, here))
        if contender.passive:
            os.environ.pop("OMP_WAIT_POLICY")
            if policy is not None:
                os.environ["OMP_WAIT_POLICY"] = policy
        self.parameters = max([self._answer(pipe) for _, pipe in self.members])  # all equal; waits for all processes

    def run(self, groups: list[list[Job]]) -> tuple[float, list[list[int]]]:
        """Seconds, and the tokens of each job in order."""
        shares: list[list[int]] = [[] for _ in self.members]
        loads = [0] * len(self.members)
        for number in sorted(range(len(groups)), key=lambda g: -sum(j.tokens for j in groups[g])):
            least = loads.index(min(loads))
            shares[least].append(number)
            loads[least] += sum(j.tokens for j in groups[number])
        started = time.perf_counter()
        for (_, pipe), share in zip(self.members, shares, strict=True):
            pipe.send([job for number in share for job in groups[number]])
        answers = [self._answer(pipe) for _, pipe in self.members]
        seconds = time.perf_counter() - started
        by_group: dict[int, list[list[int]]] = {}
        for share, answer in zip(shares, answers, strict=True):
            for number in share:
                by_group[number], answer = answer[: len(groups[number])], answer[len(groups[number]) :]
        return seconds, [tokens for number in range(len(groups)) for tokens in by_group[number]]

    def _answer(self, pipe: Any) -> Any:
        try:
            answer = pipe.recv()
        except EOFError:
            answer = "its process ended"
        if isinstance(answer, str):
            raise RuntimeError(f"{self.contender.name}: {answer}")
        return answer

    def close(self) -> None:
        for process, pipe in self.members:
            if process.is_alive():
                pipe.send(None)
            process.join(timeout=20)
            if process.is_alive():
                process.kill()


# ---- the experiment -------------------------------------------------------------------------------------------------


def written_sum(random: np.random.Generator) -> tuple[str, str]:
    """ "4718+1355=", "8+5+0=13+1+5+1=7+...=6073": digit by digit, with the carry, in one of two orders."""
    a, b = (str(number) for number in random.integers(1000, 10000, 2))
    carry, parts = 0, []
    for x, y in zip(a[::-1], b[::-1], strict=True):
        value = int(x) + int(y) + carry
        parts.append(f"{x}+{y}+{carry}={value}" if random.random() < 0.8 else f"{y}+{x}+{carry}={value}")
        carry = value // 10
    return f"{a}+{b}=", "+".join(parts) + f"={int(a) + int(b)}"


def learn(build: dict[str, Any], steps: int, file: Path) -> None:
    """Trains the model of this configuration on written sums, and writes its weights to the file."""
    import torch

    from gcore.config.base import BuildModel, Model
    from gcore.models.networks import load_model
    from gcore.prompts.tokenizer import load_tokenizer

    torch.set_num_threads(1)
    model, random = Model(build=BuildModel(**build)), np.random.default_rng(0)
    tokenizer = load_tokenizer(model)
    network = load_model(model, tokenizer, 0, torch.float32, torch.device("cpu")).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    for step in range(steps):
        texts = ["".join(written_sum(random)) for _ in range(32)]
        rows = [torch.tensor([1, *tokenizer.encode(text, add_special_tokens=False), 2]) for text in texts]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
        logits = network(tokens.clamp(min=0)).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"learning, step {step}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    torch.save(network.state_dict(), file)


def make_workloads(args: argparse.Namespace, vocabulary: int) -> dict[str, list[list[Job]]]:
    from gcore.generation.noise import noise_key

    random = np.random.default_rng(0)
    prompts = [
        (1, *random.integers(4, vocabulary, args.prompt_length - 1).tolist()) for _ in range(args.prompts)
    ]  # <bos>, then characters
    if args.learn:
        from gcore.config.base import BuildModel, Model
        from gcore.prompts.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(Model(build=BuildModel(alphabet=ALPHABET, max_length=64)))
        prompts = [(1, *tokenizer.encode(written_sum(random)[0], add_special_tokens=False)) for _ in prompts]
    shape = (args.prompts, args.siblings)
    lengths = {
        "fixed": np.full(shape, args.tokens),
        "ragged": np.clip(random.lognormal(np.log(args.longest / 4), 0.8, shape), 4, args.longest).astype(int),
    }
    return {
        name: [
            [Job(prompt, int(table[i, k]), noise_key(0, i, k)) for k in range(args.siblings)]
            for i, prompt in enumerate(prompts)
        ]
        for name, table in lengths.items()
    }


def make_contenders(device: str, cores: int, only: str | None) -> list[Contender]:
    ours: dict[str, Any] = {"logprobs": True, "seeds": "yes"}
    cb = "continuous batching"
    found = [
        Contender("embedded, 1 process x 1 thread", "embedded", **ours),
        Contender("embedded, 1 process, speculation", "embedded", speculates=True, **ours),
    ]
    if device == "cpu":
        found += [
            Contender(f"embedded, {cores} processes x 1 thread", "embedded", processes=cores, **ours),
            Contender("generate, 1 thread", "generate"),
            Contender(f"generate, {cores} threads", "generate", threads=cores),
            Contender(f"generate, {cores} threads, passive wait", "generate", threads=cores, passive=True),
            Contender(f"continuous batching, {cores} threads", cb, threads=cores, logprobs=True),
            Contender(
                f"continuous batching, {cores} threads, passive wait", cb, threads=cores, passive=True, logprobs=True
            ),
        ]
    else:
        found += [
            Contender("generate", "generate"),
            Contender("continuous batching", cb, logprobs=True),
        ]
    return [c for c in found if only is None or only in c.name]


def main() -> None:
    args = parse()
    if args.learn:
        args.prompt_length = 1 + len(written_sum(np.random.default_rng(0))[0])
    vocabulary = args.vocab or len(ALPHABET) + 4  # four special tokens
    alphabet = "".join(chr(0x4E00 + i) for i in range(args.vocab - 4)) if args.vocab else ALPHABET
    build = {**{name: getattr(args, name) for name in SHAPE}, "alphabet": alphabet}
    longest = args.prompt_length + max(args.tokens, args.longest)
    build["max_length"] = longest
    weights = None
    if args.learn:
        weights = str(Path(tempfile.mkdtemp(prefix="embedded-")) / "weights.pt")
        learn(build, args.learn, Path(weights))
    setting = Setting(args.device, build, args.prompts * args.siblings, longest, weights)
    workloads = make_workloads(args, vocabulary)
    cores = detect_machine().cores
    teams, results = [], []
    try:
        for contender in make_contenders(args.device, min(cores, args.cores or cores), args.only):
            print(f"starting {contender.name}", file=sys.stderr, flush=True)
            teams.append(Team(contender, setting))
        for name, groups in workloads.items():
            results += measure(name, groups, teams, args.rounds)
    finally:
        for team in teams:
            team.close()
    parameters = teams[0].parameters
    show(results, parameters, args)
    write_json(args.json, {"parameters": parameters, "cores": cores, "settings": vars(args), "results": results})


def measure(name: str, groups: list[list[Job]], teams: list[Team], rounds: int) -> list[dict[str, Any]]:
    jobs = [job for group in groups for job in group]
    tokens = sum(job.tokens for job in jobs)
    seconds: dict[str, list[float]] = {team.contender.name: [] for team in teams}
    answers: dict[str, list[list[int]]] = {}
    for number in range(rounds + 1):
        for team in teams:
            print(f"{name}, round {number}/{rounds}: {team.contender.name}", file=sys.stderr, flush=True)
            took, found = team.run(groups)
            assert [len(f) for f in found] == [job.tokens for job in jobs], f"{team.contender.name}: wrong lengths"
            if number:  # round 0 warms up
                seconds[team.contender.name].append(took)
            answers[team.contender.name] = found
    rows = []
    for team in teams:
        contender = team.contender
        _, alone = team.run(groups[:1])  # the same requests in another batch: do they get the same tokens?
        times = seconds[contender.name]
        rows.append(
            {
                "workload": name,
                **asdict(contender),
                "tokens": tokens,
                "seconds": times,
                "tokens_per_s_median": tokens / statistics.median(times),
                "tokens_per_s_best": tokens / min(times),
                "same_tokens_alone": float(
                    np.mean([a == b for a, b in zip(alone, answers[contender.name], strict=False)])
                ),
            }
        )
    return rows


def show(results: list[dict[str, Any]], parameters: int, args: argparse.Namespace) -> None:
    print(f"{parameters / 1e6:.2f}M parameters, {args.prompts} prompts x {args.siblings}, {args.device}")
    print("same alone: fraction of requests that get the same tokens when decoded in another batch")
    head = f"{'workload':9}{'contender':44}{'median tok/s':>13}{'best tok/s':>12}"
    head += f"{'logprobs':>10}{'seeds':>7}{'same alone':>12}"
    print(head + "\n" + "-" * len(head))
    for row in results:
        print(
            f"{row['workload']:9}{row['name']:44}{row['tokens_per_s_median']:13,.0f}{row['tokens_per_s_best']:12,.0f}"
            f"{'yes' if row['logprobs'] else 'no':>10}{row['seeds']:>7}{row['same_tokens_alone']:12.0%}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--cores", type=int, help="processes or threads of the many-core contenders; default: all")
    parser.add_argument("--only", help="contenders whose name contains this")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--prompt-length", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64, help="length of each response of the fixed workload")
    parser.add_argument("--longest", type=int, default=128, help="maximum length of a response of the ragged workload")
    parser.add_argument("--learn", type=int, default=0, help="steps of training before")
    parser.add_argument("--vocab", type=int, help="tokens of the vocabulary; default: 16, digits and signs")
    for name, value in SHAPE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help="of the built model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
