"""Presets set what a paper says, explicit keys win, and what contradicts itself is told."""

import copy

import pytest
import yaml

from gcore.config.advice import warnings
from gcore.config.algorithm import ESTIMATORS, LOSSES
from gcore.config.load import dump_config, load_config, validate
from gcore.config.presets import ALGORITHMS
from gcore.config.tree import Config
from gcore.training.objective import POLICY_LOSSES
from gcore.types import UserError
from tests.e2e.helpers import RECIPE


def config_of(**sections) -> Config:
    tree = copy.deepcopy(RECIPE)
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return validate(tree, "test", Config)


PAPERS = {  # (estimator, loss, aggregation, clip low, clip high, KL coefficient, its estimator, where)
    "grpo": ("grpo", "ppo", "sequence_mean", 0.2, 0.2, 0.04, "k3", "loss"),
    "dr_grpo": ("dr_grpo", "ppo", "fixed_length", 0.2, 0.2, 0.0, "k3", "loss"),
    "dapo": ("grpo", "ppo", "token_mean", 0.2, 0.28, 0.0, "k3", "loss"),
    "gspo": ("grpo", "gspo", "sequence_mean", 3e-4, 4e-4, 0.0, "k3", "loss"),
    "cispo": ("grpo", "cispo", "token_mean", 1.0, 4.0, 0.0, "k3", "loss"),
    "reinforce_pp": ("reinforce_pp", "ppo", "token_mean", 0.2, 0.2, 0.001, "k1", "reward"),
    "reinforce_pp_baseline": ("reinforce_pp_baseline", "ppo", "token_mean", 0.2, 0.2, 0.001, "k2", "loss"),
    "rloo": ("rloo", "ppo", "fixed_length", 0.2, 0.2, 0.05, "k1", "reward"),
    "sapo": ("grpo", "sapo", "sequence_mean", 0.2, 0.2, 0.0, "k3", "loss"),
    "gdpo": ("gdpo", "ppo", "token_mean", 0.2, 0.2, 0.0, "k3", "loss"),
    "opo": ("opo", "reinforce", "fixed_length", 0.2, 0.2, 0.0, "k3", "loss"),
    "gpg": ("gpg", "reinforce", "token_mean", 0.2, 0.2, 0.0, "k3", "loss"),
    "remax": ("remax", "reinforce", "fixed_length", 0.2, 0.2, 0.001, "k1", "reward"),
    "ppo": ("gae", "ppo", "token_mean", 0.2, 0.2, 0.02, "k1", "reward"),
}
NAMES = ("adv_estimator", "policy_loss", "loss_aggregation", "clip_ratio_low", "clip_ratio_high")
NAMES += ("kl_coef", "kl_estimator", "kl_in")


@pytest.mark.parametrize("preset", list(ALGORITHMS))
def test_a_preset_is_one_line(preset):
    config = config_of(algorithm={"preset": preset}, generation={"max_response_length": 10})
    assert tuple(getattr(config.algorithm, name) for name in NAMES) == PAPERS[preset]
    is_dapo = preset == "dapo"
    assert config.sampling.filter == ("spread" if is_dapo else "none")
    assert (config.algorithm.overlong.buffer, config.algorithm.overlong.penalty) == (2 if is_dapo else 0, 1.0)
    assert not any("preset" in line for line in warnings(config))


def test_the_resolved_file_shows_what_came_of_it(tmp_path):
    config = config_of(algorithm={"preset": "dapo", "clip_ratio_low": 0.1}, generation={"max_response_length": 10})
    tree = yaml.safe_load(dump_config(config))
    shown = {name: tree["algorithm"][name] for name in ("preset", "clip_ratio_low", "clip_ratio_high")}
    assert shown == {"preset": "dapo", "clip_ratio_low": 0.1, "clip_ratio_high": 0.28}
    assert (tree["algorithm"]["overlong"]["buffer"], tree["sampling"]["filter"]) == (2, "spread")
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_explicit_keys_win_and_departures_are_told():
    config = config_of(algorithm={"preset": "gspo", "clip_ratio_high": 0.2, "mini_batches": 2})
    assert (config.algorithm.clip_ratio_low, config.algorithm.clip_ratio_high) == (3e-4, 0.2)
    first, *_ = warnings(config)
    assert first == "algorithm.clip_ratio_high=0.2 differs from algorithm.preset=gspo (0.0004); 0.2 is used"
    config = config_of(algorithm={"preset": "dapo"}, sampling={"filter": "none"})
    assert warnings(config) == ["sampling.filter=none differs from algorithm.preset=dapo (spread); none is used"]


def test_without_a_preset_nothing_changes():
    assert config_of().algorithm == config_of(algorithm={"preset": None}).algorithm
    assert warnings(config_of()) == []


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"algorithm\.preset: .*'dapo'.*got 'ppo2'"):
        config_of(algorithm={"preset": "ppo2"})


def test_unknown_estimators_and_losses_are_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"algorithm\.adv_estimator: .*got 'rlo'; expected one of .*did you mean rloo"):
        config_of(algorithm={"adv_estimator": "rlo"})
    with pytest.raises(UserError, match=r"algorithm\.policy_loss: .*got 'ciso'.*did you mean cispo"):
        config_of(algorithm={"policy_loss": "ciso"})
    assert config_of(algorithm={"adv_estimator": "mine.py:f"}, sampling={"samples_per_prompt": 1}).algorithm.estimator


