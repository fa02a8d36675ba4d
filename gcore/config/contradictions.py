"""Keys of several sections that contradict each other: such a recipe is refused. Advice is in advice.py.

The checks that need more than the recipe (files, models, devices) are in launch/preflight.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gcore.config.base import refuse_value
from gcore.config.denoising import check_denoising
from gcore.config.engines import engines_with
from gcore.config.environments import TURN_CREDIT
from gcore.config.megatron import TRAINER

if TYPE_CHECKING:
    from gcore.config.tree import Config


def check(config: Config) -> None:
    """Raises ValueError for the first contradiction."""
    _check_objective(config)
    _check_faults(config)
    _check_environment(config)
    _check_best(config)
    _check_algorithm(config)
    _check_runtime(config)
    _check_critic(config)
    if config.placement.mode in ("static", "dynamic", "colocated"):
        _check_slots(config)
    _check_emulated(config)
    _check_lora(config)
    _check_megatron(config)
    check_denoising(config)
    _check_lengths(config)


def _check_faults(config: Config) -> None:
    if config.faults.plan and config.runtime == "local":
        raise ValueError("faults.plan needs a process per role; expected runtime=ray, got runtime=local")
    for fault in config.faults.plan:
        if fault.at.startswith("reward:") and (name := fault.at.removeprefix("reward:")) not in config.rewards.names:
            raise ValueError(f"faults.plan: at={fault.at}: got {name!r}; expected one of {config.rewards.names}")


def _check_environment(config: Config) -> None:
    if (spec := config.environment) is None:
        return
    if config.is_offline:
        raise ValueError(
            f"environment: objective={config.objective} trains on answers of the dataset; expected objective=policy, "
            "or preference.pairs=rollouts"
        )
    estimator = config.algorithm.adv_estimator
    if spec.credit == "episode":
        if spec.discount != 1:
            raise ValueError(f"environment.discount={spec.discount} needs environment.credit=turn, got episode")
    elif config.algorithm.estimator.step_rewards:
        if spec.discount != 1:
            raise ValueError(
                f"environment.discount={spec.discount}: algorithm.adv_estimator={estimator} discounts by "
                "algorithm.gamma; expected 1"
            )
    elif estimator not in TURN_CREDIT:
        raise ValueError(
            f"environment.credit=turn: got algorithm.adv_estimator={estimator}; expected one of "
            f"{', '.join(TURN_CREDIT)}, or one that discounts over steps (gae, reinforce_pp, remax)"
        )


def _check_best(config: Config) -> None:
    known = config.evaluation.metrics(config.data.eval_sets)
    is_known = config.checkpoint.best_metric in known or config.trains_on_answers("eval")  # metrics of the objective
    if config.checkpoint.keep_best and not is_known:
        raise ValueError(f"checkpoint.best_metric: got {config.checkpoint.best_metric!r}; expected one of {known}")


def _check_algorithm(config: Config) -> None:
    if config.algorithm.mini_batches > config.sampling.prompts_per_step:
        raise ValueError(
            f"algorithm.mini_batches={config.algorithm.mini_batches} exceeds "
            f"sampling.prompts_per_step={config.sampling.prompts_per_step}: every mini-batch needs a prompt"
        )
    compares = config.algorithm.estimator.siblings or config.objective != "policy"
    compares = compares and config.rewards.compares
    if compares and not config.is_offline and config.sampling.samples_per_prompt < 2:
        raise ValueError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares siblings; "
            f"sampling.samples_per_prompt must be at least 2, got {config.sampling.samples_per_prompt}"
        )
    if config.algorithm.overlong.buffer > config.generation.max_response_length:
        raise ValueError(
            f"algorithm.overlong.buffer={config.algorithm.overlong.buffer} exceeds "
            f"generation.max_response_length={config.generation.max_response_length}: expected at most that number"
        )


def _check_runtime(config: Config) -> None:
    trainer = config.placement.trainer
    if config.runtime == "local" and (trainer.ranks not in (1, "auto") or trainer.tensor_parallel > 1):
        raise ValueError(
            "runtime=local has one process and so one trainer rank; got "
            f"placement.trainer.ranks={trainer.ranks}, tensor_parallel={trainer.tensor_parallel} (use runtime=ray)"
        )


def _check_slots(config: Config) -> None:
    mode, roles = config.placement.mode, ["policy", *(judge.name for judge in config.rewards.engine_judges)]
    if len(roles) < 2:
        raise ValueError(
            f"placement.mode={mode} divides slots between the policy and judges, but rewards.judges has no judge "
            "with a model; expected at least one"
        )
    if config.sampling.max_staleness and mode == "colocated":
        raise ValueError(
            f"placement.mode={mode} needs sampling.max_staleness=0, got {config.sampling.max_staleness}: with several "
            "steps in progress the roles do not take turns; expected mode dynamic, static or disaggregated"
        )
    if unknown := sorted(set(config.placement.split) - set(roles)):
        raise ValueError(f"placement.split: got {unknown}; expected names among {roles}")
    if config.placement.split and set(config.placement.split) != set(roles):
        raise ValueError(f"placement.split: got {config.placement.split}; expected all of {roles}")


def _check_objective(config: Config) -> None:
    if not config.run.steps and not (config.training.warm_start and config.training.warm_start.steps):
        raise ValueError("run.steps=0 without training.warm_start: nothing is trained; expected at least 1 step")
    if not config.rewards.names and not config.is_offline:
        raise ValueError(
            "rewards: got no reward; expected one or more of rewards.functions, models, judges, http or by_workflow"
        )
    if config.objective != "policy" and config.algorithm.estimator.critic:
        raise ValueError(
            f"objective={config.objective} has no critic; expected another estimator than "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
        )
    if config.algorithm.adv_estimator == "gdpo" and config.rewards.by_workflow:
        raise ValueError(
            f"algorithm.adv_estimator=gdpo normalizes each reward by itself and then needs its weight, which "
            f"rewards.by_workflow={config.rewards.by_workflow} has not; expected another estimator, such as grpo"
        )
    at_one = [teacher for teacher in config.rewards.teachers if teacher.traits.scores_at_one]
    if at_one and config.generation.temperature != 1:
        raise ValueError(
            f"generation.temperature={config.generation.temperature}: the teacher {at_one[0].name!r} is on "
            f"engine={at_one[0].engine}, which returns logprobs of given tokens at temperature 1 only; expected 1, "
            f"or engine={engines_with('scores_at_any_temperature')} for the teacher"
        )
    if config.objective == "reward_model":
        _check_reward_model(config)
    if config.needs.labels and config.preference.pairs == "rollouts":
        raise ValueError(f"objective={config.objective} needs labels of the dataset; expected preference.pairs=dataset")
    if config.is_offline and config.sampling.curriculum is not None:
        raise ValueError(
            f"sampling.curriculum needs rewards of the policy's own samples; objective={config.objective} trains on "
            "answers of the dataset"
        )
    if config.is_offline and config.sampling.staleness:
        raise ValueError(
            f"objective={config.objective} trains on answers of the dataset, which have no policy version; expected "
            "sampling.max_staleness=0 and no sampling.surplus=keep"
        )


def _check_reward_model(config: Config) -> None:
    training = config.training
    refuse = partial(refuse_value, config, "objective=reward_model")
    refuse("rewards", bool(config.rewards.names), "none: nothing is generated")
    refuse("preference.pairs", config.preference.pairs == "rollouts", "dataset")
    refuse("model.lora", config.model.lora is not None, "none: all weights are trained")
    refuse("training.backend", training.backend == "megatron", "fsdp: Megatron-Core trains policies")
    refuse("training.warm_start", training.warm_start is not None, "none")
    refuse("training.context_parallel", training.context_parallel > 1, "1")
    refuse(f"{TRAINER}.tensor_parallel", config.placement.trainer.tensor_parallel > 1, "1")


def _check_critic(config: Config) -> None:
    """It may have ranks of its own."""
    ranks = config.critic_ranks
    if not ranks:
        return
    given = f"placement.critic.ranks={ranks}"
    if config.runtime == "local" and ranks > 1:
        raise ValueError(f"{given}: runtime=local has one process; expected 0 or 1, or runtime=ray")
    if config.training.emulated is not None:
        raise ValueError(f"{given}: training.backend=emulated has no critic; expected 0")
    if config.placement.mode in ("static", "dynamic", "colocated"):
        raise ValueError(
            f"{given}: placement.mode={config.placement.mode} divides all devices into slots; expected 0, or "
            "placement.mode=shared or disaggregated"
        )


def _check_emulated(config: Config) -> None:
    """The sections of what is emulated."""
    backend, emulated, policy = config.training.backend, config.training.emulated, config.generation
    if (backend == "emulated") != (emulated is not None):
        raise ValueError(
            f"training.backend={backend}, section `training.emulated` is {'set' if emulated else 'not set'}; "
            "expected it with backend=emulated, and only there"
        )
    if emulated is not None and policy.traits.computes:
        raise ValueError(
            f"training.backend=emulated has no weights for engines, got generation.engine={policy.engine}; expected "
            "generation.engine=emulated"
        )


def _check_lora(config: Config) -> None:
    if config.model.lora is None:
        return
    if config.training.emulated is not None:
        raise ValueError("model.lora: training.backend=emulated does not train; remove one of the two")
    if config.generation.precision == "fp8":
        raise ValueError("generation.precision=fp8: got model.lora; expected whole weights, or precision=auto")
    if config.generation.sleep == 2:
        raise ValueError(
            "generation.sleep=2 drops the engines' weights, but with model.lora the trainer sends only adapters; "
            "expected 0, 1 or auto"
        )


def _check_megatron(config: Config) -> None:
    """The degrees of `training.backend`, and what Megatron-Core cannot do."""
    training, trainer = config.training, config.placement.trainer
    refuse = partial(refuse_value, config, f"training.backend={training.backend}")
    if training.backend != "megatron":
        for key in ("pipeline_parallel", "virtual_pipeline", "expert_parallel"):
            refuse(f"{TRAINER}.{key}", getattr(trainer, key) > 1, "1, or training.backend=megatron")
        return
    refuse("model.lora", config.model.lora is not None, "none, or training.backend=fsdp: there are no adapters")
    refuse("training.share_prefixes", training.share_prefixes is True, "auto or false")
    refuse("training.offload", training.offload not in ("auto", "none"), "auto or none: its state is on the device")
    refuse(f"{TRAINER}.shard", trainer.shard != "auto", "auto: all data-parallel ranks share the optimizer")
    # With two stages both neighbours are one rank, and Megatron receives gradients as activations.
    is_too_short = trainer.virtual_pipeline > 1 and trainer.pipeline_parallel < 3
    refuse(f"{TRAINER}.virtual_pipeline", is_too_short, "1, or pipeline_parallel of at least 3")


def _check_lengths(config: Config) -> None:
    training = config.training
    longest = config.max_length
    together = 2 if config.needs.pairs else 1
    if together * longest > training.max_tokens_per_gpu * training.context_parallel:
        raise ValueError(
            f"data.max_prompt_length + generation.max_response_length = {longest} exceeds "
            f"training.max_tokens_per_gpu={training.max_tokens_per_gpu} x context_parallel="
            f"{training.context_parallel}: the longest {'pair' if together == 2 else 'sample'} would not fit"
        )
    if config.model.build and longest > config.model.build.max_length:
        raise ValueError(
            f"data.max_prompt_length + generation.max_response_length = {longest} exceeds "
            f"model.build.max_length={config.model.build.max_length}"
        )
