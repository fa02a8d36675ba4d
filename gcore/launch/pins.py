"""Resolves and checks the models and datasets of a recipe before any process starts. Does not import torch.

    recipe ──pin──> ids with commits ──check_models──> long enough? ──(other checks)──> find_weights: to the cache

The driver resolves every hub id to a commit once and writes it to the run's config.yaml. Each process then opens this
commit in the cache of its own machine (gcore/hub.py), and downloads missing files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gcore.config.base import Model, Section
from gcore.config.data import Dataset
from gcore.config.judges import ServedJudge
from gcore.config.load import read_tree
from gcore.config.tree import Config
from gcore.hub import is_id, model_folder, pin_model
from gcore.prompts.stored import pin_rows
from gcore.types import UserError

POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
PINNED = (("path", "revision"), ("tokenizer", "tokenizer_revision"))
Pinned = TypeVar("Pinned", Model, Dataset)


def pin(config: Config) -> Config:
    """The recipe with a commit for every hub id. A resumed run keeps its commits, for ids without a revision in the
    recipe."""
    resume = config.run.resume
    file = (config.run.folder if resume == "auto" else Path(resume).parent) / "config.yaml"
    saved = read_tree(file) if resume != "never" and os.access(file, os.R_OK) else {}
    pinned: Config = _pinned(config, "", saved)
    return pinned


def _pinned(part: Any, key: str, saved: Any) -> Any:
    """A part of the configuration, with commits for the models and datasets in it. `saved`: this part of the resumed
    run."""
    match part:
        case Model():
            return pin_model(_with_commits(part, saved), key)
        case Dataset():
            return pin_rows(_with_commits(part, saved), key)
        case Section():
            changes = _changed(dict(part), key, saved)
            return part.model_copy(update=changes) if changes else part  # the other fields stay unset
        case dict():
            return {**part, **changes} if (changes := _changed(part, key, saved)) else part
        case [Section(), *_]:
            of_parts = [*saved, *[None] * len(part)] if isinstance(saved, list) else [None] * len(part)
            return [_pinned(item, f"{key}.{i}", of_parts[i]) for i, item in enumerate(part)]
        case _:
            return part


def _changed(parts: Mapping[str, Any], key: str, saved: Any) -> dict[str, Any]:
    of_parts = saved if isinstance(saved, dict) else {}
    pinned = {name: _pinned(part, f"{key}.{name}".lstrip("."), of_parts.get(name)) for name, part in parts.items()}
    return {name: part for name, part in pinned.items() if part is not parts[name]}


def _with_commits(part: Pinned, saved: Any) -> Pinned:
    """With the commits of the same ids."""
    commits = {}
    for path, revision in PINNED if isinstance(saved, dict) else ():
        name = getattr(part, path, None)
        if name is not None and name == saved.get(path) and getattr(part, revision) is None:
            commits[revision] = saved.get(revision)
    return part.model_copy(update=commits) if any(commits.values()) else part


def models_of(config: Config) -> dict[str, Model]:
    """Every model that the recipe names: key -> model."""
    rewards = config.rewards
    models: dict[str, Model | None] = {"model": config.model, "critic.model": config.critic.model}
    models |= {f"rewards.models.{i}.model": scorer.model for i, scorer in enumerate(rewards.models)}
    models |= {f"{key}.model": judge.model for key, judge in rewards.engine_judges_by_key.items()}
    return {key: model for key, model in models.items() if model is not None}


def check_models(config: Config) -> None:
    """UserError if a path is not a model, or if its context window is too short for the recipe."""
    whole, keys_of_whole = config.max_length, "data.max_prompt_length + generation.max_response_length"
    _check(config.model, "model", keys_of_whole, whole)
    for key, judge in config.rewards.engine_judges_by_key.items():
        if isinstance(judge, ServedJudge):
            keys = f"{key}.max_prompt_length + {key}.max_response_length"
            _check(judge.model, f"{key}.model", keys, judge.max_length)
        else:  # a teacher reads whole samples of the policy
            more = judge.traits.scores_at_one  # needs room for one more token
            _check(judge.model, f"{key}.model", keys_of_whole, whole + more)
    if config.critic.model is not None and config.algorithm.estimator.critic:
        _check(config.critic.model, "critic.model", keys_of_whole, whole)
    for i, scorer in enumerate(config.rewards.models):
        key, longest = f"rewards.models.{i}", 0 if scorer.max_length == "auto" else scorer.max_length
        _check(scorer.model, f"{key}.model", f"{key}.max_length", longest)


def find_weights(config: Config, *, of_hub: bool) -> None:
    """`of_hub`: download the weights of hub models into the cache of this machine. Otherwise, for the other models:
    UserError if a folder has no weights, or an incomplete file."""
    unread = set[str]()
    if config.training.emulated is not None and config.generation.emulated is not None:
        unread.add("model")
    if not config.algorithm.estimator.critic:
        unread.add("critic.model")
    unread |= {f"{key}.model" for key, judge in config.rewards.engine_judges_by_key.items() if judge.emulated}
    for key, model in models_of(config).items():
        if key not in unread and model.path is not None and is_id(model.path) == of_hub:
            model_folder(model, key, weights=True)


def context_window(config: dict[str, Any]) -> int | None:
    """Longest sequence by a model's config.json; None if the file does not have it.

    RoPE scaling of the kinds linear, dynamic and yarn multiplies it by a factor. For the other kinds (llama3, longrope)
    the number in config.json is already scaled.
    """
    text = {**config, **(config.get("text_config") or {})}
    window = next((text[name] for name in POSITIONS if isinstance(text.get(name), int)), None)
    if window is None:
        return None
    return max([window, *_scaled(text.get("rope_scaling"), window), *_scaled(text.get("rope_parameters"), window)])


def _scaled(rope: Any, window: int) -> Iterator[int]:
    if not isinstance(rope, dict):
        return
    for part in rope.values():  # one section per kind of layer
        yield from _scaled(part, window)
    factor = rope.get("factor")
    if rope.get("rope_type", rope.get("type")) in ("linear", "dynamic", "yarn") and isinstance(factor, int | float):
        yield int((rope.get("original_max_position_embeddings") or window) * factor)


def _check(model: Model, key: str, length_keys: str, longest: int) -> None:
    if model.path is None:
        return
    file = model_folder(model, key) / "config.json"
    if (file.parent / "model_index.json").is_file():  # a pipeline of diffusers: its prompts have no tokens here
        return
    if not file.is_file():
        raise UserError(f"{key}.path={model.path}: no config.json there; expected the folder of a Hugging Face model")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{key}.path={model.path}: its config.json is not JSON: {error}") from None
    window = context_window(config) if isinstance(config, dict) else None
    if window is not None and longest > window:
        raise UserError(
            f"{length_keys} = {longest} exceeds the context window of {key}.path={model.path}: {window} tokens"
        )
