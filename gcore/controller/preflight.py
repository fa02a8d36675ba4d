"""What can be found wrong before any process starts is found here: each as one line that names the key."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from pathlib import Path

from gcore.config.tree import Config
from gcore.controller.build import Roles, build_rewarder, load_filter, load_workflow, quiet
from gcore.controller.plan import Plan
from gcore.hub import model_folder
from gcore.observe.trackers import check_trackers
from gcore.prompts.rows import load_rows
from gcore.prompts.source import Templater
from gcore.prompts.tokenizer import load_tokenizer
from gcore.rewarding.judge import JudgeSource
from gcore.rewarding.rewarder import Blend
from gcore.types import UserError


def preflight(config: Config, plan: Plan) -> None:
    quiet()
    _disk(config)
    check_trackers(config.observe)
    if config.runtime == "ray" and importlib.util.find_spec("ray") is None:
        raise UserError("runtime=ray: Ray is not installed; `pip install ray`, or use runtime=local")
    for key, serving in (("generation", config.generation), *(("rewards.judges", j) for j in config.rewards.judges)):
        if serving.engine in ("vllm", "sglang") and importlib.util.find_spec(serving.engine) is None:
            name = {"vllm": "vLLM", "sglang": "SGLang"}[serving.engine]
            said = f"{key}.engine={serving.engine}: {name} is not installed (see docs/engines.md)"
            raise UserError(f"{said}, or use engine=embedded")
    tokenizer = load_tokenizer(config.model)
    load_workflow(config.workflow)
    load_filter(config.sampling.filter)
    rewarder = build_rewarder(config, plan, Roles())
    for split in ("train", "eval"):
        dataset = config.data.train if split == "train" else config.data.eval
        if dataset is None:
            continue
        rows = load_rows(dataset, f"data.{split}")
        templater = Templater(tokenizer, config.data, split)
        prompt = templater.prompt(rows[0], 0, 0)
        rewarder.check(prompt.columns)
        if split == "train" and config.training.warm_start is not None:
            templater.demonstration(rows[0])
    if any(judge.url is not None for judge in config.rewards.judges):
        asyncio.run(_reach(rewarder))
    rewarder.close()


async def _reach(rewarder: Blend) -> None:
    """Judges behind a URL are there, or the run does not start."""
    judges = [source for source in rewarder.sources.values() if isinstance(source, JudgeSource)]
    try:
        await asyncio.gather(*(judge.reach() for judge in judges))
    finally:
        rewarder.close()


def _disk(config: Config) -> None:
    folder = Path(config.run.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise UserError(f"run.dir={folder}: cannot write there: {error.strerror or error}") from None
    free = shutil.disk_usage(folder).free / 2**20
    if free < config.observe.min_free_disk_mb:
        raise UserError(
            f"run.dir={folder}: {free:.0f} MB free, expected at least observe.min_free_disk_mb="
            f"{config.observe.min_free_disk_mb}; free some space or choose another run.dir"
        )


def model_megabytes(config: Config) -> int:
    """Size of the policy, for the object store: of its files, or of the shape to be built in float32."""
    if config.model.path is not None:
        files = list(model_folder(config.model).glob("*.safetensors"))
        return int(sum(f.stat().st_size for f in files) / 2**20)
    build = config.model.build
    assert build is not None
    per_layer = 4 * build.hidden_size**2 + 3 * build.hidden_size * build.intermediate_size
    return 1 + (build.layers * per_layer + 200 * build.hidden_size) * 4 // 2**20