def test_the_table_names_every_estimator_and_loss():
    assert {keys["adv_estimator"] for keys in ALGORITHMS.values()} == ESTIMATORS.keys()
    assert {keys["policy_loss"] for keys in ALGORITHMS.values()} == set(LOSSES) == POLICY_LOSSES.keys()


DENOISER = {"model": {"path": None, "build": None, "denoiser": {}}, "generation": {"denoising": {"steps": 8}}}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"algorithm": {"importance": {"floor": 2.0}}}, "algorithm.importance: floor=2.0 must be below cap=2.0"),
        (
            {"algorithm": {"overlong": {"buffer": 11}}, "generation": {"max_response_length": 10}},
            "algorithm.overlong.buffer=11 exceeds generation.max_response_length=10",
        ),
        (
            {"algorithm": {"adv_estimator": "reinforce_pp_baseline"}, "sampling": {"samples_per_prompt": 1}},
            "adv_estimator=reinforce_pp_baseline compares siblings",
        ),
        (
            {"algorithm": {"adv_estimator": "gdpo"}, "rewards": {"by_workflow": ["rubric"]}},
            r"adv_estimator=gdpo .* needs its weight, which rewards.by_workflow=\['rubric'\] has not",
        ),
        (
            {**DENOISER, "algorithm": {"adaptive_entropy": {"target": 0.1}}},
            "algorithm.adaptive_entropy: the entropy of a denoising step is constant",
        ),
    ],
)
def test_what_cannot_work_is_refused(sections, expected):
    with pytest.raises(UserError, match=expected):
        config_of(**sections)


CONTRADICTIONS = {
    "GSPO uses sequence_mean": {
        "algorithm": {"policy_loss": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "mini_batches": 2}
    },
    "GSPO uses 3e-4 and 4e-4": {
        "algorithm": {"policy_loss": "gspo", "loss_aggregation": "sequence_mean", "mini_batches": 2}
    },
    "ranges are for policy_loss=gspo": {"algorithm": {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}},
    "all ratios are 1": {"algorithm": {"policy_loss": "cispo"}},
    "no effect with policy_loss=cispo": {
        "algorithm": {"policy_loss": "cispo", "mini_batches": 2, "clip_ratio_dual": 3.0}
    },
    "later updates train as if": {"algorithm": {"policy_loss": "reinforce", "epochs": 2}},
    "Dr.GRPO uses fixed_length": {"algorithm": {"adv_estimator": "dr_grpo", "loss_aggregation": "sequence_mean"}},
    "algorithm.kl_in: no effect with algorithm.kl_coef=0": {"algorithm": {"kl_in": "reward"}},
    "its gradient is 0 on average": {"algorithm": {"kl_coef": 0.1, "kl_estimator": "k1"}},
    "a reward has no gradient, so this is k3": {
        "algorithm": {"kl_coef": 0.1, "kl_estimator": "k3+", "kl_in": "reward", "adv_estimator": "rloo"}
    },
    "its own standard deviation": {"algorithm": {"kl_coef": 0.1, "kl_estimator": "k1", "kl_in": "reward"}},
    "up to 2 version(s) old": {"algorithm": {"importance": {"level": "none"}}, "sampling": {"max_staleness": 2}},
    "DAPO uses only one of the two": {"algorithm": {"overlong": {"mask": True, "buffer": 2}}},
    "critic.lr: no effect with algorithm.adv_estimator=grpo": {"critic": {"lr": 1e-3}},
    "placement.critic.ranks: no effect with algorithm.adv_estimator=grpo": {"placement": {"critic": {"ranks": 2}}},
    "generation.top_p=0.9, top_k=0": {"generation": {"top_p": 0.9}},
    "algorithm.gamma: no effect with algorithm.adv_estimator=grpo": {"algorithm": {"gamma": 0.9}},
    "algorithm.gae_lambda: no effect with algorithm.adv_estimator=remax": {
        "algorithm": {"adv_estimator": "remax", "gae_lambda": 1.0, "gamma": 0.9}
    },
    "algorithm.early_stop_kl: no effect with one update per step": {"algorithm": {"early_stop_kl": 0.1}},
    "preference.beta: no effect with objective=policy": {"preference": {"beta": 0.5}},
}


def test_the_saved_configuration_of_a_run_has_no_contradictions(tmp_path):
    """It contains every key, also those of sections that the run does not use."""
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config_of()))
    assert warnings(load_config(file)) == []


def test_what_an_objective_does_not_read_is_told():
    tree = copy.deepcopy(RECIPE) | {"objective": "dpo", "algorithm": {"epochs": 2, "kl_coef": 0.1, "mini_batches": 2}}
    assert warnings(validate(tree, "test", Config)) == ["algorithm.epochs and kl_coef: no effect with objective=dpo"]


@pytest.mark.parametrize("expected", list(CONTRADICTIONS))
def test_contradictions_are_told_one_line_each(expected):
    (line,) = warnings(config_of(**CONTRADICTIONS[expected]))
    assert expected in line and "\n" not in line
