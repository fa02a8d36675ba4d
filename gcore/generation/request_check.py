"""Which requests an engine can serve."""

from __future__ import annotations

from collections.abc import Collection

from gcore.config.engines import engines_with
from gcore.content.families import KINDS
from gcore.content.tokens import tokens_of
from gcore.types import Request, UserError


def check_request(
    request: Request, max_length: int, vocabulary: int, accepts: Collection[str] = (), library: str = ""
) -> None:
    """Raise UserError for a request that cannot be served, before the engine gets it. `accepts`: kinds of media.
    `library`: vLLM or SGLang, which score the request's own steps (max_tokens=0) only at temperature 1, and need room
    for one more token."""
    params, content = request.params, tokens_of(request.content)
    tokens_T, total = content.tokens_T, content.size + params.max_tokens
    if len(tokens_T) == 0:
        raise UserError("an engine request has an empty prompt; expected at least one token (chat templates add some)")
    if tokens_T.min() < 0 or tokens_T.max() >= vocabulary:  # it would crash the engine
        raise UserError(
            f"an engine request has a token outside the vocabulary of {vocabulary}: tokens "
            f"{tokens_T.min()} to {tokens_T.max()} (does the tokenizer belong to this model?)"
        )
    scores = params.max_tokens == 0 and content.num_steps > 0 and len(content.tokens_P) > 0
    if params.max_tokens < 1 and not scores:
        raise UserError(f"an engine request has max_tokens {params.max_tokens}; expected at least 1")
    if total > max_length:
        raise UserError(
            f"prompt of {len(tokens_T)} tokens + max_tokens {params.max_tokens} = {total} exceeds the engine's "
            f"{max_length} (keys: data.max_prompt_length, generation.max_response_length)"
        )
    kinds = [medium.kind for medium in content.media]
    if refused := [kind for kind in kinds if kind not in accepts]:
        what, served = KINDS[refused[0]].plural, " and ".join(("text", *(KINDS[kind].plural for kind in accepts)))
        raise UserError(
            f"an engine request has {len(refused)} {what}, expected none: this engine serves {served} only "
            f"(keys: generation.media, and model.path or model.build of a model that takes {what})"
        )
    if kinds and scores:
        raise UserError(
            f"an engine request for the logprobs of given tokens has {len(kinds)} {KINDS[kinds[0]].plural}, expected "
            "none: teachers read only text (key: rewards.judges, mode=teacher)"
        )
    for medium in content.media:
        medium.check()
    if library and scores and params.temperature != 1:
        raise UserError(
            f"{library} returns logprobs of given tokens at temperature 1 and without images, got temperature "
            f"{params.temperature} (keys: generation.temperature=1, or "
            f"engine={engines_with('scores_at_any_temperature')} for the teacher)"
        )
    if library and scores and content.size >= max_length:
        raise UserError(
            f"{library} needs room for one more token to score {content.size} tokens; expected at most "
            f"{max_length - 1} (keys: data.max_prompt_length, generation.max_response_length)"
        )
