"""A new engine is a file and a row: here both are made, and nothing else of the package is changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gcore.config import engines
from tests.e2e.helpers import environment, rows, steps, write_recipe

ENGINE = '''
"""Computes the whole sequence again for every token: a network, and nothing that is kept between two steps."""

import torch

from gcore.generation.decoding import RowTable, sample
from gcore.generation.engine_shell import DecodeBackend, Step, SteppedEngine
from gcore.generation.request_check import check_request
from gcore.generation.sleep import SleepState
from gcore.models.networks import load_model
from gcore.weights.receiver import receiver_in_process


def make_engine(spec):
    return SteppedEngine(Naive(spec), spec.open_tracer())


class Naive(DecodeBackend):
    def __init__(self, spec):
        device, dtype = spec.placed()
        tokenizer = spec.load_tokenizer(spec.model)
        self.network = load_model(spec.model, tokenizer, spec.seed, dtype, device, max_length=spec.max_length)
        self.parameters, self.max_length = dict(self.network.named_parameters()), spec.max_length
        self.max_concurrent, self.jobs = spec.serving.max_concurrent, []

    def open(self):
        return receiver_in_process(self.parameters, None), SleepState(())

    def check(self, request):
        check_request(request, self.max_length, self.network.config.vocab_size)

    def admit(self, jobs):
        self.jobs += jobs
        return ()

    @torch.inference_mode()
    def step(self):
        for job in self.jobs:
            logits = self.network(torch.tensor([[*job.content.tokens_T.tolist(), *job.tokens]])).logits[:, -1]
            row = RowTable(1)
            row.put(0, job.request)
            row.position += job.num_steps
            tokens, logprobs, _ = sample(logits, row)
            job.tokens.append(int(tokens[0]))
            job.logprobs.append(float(logprobs[0]))
        count, ended = len(self.jobs), [(job, job.finish) for job in self.jobs if job.finish]
        self.remove([job for job, _ in ended])
        return Step(count, ended)

    def remove(self, jobs):
        self.jobs = [job for job in self.jobs if job not in jobs]

    @torch.inference_mode()
    def load(self, tensors, version, last):
        for name, tensor in tensors.items():
            self.parameters[name].copy_(tensor)

    def close(self):
        self.jobs = []
'''
ROW = 'ENGINES = {\n    "naive": EngineTraits("naive_engine"),\n'
COMMAND = """
import sys, types
from pathlib import Path

table = types.ModuleType("gcore.config.engines")
sys.modules[table.__name__] = table
exec(Path("engines.py").read_text(), vars(table))
from gcore.cli import main

sys.exit(main(sys.argv[1:]))
"""


def test_a_run_with_a_new_engine(tmp_path):
    """Its logprobs are those of the trainer, also after weight updates. A misspelled name is answered with it."""
    source = Path(engines.__file__).read_text()
    assert source.count("ENGINES = {\n") == 1
    (tmp_path / "engines.py").write_text(source.replace("ENGINES = {\n", ROW))
    (tmp_path / "naive_engine.py").write_text(ENGINE)
    (tmp_path / "command.py").write_text(COMMAND)
    recipe = write_recipe(tmp_path)

    def train(*overrides: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "command.py", "train", str(recipe), "runtime=local", "run.steps=2", *overrides]
        path = os.pathsep.join([str(tmp_path), *sys.path])
        variables = environment() | {"PYTHONPATH": path}
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables, timeout=300)

    done = train("generation.engine=naive")
    assert done.returncode == 0, done.stdout + done.stderr
    trained = steps(rows(tmp_path / "runs" / "tiny"))
    assert len(trained) == 2 and all(row["rollout/logprob_diff_mean"] < 1e-5 for row in trained), trained
    assert trained[0]["response_length/mean"] > 1
    assert "'naive'" in train("generation.engine=naiv").stderr
