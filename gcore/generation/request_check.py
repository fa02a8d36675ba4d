"""Which requests an engine can serve."""

from __future__ import annotations

from gcore.content.tokens import tokens_of
from gcore.types import Request, UserError


def check_score(request: Request, max_length: int, engine: str) -> None:
    """Raise UserError if vLLM or SGLang cannot return the logprobs of the request's own steps."""
    if request.params.temperature != 1 or tokens_of(request.content).media:
        raise UserError(
            f"{engine} returns logprobs of given tokens at temperature 1 and without images, got temperature "
            f"{request.params.temperature} (keys: generation.temperature=1, or engine=embedded for the teacher)"
        )
    if request.content.size >= max_length:
        raise UserError(
            f"{engine} needs room for one more token to score {request.content.size} tokens; expected at most "
            f"{max_length - 1} (keys: data.max_prompt_length, generation.max_response_length)"
        )


def check_request(
    request: Request, max_length: int, vocabulary: int, accepts_images: bool = False, scores: bool = False
) -> None:
    """Raise UserError for a request that cannot be served, before vLLM or SGLang gets it. `scores`: the engine serves
    requests that generate nothing and return the logprobs of their own steps."""
    params, content = request.params, tokens_of(request.content)
    tokens_T, total = content.tokens_T, content.size + params.max_tokens
    if len(tokens_T) == 0:
        raise UserError("an engine request has an empty prompt; expected at least one token (chat templates add some)")
    if tokens_T.min() < 0 or tokens_T.max() >= vocabulary:  # it would crash the engine
        raise UserError(
            f"an engine request has a token outside the vocabulary of {vocabulary}: tokens "
            f"{tokens_T.min()} to {tokens_T.max()} (does the tokenizer belong to this model?)"
        )
    if params.max_tokens < 1 and not (
        scores and params.max_tokens == 0 and content.num_steps and len(content.tokens_P)
    ):
        raise UserError(f"an engine request has max_tokens {params.max_tokens}; expected at least 1")
    if total > max_length:
        raise UserError(
            f"prompt of {len(tokens_T)} tokens + max_tokens {params.max_tokens} = {total} exceeds the engine's "
            f"{max_length} (keys: data.max_prompt_length, generation.max_response_length)"
        )
    if content.media and not accepts_images:
        raise UserError(
            f"an engine request has {len(content.media)} images, expected none: this engine serves text only "
            "(key: model.path or model.build of a model that takes images)"
        )
    if content.media and params.max_tokens == 0:
        raise UserError(
            f"an engine request for the logprobs of given tokens has {len(content.media)} images, expected none: "
            "teachers read only text (key: rewards.judges, mode=teacher)"
        )
    for medium in content.media:
        shape, dims = medium.pixels.shape, 3 if medium.kind == "image" else 4
        if str(medium.pixels.dtype) != "uint8" or len(shape) != dims or shape[-1] != 3 or not all(shape):
            raise UserError(
                f"an engine request has an image of {medium.pixels.dtype} and shape {shape}; "
                "expected uint8, height x width x 3 (Tokens.media)"
            )
