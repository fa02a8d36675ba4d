"""The part of the configuration that says how responses are scored: rules, scalar models, judges, servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gcore.config.base import Auto, Count, Fraction, Model, NonNegative, PositiveInt, Seconds, Section, Serving

TAKEN = ("mean", "mean_drawn", "std", "zero_spread_frac", "errors", "retries", "timeouts", "unscored")  # as reward/NAME

# keys of a judge that say how its model is served here, and how a server is asked
OF_MODELS = (
    *("engine", "emulated", "device", "dtype", "gpu_memory_utilization", "tensor_parallel", "eager"),
    *("replicas", "max_prompt_length"),
)
OF_URLS = ("served_model", "token_env", "timeout_s", "retries", "extra")


class RewardFunction(Section):
    name: str
    """Name in the logs: `reward/NAME`."""
    path: str
    """`package.module:NAME` or `file.py:NAME`: a function of TRL's, verl's or OpenRLHF's signature, a class whose
    instances are called so, or a factory that returns such a function."""
    weight: float = 1.0
    """Weight in the sum."""
    args: dict[str, Any] = {}
    """Extra keyword arguments of every call; for a class or factory, the arguments that make the reward."""
    timeout_s: Seconds | None = None
    """A call that takes longer is killed and counts as failed; default: `rewards.timeout_s`."""


class ScalarReward(Section):
    name: str
    """Name in the logs: `reward/NAME`."""
    model: Model
    """A sequence-classification model with one label (Bradley-Terry), with a tokenizer and chat template of its own:
    `gcore train-rm` makes one."""
    weight: float = 1.0
    """Weight in the sum."""
    replicas: PositiveInt = 1
    """Processes that serve it."""
    max_length: PositiveInt | Auto = "auto"
    """Longest conversation in its tokens; a longer one fails, it is not cut. `auto`: the model's context window."""
    max_tokens_per_batch: PositiveInt = 16384
    """Most tokens that are scored in one batch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs; `auto`: as `training.device`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of its weights; `auto`: float32 on CPU, bfloat16 on GPU."""


class Judge(Serving):
    name: str
    """Name in the logs: `reward/NAME`."""
    model: Model | None = None
    """Another language model, with a tokenizer and chat template of its own; or `url`."""
    url: str | None = None
    """An OpenAI-compatible server (vLLM, SGLang, a vendor) instead of `model`: what stands before `/chat/completions`,
    such as `http://HOST:8000/v1`. No replicas, no tokenizer."""
    served_model: str | None = None
    """`url`: the model's name there; servers of one model often need none."""
    token_env: str | None = None
    """`url`: environment variable that holds a bearer token."""
    timeout_s: Seconds = 120.0
    """`url`: of one try."""
    retries: Count = 5
    """`url`: further tries when the server is slow, busy (429), broken (5xx), away or talks nonsense, with growing,
    jittered pauses; other 4xx fail at once."""
    extra: dict[str, Any] = {}
    """`url`: further parameters of a request, for the server; null takes away one of `max_tokens`, `temperature`,
    `top_p`."""
    max_concurrent: PositiveInt = 256
    """Sequences a replica decodes at once; more wait in its queue. `url`: requests of one controller at a time."""
    seeds: bool | Auto = "auto"
    """Give every request a seed of its own, so that verdicts repeat. vLLM: costs speed on GPUs; `auto`: on CPU. `url`:
    sent along, unless this is false."""
    template: str
    """Jinja text of the user message, or the path of a file: `{{ prompt }}`, `{{ response }}` (pairwise: `response_a`,
    `response_b`), and the columns of the dataset, as `{{ answer }}`."""
    system_prompt: str | None = None
    """System message before it."""
    weight: float = 1.0
    """Weight in the sum."""
    mode: Literal["pointwise", "pairwise"] = "pointwise"
    """`pointwise`: each response by itself; `pairwise`: against siblings, in both orders; the reward is the mean."""
    opponents: PositiveInt = 1
    """Pairwise: how many siblings each response is compared with."""
    verdict: str = r"(-?\d+(?:\.\d+)?)"
    """How to read a verdict: a regular expression whose first group counts (the last match in the text), or a function
    `package.module:f` or `file.py:f` from the text to a number or None."""
    values: dict[str, float] = {}
    """What the matched words are worth, such as `{yes: 1, no: 0}`; without it the match is read as a number.
    Pairwise: the worth to the first response; the second gets 1 minus it."""
    repeats: PositiveInt = 1
    """Verdicts asked for each response and averaged."""
    attempts: PositiveInt = 3
    """Tries at a verdict that can be read; then the group is dropped and counted."""
    temperature: NonNegative = 1.0
    """Sampling temperature of the verdicts."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 is off."""
    max_prompt_length: PositiveInt = 2048
    """Longest prompt of the judge in its tokens; a longer one fails, it is not cut. `url`: the server's to say."""
    max_response_length: PositiveInt = 256
    """Most tokens of a verdict."""
    replicas: PositiveInt = 1
    """Engine processes of this judge."""

    @model_validator(mode="after")
    def _one_voice(self) -> Judge:
        """A key that would do nothing is a mistake, unless it has its default: a resolved recipe names all of them."""
        if (self.model is None) == (self.url is None):
            raise ValueError("set exactly one of model (served by this run) and url (an OpenAI-compatible server)")
        idle, other = (OF_MODELS, "model") if self.url is not None else (OF_URLS, "url")
        fields = type(self).model_fields
        if useless := [name for name in idle if getattr(self, name) != fields[name].default]:
            raise ValueError(f"{', '.join(useless)}: of judges with {other}; this one has none")
        return self


