"""The attention function of packed rows, for models of transformers: of one rank, or of a group of ranks.

layer ──query, key, value of this rank's tokens──> attend ──┬── the whole row is here: varlen.py
                                                            ├── Ulysses: each rank computes some heads of the row
                                                            └── ring: keys and values pass by (context.py)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gcore.training import ring, ulysses
from gcore.training.context import Sharing
from gcore.training.varlen import Spans, attend_row

NAME = "gcore_packed"


def register() -> None:
    """Transformers calls `attend` in models whose configuration names it, and makes no mask for it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


def attend(
    module: Any,
    query_1HTD: Tensor,
    key_1GTD: Tensor,
    value_1GTD: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    sharing: Sharing | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """`cu_seq_lens_q`, `max_length_q`: the samples of the row. `sharing`: this rank has a part of the row."""
    query_THD, key_TGD, value_TGD = (tensor[0].transpose(0, 1) for tensor in (query_1HTD, key_1GTD, value_1GTD))
    scale = query_THD.shape[-1] ** -0.5 if scaling is None else scaling
    if sharing is not None:
        return _attend_shared(query_THD, key_TGD, value_TGD, sharing, scale, sliding_window)[None], None
    spans = Spans(cu_seq_lens_q, max_length_q)
    return attend_row(query_THD, key_TGD, value_TGD, spans, scale, sliding_window)[None], None


@torch.compiler.disable  # communication stays out of compiled layers
def _attend_shared(
    query_LHD: Tensor, key_LGD: Tensor, value_LGD: Tensor, sharing: Sharing, scale: float, window: int | None
) -> Tensor:
    if sharing.method == "ulysses":
        return ulysses.attend(query_LHD, key_LGD, value_LGD, sharing, scale, window)
    assert window is None, "context.choose_method refuses windows"
    return ring.attend(query_LHD, key_LGD, value_LGD, sharing, scale)
