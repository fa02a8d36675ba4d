"""What a resumed run may change, and the checksum of the prompts."""

import copy

import pytest

from gcore.config.load import dump_config, parse_yaml
from gcore.config.resume import changes
from gcore.config.tree import Config
from gcore.prompts.rows import load_rows
from gcore.prompts.source import Templater, add_digests, measure
from gcore.prompts.tokenizer import load_tokenizer
from tests.e2e.helpers import RECIPE


def tree_of(**changed):
    tree = copy.deepcopy(RECIPE)
    for key, value in changed.items():
        *parents, last = key.split("__")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    return Config.model_validate(tree)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run__name", "other"),
        ("run__steps", 99),
        ("controllers", 4),
        ("placement__trainer__ranks", 4),
        ("checkpoint__every", 3),
        ("observe__eval_every", 3),
        ("training__offload", "all"),
        ("generation__max_concurrent", 7),
        ("rewards__timeout_s", 7.0),
        ("data__eval", None),
    ],
)
def test_resources_may_change(key, value):
    before, after = (parse_yaml(dump_config(config)) for config in (tree_of(), tree_of(**{key: value})))
    assert before != after and changes(before, after) == []


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("run__seed", 9, "run.seed: 3 -> 9"),
        ("training__lr", 1e-2, "training.lr: 0.003 -> 0.01"),
        ("sampling__prompts_per_step", 13, "sampling.prompts_per_step: 12 -> 13"),
        ("data__shuffle", False, "data.shuffle: True -> False"),
        ("generation__temperature", 0.5, "generation.temperature: 1.0 -> 0.5"),
        ("model__build__layers", 3, "model.build.layers: 2 -> 3"),
    ],
)
def test_what_changes_the_results_is_named(key, value, line):
    before, after = (parse_yaml(dump_config(config)) for config in (tree_of(), tree_of(**{key: value})))
    assert changes(before, after) == [line]


def test_another_reward_and_a_longer_schedule_are_named():
    function = {"name": "more", "path": "gcore.rewarding.rules:exact_answer"}
    before = parse_yaml(dump_config(tree_of(training__schedule="linear")))
    rewards = [*RECIPE["rewards"]["functions"], function]
    after = tree_of(training__schedule="linear", run__steps=9, rewards__functions=rewards)
    found = changes(before, parse_yaml(dump_config(after)))
    assert "run.steps: 5 -> 9" in found and "rewards.functions.1.name: not set -> more" in found


def test_the_checksum_of_the_prompts_does_not_depend_on_the_number_of_parts():
    config = tree_of()
    rows = [dict(row) for row in load_rows(config.data.train, "data.train")]
    templater = Templater(load_tokenizer(config.model), config.data)

    def digest(rows, parts):
        return add_digests(measure(rows, templater, 12, part, parts).digest for part in range(parts))

    expected = digest(rows, 1)
    assert [digest(rows, parts) for parts in (2, 3, 7)] == [expected] * 3
    answer = next(name for name in rows[5] if name != "prompt" and isinstance(rows[5][name], str))
    for change in ({"prompt": "1+1="}, {answer: "0 "}, {"extra": 1}):
        changed = [*rows[:5], {**rows[5], **change}, *rows[6:]]
        assert digest(changed, 1) != expected
    assert digest([rows[1], rows[0], *rows[2:]], 1) != expected  # the order counts