class HttpReward(Section):
    name: str
    """Name in the logs: `reward/NAME`."""
    url: str
    """Receives `{"prompts": [...], "completions": [...], COLUMN: [...]}` by POST and answers `{"rewards": [...]}`."""
    weight: float = 1.0
    """Weight in the sum."""
    timeout_s: Seconds = 30.0
    """Of one try."""
    attempts: PositiveInt = 4
    """Tries when the server is slow, busy (429) or broken (5xx), with growing, jittered pauses; other 4xx fail at
    once."""
    max_concurrent: PositiveInt = 32
    """Requests of one controller at a time."""
    token_env: str | None = None
    """Environment variable that holds a bearer token."""
    columns: list[str] = []
    """Columns of the dataset to send along; default: `answer` where there is one."""


class Rewards(Section):
    functions: list[RewardFunction] = []
    """Rules: functions, called in worker processes. The reward is the weighted sum over all four lists."""
    models: list[ScalarReward] = []
    """Scalar reward models."""
    judges: list[Judge] = []
    """Generative judges."""
    http: list[HttpReward] = []
    """Reward servers."""
    accuracy: str | None = None
    """Name of the reward whose value counts as accuracy in evaluations; default: the first."""
    attempts: PositiveInt = 2
    """Tries of a function or model before the failure drops the group (counted in `reward/errors`, never a 0)."""
    timeout_s: Seconds = 30.0
    """A call of a function that takes longer is killed, with its worker, and tried again."""
    workers: Count | Auto = "auto"
    """Worker processes of each controller for functions; 0 calls them in threads of the controller, for debuggers:
    nothing can be killed then. `auto`: cores shared by the controllers, at most 4; 0 with `runtime=local`."""
    recycle_after: PositiveInt = 10_000
    """Calls after which a worker is replaced by a fresh one: what a function leaks is given back."""
    unscored: Literal["drop_group", "drop_sample"] = "drop_group"
    """What happens when every source returns None for some siblings of a prompt (TRL: "does not apply to this sample").
    `drop_group`: the group counts as failed; `drop_sample`: those siblings are left out and counted in
    `reward/unscored`, and the group fails when fewer than two remain."""
    max_error_frac: Fraction = 0.5
    """Stop the run when more than this share of a step's drawn prompts failed: a reward could not be computed, or the
    workflow raised."""

    @property
    def names(self) -> list[str]:
        specs: list[Any] = [*self.functions, *self.models, *self.judges, *self.http]
        return [spec.name for spec in specs]

    @property
    def engine_judges(self) -> list[Judge]:
        """Those that run here, on engines; the others are behind a URL."""
        return [judge for judge in self.judges if judge.model is not None]

    @property
    def accuracy_name(self) -> str:
        return self.accuracy or self.names[0]

    @model_validator(mode="after")
    def _names(self) -> Rewards:
        names = self.names
        if not names:
            raise ValueError("expected at least one of rewards.functions, models, judges or http")
        if len(set(names)) < len(names):
            raise ValueError(f"names must be different, got {names}")
        if taken := sorted({name for name in names if name in TAKEN or not name.replace("-", "_").isidentifier()}):
            raise ValueError(f"names are words, and not those of other metrics reward/NAME; got {taken}")
        if self.accuracy is not None and self.accuracy not in names:
            raise ValueError(f"rewards.accuracy={self.accuracy!r} names none of {names}")
        return self
