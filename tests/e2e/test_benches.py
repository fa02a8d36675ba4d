"""Every bench answers --help and can be rehearsed on a CPU, in seconds and with sizes that show nothing.

A new file in bench/ needs a row in REHEARSALS, or in PARTS if other benches import it and it has no command."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bench.hosts import why_not

ROOT = Path(__file__).parents[2]
BENCHES = sorted(path.stem for path in (ROOT / "bench").glob("*.py"))
PARTS = (
    "common",
    "control_costs",
    "control_planes",
    "control_roles",
    "layouts",
    "soak_run",
    "staged",
    "trl_steps",
    "virtual_loop",
    "worker",
)
TINY_SHAPE = "--hidden 32 --intermediate 64 --heads 2"
REHEARSALS = {  # arguments; several rows of them if one does not reach all parts; {here}: a folder of the test
    "algorithms": ["--rehearse --algorithms grpo ppo --folder {here}"],
    "balance": ["--seeds 1 --ranks 2 --cpu-ranks 2 --rounds 1 --run-tokens 16"],
    "bias": ["--seeds 1 --steps 2 --skip 1 --controllers 2 --groups 4 --tokens 16 --most-tokens 64 --sigma 0.01"],
    "checkpoint": [
        f"{TINY_SHAPE} --layers 1 --steps 4 --intervals 1 2 --rollout-s 0.1 --folder {{here}}/saves",
        "--model tiny --steps 6 --rollout-s 0.1 --offload optimizer --discard --folder {here}/saves",
    ],
    "collectives": ["--sizes 4 --processes 2 --rounds 2"],
    "context": ["--ranks 1 2 --tokens 64"],
    "control_model": ["--rows {here}/rows.json"],
    "controllers": ["--quick --only video --engines 4"],
    "embedded": ["--rounds 1 --cores 2 --prompts 2 --siblings 2 --tokens 4 --longest 8"],
    "emulation": ["{here}/scenario.yaml --steps 1 --policy-slots 1"],
    "engine_cost": ["text --responses 16 --tokens 64", "step --sequences 2 --tokens 4"],
    "gpu_algorithms": ["--model tiny --steps 1 --tasks gcd --folder {here}"],
    "gpu_decode": ["--cpu --only llm,vllm --engines 1 --sizes 4 --rounds 1 --tokens 8 --work {here}"],
    "gpu_diffusion": ["--tiny --work {here}"],
    "gpu_engines": ["--sizes tiny --count 4 --tokens 8 --bare-size"],
    "gpu_memory": ["--cpu --only 1.5B/none,run --work {here}"],
    "gpu_placement": ["--device cpu --policy tiny --judge tiny --steps 2 --prompts 2 --samples 2 --concurrent 8"],
    "gpu_ranks": ["--rehearse --only 'FSDP 2' 'context 2, ring' '2 engines, broadcast'"],
    "gpu_step": ["--cpu --only gcore-local,trl --steps 1 --mix fixed --tokens 8 --work {here}"],
    "gpu_swap": ["--rehearse --work {here}"],
    "gpu_train": ["--model tiny --sequences 8 --prompt 8 --response 16 --updates 2 --lengths mix --only eager"],
    "gpu_vision": ["--cpu --steps 1 --work {here}"],
    "hosts": ["--no-ray -- hostname"],
    "long_generation": ["--prompt 64 --response 4"],
    "media_bytes": ["--samples 8 --edge 32 --controllers 2 --runtime local --work {here}"],
    "placement": [
        "drift --steps 1 --seeds 1 --judge 14B",
        "speed --steps 1",
        "splits --only bimodal --seeds 1 steps=1",
    ],
    "random_model": ["tiny {here}/model"],
    "sandboxes": ["--kinds bubblewrap --at-once 2 --rounds 1"],
    "sessions": ["--sessions 4 --turns 2 --tokens 4 --think-s 0.1"],
    "soak": [],  # starts and kills runs for minutes: --help alone
    "step": ["--only 'gcore local,trl' --rounds 1 --steps 4 --prompts 2 --siblings 2 --tokens 8"],
    "streaming": ["--seeds 1 --sigma 0.5 --judge-tokens 16 --policy-tokens 16 --most-tokens 64 --prompts 4"],
    "tail": ["--seeds 1 --steps 2 --skip 1 --sigma 1.0 --tokens 16 --most-tokens 64 --groups 4 --engines 2"],
    "workflow": ["--rounds 1 --programs 20 --siblings 2 --tokens 4"],
}
VLLM = ("engine_cost", "gpu_decode", "gpu_engines", "gpu_memory", "gpu_placement", "gpu_step")  # its CPU build


def bench(name: str, *args: str) -> str:
    """As a user calls it, from another folder and without the repository in PYTHONPATH."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RAY_ADDRESS")} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "bench" / f"{name}.py"), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=env, cwd="/")
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def prepare(folder: Path) -> None:
    """What two of them read: rows of controllers.py, which measures minutes, and a scenario of two slots."""
    rows = [
        {
            "plane": f"parallel N={n}",
            "controllers": n,
            "samples": samples,
            "calls": samples + 60 * n,
            "cpu_ms": 1 + n / 9,
        }
        for n in (1, 2, 4)
        for samples in (256, 512, 1024)
    ]
    (folder / "rows.json").write_text(json.dumps({"rows": rows}))
    scenario = next(yaml.safe_load_all((ROOT / "bench" / "emulation.yaml").read_text()))
    scenario |= {"name": "tiny", "slots": 2, "prompts": 4, "samples": 2, "prompt_length": 16}
    scenario["lengths"] |= {"start": 20, "longest": 64}
    scenario["judges"][0]["verdict"] |= {"start": 10, "longest": 32}
    (folder / "scenario.yaml").write_text(yaml.safe_dump(scenario))


def test_the_table_names_every_bench():
    assert sorted([*REHEARSALS, *PARTS]) == BENCHES
    assert [name for name, rows in REHEARSALS.items() if not rows] == ["soak"]


@pytest.mark.release
@pytest.mark.parametrize("name", BENCHES)
def test_help(name):
    assert bench(name, "--help").strip()


@pytest.mark.release
@pytest.mark.parametrize("name", [name for name, rows in REHEARSALS.items() if rows])
def test_rehearsal(name, tmp_path):
    if name in VLLM and importlib.util.find_spec("vllm") is None:
        pytest.skip("it needs vLLM")
    if name == "hosts" and (reason := why_not()):
        pytest.skip(reason)
    prepare(tmp_path)
    for arguments in REHEARSALS[name]:
        bench(name, *shlex.split(arguments.format(here=tmp_path)))
