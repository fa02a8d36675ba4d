"""Which requests an engine can serve."""

from __future__ import annotations

import numpy as np

from gcore.content.media import resolve
from gcore.content.tokens import tokens_of
from gcore.types import Request, UserError


def check_request(request: Request, max_length: int, vocabulary: int, accepts_images: bool = False) -> None:
    """Raise UserError for a request that cannot be served, before vLLM or SGLang gets it."""
    params, content = request.params, tokens_of(request.content)
    tokens_T, total = content.tokens_T, content.size + params.max_tokens
    if len(tokens_T) == 0:
        raise UserError("an engine request has an empty prompt; expected at least one token (chat templates add some)")
    if tokens_T.min() < 0 or tokens_T.max() >= vocabulary:  # it would crash the engine
        raise UserError(
            f"an engine request has a token outside the vocabulary of {vocabulary}: tokens "
            f"{tokens_T.min()} to {tokens_T.max()} (does the tokenizer belong to this model?)"
        )
    if params.max_tokens < 1:
        raise UserError(f"an engine request has max_tokens {params.max_tokens}; expected at least 1")
    if total > max_length:
        raise UserError(
            f"prompt of {len(tokens_T)} tokens + max_tokens {params.max_tokens} = {total} exceeds the engine's "
            f"{max_length} (keys: data.max_prompt_length, generation.max_response_length)"
        )
    if content.images and not accepts_images:
        raise UserError(
            f"an engine request has {len(content.images)} images, expected none: this engine serves text only "
            "(keys: generation.engine=vllm, and model.path of a model that takes images)"
        )
    for image in map(resolve, content.images):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
            raise UserError(
                f"an engine request has an image of {image.dtype} and shape {image.shape}; "
                "expected uint8, height x width x 3 (Tokens.images)"
            )
