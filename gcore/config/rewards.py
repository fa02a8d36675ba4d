"""Section `rewards`: how responses are scored, by rules, scalar models, judges and servers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from gcore.config.base import Arguments, Auto, Count, Fraction, PositiveInt, RewardSource, Seconds, Section, StoredModel
from gcore.config.judges import EngineJudge, Judge, Teacher
from gcore.config.objects import FunctionPath

# names of other metrics reward/NAME
RESERVED_NAMES = ("mean", "mean_drawn", "std", "zero_spread_frac", "errors", "retries", "timeouts", "unscored")


class RewardFunction(RewardSource):
    path: FunctionPath
    """`package.module:NAME` or `file.py:NAME`: a function with TRL's, verl's or OpenRLHF's signature, a class whose
    instances are callable with one of them, or a factory that returns such a function."""
    args: Arguments = {}
    """Extra keyword arguments of every call; for a class or factory, the arguments of its one call."""
    timeout_s: Seconds | None = None
    """A call that takes longer is killed and fails; default: `rewards.timeout_s`."""

    @model_validator(mode="before")
    @classmethod
    def _of_function(cls, value: Any) -> Any:
        """From Python, a function alone: its name is the name in the logs."""
        if not callable(value):
            return value
        name = str(getattr(value, "__name__", ""))
        return {"name": name if name.isidentifier() and name not in RESERVED_NAMES else "reward", "path": value}


class ScalarReward(RewardSource):
    model: StoredModel
    """A sequence-classification model with one label (Bradley-Terry), with its own tokenizer and chat template.
    `objective: reward_model` trains one."""
    replicas: PositiveInt = 1
    """Processes that serve the model."""
    max_length: PositiveInt | Auto = "auto"
    """Maximum length of a conversation in the model's tokens; a longer one fails and is not cut. `auto`: the model's
    context window."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the weights; `auto`: float32 on CPU, bfloat16 on GPU."""


class HttpReward(RewardSource):
    url: str
    """Receives `{"prompts": [...], "completions": [...], COLUMN: [...]}` by POST and answers `{"rewards": [...]}`."""
    timeout_s: Seconds = 30.0
    """Timeout of one attempt."""
    attempts: PositiveInt = 4
    """Attempts in total. A timeout, status 429 or 5xx is retried with growing, jittered delays; other 4xx fail
    immediately."""
    max_concurrent: PositiveInt = 32
    """Maximum number of concurrent requests per controller."""
    token_env: str | None = None
    """Environment variable that holds a bearer token."""
    columns: list[str] = []
    """Columns of the dataset to send; default: `answer` if it exists."""


class Rewards(Section):
    functions: list[RewardFunction] = []
    """Rules: functions, called in worker processes. The reward is the weighted sum over all four lists."""
    models: list[ScalarReward] = []
    """Scalar reward models."""
    judges: list[Judge] = []
    """Generative judges: with `model`, with `url`, or `mode: teacher`."""
    http: list[HttpReward] = []
    """Reward servers."""
    by_workflow: list[str] = []
    """Names of rewards that the workflow itself computes and returns in `Scored.parts`, such as `rubric` of an
    environment. Such a workflow does not need `ctx.reward`, and other rewards are optional."""
    accuracy: str | None = None
    """Name of the reward whose value counts as accuracy in evaluations; default: the first."""
    attempts: PositiveInt = 2
    """Attempts of a function or model. If all fail, the group is dropped and counted in `reward/errors`; a failure is
    never a reward of 0."""
    timeout_s: Seconds = 30.0
    """A function call that takes longer is killed, with its worker, and retried."""
    workers: Count | Auto = "auto"
    """Worker processes for functions per controller. 0: functions are called in threads of the controller, for
    debuggers; a call that hangs cannot be killed then. `auto`: CPU cores divided by controllers, at most 4; 0 with
    `runtime=local`."""
    recycle_after: PositiveInt = 10_000
    """Calls after which a worker process is replaced, which frees leaked memory."""
    unscored: Literal["drop_group", "drop_sample"] = "drop_group"
    """If all sources return None for some siblings of a prompt (TRL: "does not apply to this sample"): `drop_group`:
    the group fails; `drop_sample`: these siblings are dropped and counted in `reward/unscored`, and the group fails if
    fewer than two remain."""
    max_error_frac: Fraction = 0.5
    """Stop the run if more than this fraction of a step's prompts failed: a reward could not be computed, or the
    workflow raised."""

    @model_validator(mode="before")
    @classmethod
    def _of_functions(cls, value: Any) -> Any:
        """From Python, one function or a list of functions."""
        functions = value if isinstance(value, list) else [value] if callable(value) else None
        return value if functions is None else {"functions": functions}

    @property
    def sources(self) -> list[RewardSource]:
        return [*self.functions, *self.models, *self.judges, *self.http]

    @property
    def names(self) -> list[str]:
        return [source.name for source in self.sources] + self.by_workflow

    @property
    def weights(self) -> dict[str, float]:
        """Name -> weight in the sum that is the reward."""
        return {source.name: source.weight for source in self.sources}

    @property
    def engine_judges_by_key(self) -> dict[str, EngineJudge]:
        """Judges that run on engines of this run, {"rewards.judges.0": ...}; the others are behind a URL."""
        return {f"rewards.judges.{i}": j for i, j in enumerate(self.judges) if isinstance(j, EngineJudge)}

    @property
    def engine_judges(self) -> list[EngineJudge]:
        return list(self.engine_judges_by_key.values())

    @property
    def teachers(self) -> list[Teacher]:
        return [judge for judge in self.judges if isinstance(judge, Teacher)]

    @property
    def compares(self) -> bool:
        """Something else than teachers scores the responses."""
        return len(self.names) > len(self.teachers)

    @property
    def accuracy_name(self) -> str:
        return self.accuracy or self.names[0]

    @model_validator(mode="after")
    def _names(self) -> Rewards:
        names = self.names
        if len(set(names)) < len(names):
            raise ValueError(f"got the names {names}; expected each name once")
        if invalid := sorted(
            {name for name in names if name in RESERVED_NAMES or not name.replace("-", "_").isidentifier()}
        ):
            raise ValueError(
                f"got the names {invalid}; expected identifiers that are not names of other metrics reward/NAME"
            )
        if self.accuracy is not None and self.accuracy not in names:
            raise ValueError(f"rewards.accuracy: got {self.accuracy!r}; expected one of {names}")
        return self
