"""Keys of mixtures of experts."""

from __future__ import annotations

from typing import Literal

from gcore.config.base import Section

REPLAYABLE = (
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "granitemoe",
    "gpt_oss",
)  # families with a test: models/decoders.py


class ExpertTraining(Section):
    """The part of config.tree.Training about experts."""

    router_replay: bool | Literal["auto"] = "auto"
    """Mixtures of experts: the engine records which experts every token used, and the trainer's passes of the policy
    use the same ones, with weights of its own routers. Needs `generation.engine: embedded` and `backend: fsdp`. `auto`:
    if both and the model allow it. See docs/engines.md."""
