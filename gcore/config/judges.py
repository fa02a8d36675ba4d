"""Section `rewards.judges`: language models that score responses. Three kinds, each with its own keys.

ServedJudge   `model`           this run serves it; it writes verdicts
RemoteJudge   `url`             an OpenAI-compatible server has it; it writes verdicts
Teacher       `mode: teacher`   this run serves it; its logprobs of the policy's tokens are the rewards
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from gcore.config.base import Arguments, Auto, Count, Model, NonNegative, PositiveInt, RewardSource, Seconds, Serving
from gcore.config.engines import engines_with
from gcore.config.objects import FunctionPath


class EngineJudge(Serving, RewardSource):
    """A judge on engines of this run."""

    model: Model
    """The judge's language model, with its own tokenizer and chat template; alternative: `url`."""
    replicas: PositiveInt = 1
    """Engine processes of this judge."""


class VerdictJudge(RewardSource):
    """A judge that writes verdicts."""

    mode: Literal["pointwise", "pairwise"] = "pointwise"
    """`pointwise`: each response is judged separately; `pairwise`: against siblings, in both orders; the reward is the
    mean."""
    opponents: PositiveInt = 1
    """Pairwise: number of siblings that each response is compared with."""
    template: str
    """Jinja text of the user message, or the path of a file: `{{ prompt }}`, `{{ response }}` (pairwise: `response_a`,
    `response_b`), and the columns of the dataset, such as `{{ answer }}`."""
    system_prompt: str | None = None
    """System message before the user message."""
    images: bool | Auto = "auto"
    """Show the judge the images of the prompt, and responses that are images, before the text of the template. `auto`:
    if its model takes images; not with `url`, where true sends them as PNG."""
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
    max_response_length: PositiveInt = 256
    """Maximum number of tokens per verdict."""

    @model_validator(mode="before")
    @classmethod
    def _keys(cls, judge: Any) -> Any:
        if not isinstance(judge, Mapping):
            return judge
        if (judge.get("model") is None) == (judge.get("url") is None):
            raise ValueError("set exactly one of model (served by this run) and url (an OpenAI-compatible server)")
        other = "url" if issubclass(cls, EngineJudge) else "model"
        _refuse_others(judge, cls, f"only for judges with {other}; this judge has no {other}")
        if not judge.get("template"):
            raise ValueError("template: not set; expected a Jinja text with {{ response }}, or the path of a file")
        return judge


class ServedJudge(VerdictJudge, EngineJudge):
    max_prompt_length: PositiveInt = 2048
    """Maximum length of the judge's prompt in its tokens; a longer one fails and is not cut. With `url` the server's
    limit applies."""

    @property
    def max_length(self) -> int:
        """Of a prompt and its verdict, in tokens."""
        return self.max_prompt_length + self.max_response_length


class RemoteJudge(VerdictJudge):
    url: str
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
    """`url`: maximum number of concurrent requests per controller."""
    seeds: bool = True
    """`url`: send a seed with each request, so that verdicts are reproducible."""


class Teacher(EngineJudge):
    mode: Literal["teacher"]
    """`teacher`: on-policy distillation: the model writes nothing; the log ratio of its probability and the policy's is
    added to the advantage of each token, times `weight`, see docs/preference.md. It needs the tokenizer of the
    policy."""

    @model_validator(mode="before")
    @classmethod
    def _keys(cls, judge: Any) -> Any:
        if isinstance(judge, Mapping):
            if judge.get("model") is None:
                raise ValueError(
                    f"mode=teacher needs a model on engine={engines_with('scores')}"
                    f"{', got url' if 'url' in judge else ''}: servers do not return logprobs of given tokens"
                )
            _refuse_others(judge, cls, "only for judges that write verdicts (mode=pointwise or pairwise)")
        return judge

    @model_validator(mode="after")
    def _scores(self) -> Teacher:
        if not self.traits.scores:
            raise ValueError(
                f"mode=teacher needs a model on engine={engines_with('scores')}, got engine={self.engine}: other "
                "engines do not return logprobs of given tokens"
            )
        return self


def _refuse_others(judge: Mapping[str, Any], own: type[BaseModel], why: str) -> None:
    """Raises ValueError if a key is of another kind of judge."""
    known = ServedJudge.model_fields | RemoteJudge.model_fields
    if others := [name for name in known if name in judge and name not in own.model_fields]:
        raise ValueError(f"{', '.join(others)}: {why}")


def _kind(judge: Any) -> str:
    if isinstance(judge, Mapping):
        if judge.get("mode") == "teacher":
            return "teacher[]"
        return "served[]" if judge.get("url") is None else "remote[]"
    return "remote[]" if isinstance(judge, RemoteJudge) else "teacher[]" if isinstance(judge, Teacher) else "served[]"


Judge = Annotated[
    Annotated[ServedJudge, Tag("served[]")]
    | Annotated[RemoteJudge, Tag("remote[]")]
    | Annotated[Teacher, Tag("teacher[]")],
    Discriminator(_kind),
]
