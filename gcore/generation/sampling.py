"""From logits to tokens: inverse transform sampling with each row's own noise, independent of the other rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gcore.generation.noise import uniforms
from gcore.types import Ints, Request


class SamplingRows:
    """Sampling parameters per row, as arrays: set when a request gets the row, moved when the row moves."""

    def __init__(self, capacity: int) -> None:
        self.temperature = np.ones(capacity, np.float32)
        self.top_p = np.ones(capacity, np.float32)
        self.top_k = np.zeros(capacity, np.int64)
        self.noise_key = np.zeros(capacity, np.uint64)
        self.keep_mask = np.zeros(capacity, np.bool_)
        self.position = np.zeros(capacity, np.int64)  # of the next token in the sample's noise stream

    def put(self, row: int, request: Request) -> None:
        params = request.params
        self.temperature[row], self.top_p[row], self.top_k[row] = params.temperature, params.top_p, params.top_k
        self.keep_mask[row] = params.keep_mask and params.temperature > 0 and (params.top_k > 0 or params.top_p < 1)
        self.noise_key[row], self.position[row] = request.noise_key, request.position

    def move(self, source: int, target: int) -> None:
        for array in (self.temperature, self.top_p, self.top_k, self.keep_mask, self.noise_key, self.position):
            array[target] = array[source]


def sample(logits: Tensor, rows: SamplingRows) -> tuple[np.ndarray, np.ndarray, dict[int, Ints]]:
    """Per row of `logits`: the next token and its logprob. Also the candidates by row. Temperature 0 is greedy.

    Increments the positions. Candidates are the tokens that top-k and top-p left to choose from. They are returned for
    rows with `keep_mask` only, and the logprob of such a row is computed among its candidates.
    """
    n, device = len(logits), logits.device
    temperature = rows.temperature[:n]
    greedy = temperature == 0
    scaled_BV = logits.float()
    if (temperature != 1).any():
        scaled_BV = scaled_BV / torch.from_numpy(np.where(greedy, 1, temperature)).to(device)[:, None]
    logprobs_BV, probs_BV = torch.log_softmax(scaled_BV, dim=-1), torch.softmax(scaled_BV, dim=-1)
    if rows.top_k[:n].any() or (rows.top_p[:n] < 1).any():
        probs_BV = _truncate(probs_BV, rows)
    noise = torch.from_numpy(uniforms(rows.noise_key[:n], rows.position[:n])).clamp_(max=1 - 2.0**-24)
    rows.position[:n] += 1
    cumulative = probs_BV.cumsum(-1)
    tokens = torch.searchsorted(cumulative, noise.float().to(device)[:, None] * cumulative[:, -1:], right=True)[:, 0]
    tokens.clamp_(max=logits.shape[-1] - 1)
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy).to(device), logits.argmax(-1), tokens)
    logprobs = logprobs_BV.gather(-1, tokens[:, None])[:, 0]
    candidates: dict[int, Ints] = {}
    if (masked := np.flatnonzero(rows.keep_mask[:n])).size:
        probs_MV = probs_BV[torch.from_numpy(masked).to(device)]
        candidates = {int(i): row.nonzero()[:, 0].int().cpu().numpy() for i, row in zip(masked, probs_MV, strict=True)}
        logprobs[torch.from_numpy(masked).to(device)] -= probs_MV.sum(-1).log()
    return tokens.cpu().numpy(), logprobs.cpu().numpy(), candidates


def _truncate(probs_BV: Tensor, rows: SamplingRows) -> Tensor:
    """Set excluded tokens to 0: first top-k, then top-p of what top-k left. The most likely token always stays."""
    n, vocabulary = probs_BV.shape
    sorted_BV, order = probs_BV.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocabulary, device=probs_BV.device)
    top_k = torch.from_numpy(np.where(rows.top_k[:n] == 0, vocabulary, rows.top_k[:n])).to(probs_BV.device)
    top_p = torch.from_numpy(rows.top_p[:n].copy()).to(probs_BV.device)
    sorted_BV = sorted_BV * (rank < top_k[:, None])
    cumulative = sorted_BV.cumsum(-1)
    keep = (cumulative - sorted_BV < top_p[:, None] * cumulative[:, -1:]) | (rank == 0)
    return torch.zeros_like(probs_BV).scatter_(-1, order, sorted_BV * keep)
