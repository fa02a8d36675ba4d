"""Whether the engines record the experts of each token for the trainer (training.router_replay). No torch."""

from __future__ import annotations

import json
from pathlib import Path

from gcore.config.engines import engines_with
from gcore.config.tree import Config
from gcore.content.families import TEXT_ALONE
from gcore.hub import model_folder
from gcore.types import UserError

REPLAYABLE = (  # families with a test: tests/unit/test_router_replay.py
    *("qwen2_moe", "qwen3_moe", "mixtral", "granitemoe", "gpt_oss", "qwen3_next", "qwen3_5_moe_text", "qwen4_exp_text"),
    *("nemotron_h", "granitemoehybrid", "jamba", "lfm2_moe", "llama4_text", "gemma4_text", "kimi_linear", "minimax"),
    *("deepseek_v32", "glm_moe_dsa", "deepseek_v4", "hy_v4", "axk2", "afmoe", "cohere2_moe", "exaone_moe"),
    *("granitemoe_swa", "mimo_v2_flash", "step3p5", "glm5_next_text"),
)


def replays_experts(config: Config) -> bool:
    """Raises UserError if the recipe asks for it and it is not possible."""
    wanted = config.training.router_replay
    if wanted is False:
        return False
    obstacle = _obstacle(config)
    if wanted is True and obstacle:
        raise UserError(f"training.router_replay=true: {obstacle}; expected auto or false")
    return not obstacle


def replay_warning(config: Config) -> list[str]:
    """If a mixture of experts is trained and the trainer chooses other experts than the engine where two are close."""
    if config.training.router_replay != "auto" or config.objective != "policy" or config.training.emulated is not None:
        return []
    obstacle = _obstacle(config)
    if not obstacle or model_type(config) not in REPLAYABLE:
        return []
    return [f"training.router_replay: the trainer chooses the experts of each token itself: {obstacle}"]


def _obstacle(config: Config) -> str:
    if config.objective != "policy":
        return f"objective={config.objective} does not compare logprobs of engine and trainer"
    if not config.generation.traits.experts:
        only = engines_with("experts")
        return f"generation.engine={config.generation.engine} does not record experts, only {only} does"
    if config.training.backend != "fsdp":
        return f"training.backend={config.training.backend} does not replay experts, only fsdp does"
    if (found := model_type(config)) not in REPLAYABLE:
        return f"the model is of type {found}; docs/engines.md lists those whose experts can be replayed"
    return ""


def model_type(config: Config) -> str:
    """As in config.json; of a model whose tower is not used, and of one that is built, that of its decoder."""
    if config.model.build is not None:
        return config.model.build.architecture
    found = json.loads((Path(model_folder(config.model)) / "config.json").read_text())
    kind = str(found.get("model_type"))
    return str(found["text_config"]["model_type"]) if kind in TEXT_ALONE else kind
