"""Section `rewards`: how responses are scored, by rules, scalar models, judges and servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gcore.config.base import (
    Arguments,
    Auto,
    Count,
    Fraction,
    Model,
    NonNegative,
    PositiveInt,
    Seconds,
    Section,
    Serving,
)
from gcore.config.engines import engines_with
from gcore.config.objects import FunctionPath

# names of other metrics reward/NAME
RESERVED_NAMES = ("mean", "mean_drawn", "std", "zero_spread_frac", "errors", "retries", "timeouts", "unscored")

# keys only for judges with `model`, and only for judges with `url`
OF_MODELS = (
    *("engine", "emulated", "device", "dtype", "gpu_memory_utilization", "tensor_parallel", "eager"),
    *("replicas", "max_prompt_length"),
)
OF_URLS = ("served_model", "token_env", "timeout_s", "retries", "extra")


class RewardFunction(Section):
    name: str
    """Name in the logs: `reward/NAME`."""
    path: FunctionPath
    """`package.module:NAME` or `file.py:NAME`: a function with TRL's, verl's or OpenRLHF's signature, a class whose
    instances are callable with one of them, or a factory that returns such a function."""
    weight: float = 1.0
    """Weight in the sum."""
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


class ScalarReward(Section):
    name: str
    """Name in the logs: `reward/NAME`."""
    model: Model
    """A sequence-classification model with one label (Bradley-Terry), with its own tokenizer and chat template.
    `objective: reward_model` trains one."""
    weight: float = 1.0
    """Weight in the sum."""
    replicas: PositiveInt = 1
    """Processes that serve the model."""
    max_length: PositiveInt | Auto = "auto"
    """Maximum length of a conversation in the model's tokens; a longer one fails and is not cut. `auto`: the model's
    context window."""
    max_tokens_per_batch: PositiveInt = 16384
    """Maximum number of tokens per batch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; `auto`: as `training.device`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the weights; `auto`: float32 on CPU, bfloat16 on GPU."""


class Judge(Serving):
    name: str
    """Name in the logs: `reward/NAME`."""
    model: Model | None = None
    """The judge's language model, with its own tokenizer and chat template; alternative: `url`."""
    url: str | None = None
    """An OpenAI-compatible server (vLLM, SGLang, a vendor) instead of `model`: the part of its URL before
    `/chat/completions`, such as `http://HOST:8000/v1`. Such a judge has no replicas and no tokenizer."""
    served_model: str | None = None
    """`url`: the model's name on the server; servers of a single model often do not need it."""
    token_env: str | None = None
    """`url`: environment variable that holds a bearer token."""
    timeout_s: Seconds = 120.0
    """`url`: timeout of one attempt."""
    retries: Count = 5
    """`url`: retries after a timeout, status 429 or 5xx, a connection error or an invalid answer, with growing,
    jittered delays; other 4xx fail immediately."""
    extra: Arguments = {}
    """`url`: further parameters of each request; null removes one of `max_tokens`, `temperature`, `top_p`."""
    max_concurrent: PositiveInt = 256
    """Maximum number of sequences that a replica decodes at once; further requests queue. `url`: maximum number of
    concurrent requests per controller."""
    seeds: bool | Auto = "auto"
    """A separate seed per request, so that verdicts are reproducible. vLLM: slower on GPUs; `auto`: only on CPU. `url`:
    seeds are sent unless this is false."""
    template: str = ""
    """Jinja text of the user message, or the path of a file: `{{ prompt }}`, `{{ response }}` (pairwise: `response_a`,
    `response_b`), and the columns of the dataset, such as `{{ answer }}`."""
    system_prompt: str | None = None
    """System message before the user message."""
    images: bool | Auto = "auto"
    """Show the judge the images of the prompt, and responses that are images, before the text of the template. `auto`:
    if its model takes images; not with `url`, where true sends them as PNG."""
    weight: float = 1.0
    """Weight in the sum. `teacher`: weight of its logprobs in the advantages of the tokens."""
    mode: Literal["pointwise", "pairwise", "teacher"] = "pointwise"
    """`pointwise`: each response is judged separately; `pairwise`: against siblings, in both orders; the reward is the
    mean. `teacher`: on-policy distillation: the model writes nothing; the log ratio of its probability and the
    policy's is added to the advantage of each token, see docs/preference.md. It needs the tokenizer of the policy."""
    opponents: PositiveInt = 1
    """Pairwise: number of siblings that each response is compared with."""
    verdict: FunctionPath = r"(-?\d+(?:\.\d+)?)"
    """How to parse a verdict: a regular expression, of which the first group of the last match is used, or a function
    `package.module:f` or `file.py:f` from the text to a number or None."""
    values: dict[str, float] = {}
    """Reward per matched word, such as `{yes: 1, no: 0}`; without it the match is parsed as a number. Pairwise: the
    reward of the first response; the second gets 1 minus it."""
    repeats: PositiveInt = 1
    """Verdicts per response; the reward is their mean."""
    attempts: PositiveInt = 3
    """Attempts per verdict until it can be parsed; then the group is dropped and counted."""
    temperature: NonNegative = 1.0
    """Sampling temperature of the verdicts."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 is off."""
    max_prompt_length: PositiveInt = 2048
    """Maximum length of the judge's prompt in its tokens; a longer one fails and is not cut. `url`: the server's limit
    applies."""
    max_response_length: PositiveInt = 256
    """Maximum number of tokens per verdict."""
    replicas: PositiveInt = 1
    """Engine processes of this judge."""

    @model_validator(mode="after")
    def _one_backend(self) -> Judge:
        """A key without effect is an error, unless it has its default value: a saved config contains all keys."""
        if self.mode == "teacher" and (self.model is None or not self.traits.scores):
            raise ValueError(
                f"mode=teacher needs a model on engine={engines_with('scores')}, got engine={self.engine}"
                f"{', url' if self.url else ''}: other engines do not return logprobs of given tokens"
            )
        if not self.template and self.mode != "teacher":
            raise ValueError("template: not set; expected a Jinja text with {{ response }}, or the path of a file")
        if (self.model is None) == (self.url is None):
            raise ValueError("set exactly one of model (served by this run) and url (an OpenAI-compatible server)")
        unused, other = (OF_MODELS, "model") if self.url is not None else (OF_URLS, "url")
        fields = type(self).model_fields
        if given := [name for name in unused if getattr(self, name) != fields[name].default]:
            raise ValueError(f"{', '.join(given)}: only for judges with {other}; this judge has no {other}")
        return self


class HttpReward(Section):
    name: str
    """Name in the logs: `reward/NAME`."""
    url: str
    """Receives `{"prompts": [...], "completions": [...], COLUMN: [...]}` by POST and answers `{"rewards": [...]}`."""
    weight: float = 1.0
    """Weight in the sum."""
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
    """Generative judges."""
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
    def names(self) -> list[str]:
        specs: list[Any] = [*self.functions, *self.models, *self.judges, *self.http]
        return [spec.name for spec in specs] + self.by_workflow

    @property
    def weights(self) -> dict[str, float]:
        """Name -> weight in the sum that is the reward."""
        specs: list[Any] = [*self.functions, *self.models, *self.judges, *self.http]
        return {spec.name: spec.weight for spec in specs}

    @property
    def engine_judges(self) -> list[Judge]:
        """Judges that run on engines of this run; the others are behind a URL."""
        return [judge for judge in self.judges if judge.model is not None]

    @property
    def compares(self) -> bool:
        """Something else than teachers scores the responses."""
        return any(name not in {j.name for j in self.judges if j.mode == "teacher"} for name in self.names)

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
