"""`gcore doctor`: what is installed, which backends are usable, what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys

from gcore.config.engines import ENGINES

NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "ray", "pydantic", "numpy", "pyarrow", "tensorboard")
OPTIONAL = {
    "datasets": "data.*.path with a Hugging Face dataset folder: pip install 'gcore-rl[datasets]'",
    "reasoning-gym": "data.*.task=reasoning_gym/NAME: pip install 'gcore-rl[reasoning-gym]'",
    "math-verify": "rewards by gcore.rewarding.math:math_answer: pip install 'gcore-rl[math]'",
    "wandb": "observe.trackers: pip install wandb",
    "mlflow": "observe.trackers: pip install mlflow",
}


def doctor(gpus: int) -> int:
    """Prints the findings. Returns 1 if a required package is missing. `gpus`: the number in this machine; without
    GPUs, torch is not imported, which would take seconds."""
    print(f"python        {platform.python_version()} ({sys.executable})")
    print(f"cpu           {os.cpu_count()} cores")
    missing = []
    for name in NEEDED:
        version = _version(name)
        print(f"{name:13} {version or 'MISSING: pip install -e .'}")
        if version is None:
            missing.append(name)
    print("\nbackends")
    if "torch" not in missing:
        print(f"  training    fsdp       {_torch(gpus)}")
        megatron = _version("megatron-core")
        print(f"  training    megatron   {f'ready: {megatron}' if megatron else 'not installed; see docs/megatron.md'}")
    for name, traits in ENGINES.items():
        if traits.packages:
            version = next(filter(None, map(_version, traits.packages)), None)
            print(f"  generation  {name:10} {f'ready: {version}' if version else 'not installed; see docs/engines.md'}")
        elif traits.computes and "torch" not in missing:
            print(f"  generation  {name:10} ready; for its models see docs/engines.md")
    sandbox = "ready" if shutil.which("bwrap") else "not installed; apt install bubblewrap"
    print(f"  rewarding   sandbox    {sandbox}")
    print(
        f"  runtime     ray        {'ready' if 'ray' not in missing else 'MISSING: pip install ray (or runtime=local)'}"
    )
    print("  runtime     local      ready")
    print("\noptional")
    for name, how in OPTIONAL.items():
        print(f"  {name:13} {_version(name) or f'not installed; for {how}'}")
    free = shutil.disk_usage(".").free / 2**30
    print(f"\ndisk          {free:.0f} GB free here")
    return 1 if missing else 0


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch(gpus: int) -> str:
    if not gpus:
        return "ready on CPU (gloo); no GPU here"
    import torch

    if not torch.cuda.is_available():
        return "ready on CPU (gloo); no GPU seen by PyTorch"
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return f"ready on {torch.cuda.device_count()} GPU(s): {', '.join(sorted(names))}"
