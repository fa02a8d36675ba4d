"""The output layer in chunks gives the values and gradients of the plain one, without its memory."""

from __future__ import annotations

import pytest
import torch

from gcore.models.decoders import forbid
from gcore.training.fused_head import Head, Scaling, token_logprobs


def plain(hidden, weight, targets, temperature, scaling):
    logits = hidden @ weight.t() * scaling.scale
    if scaling.cap is not None:
        logits = torch.tanh(logits / scaling.cap) * scaling.cap
    logprobs = torch.log_softmax(forbid(logits / temperature[:, None], scaling.forbidden), -1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def inputs(steps=37, width=12, vocabulary=53, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(steps, width, generator=generator, dtype=dtype)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype)
    targets = torch.randint(vocabulary - 2, (steps,), generator=generator)  # the last two may be forbidden
    temperature = 0.5 + torch.rand(steps, generator=generator, dtype=torch.float32).to(dtype)
    return hidden, weight, targets, temperature


def gradients(function, hidden, weight, loss_of):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = loss_of(*function(hidden, weight))
    return (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))


LOSSES = {
    "logprobs": lambda logprobs, entropy: (logprobs * torch.linspace(-1, 2, len(logprobs))).sum(),
    "entropy": lambda logprobs, entropy: (entropy * torch.linspace(0.5, 1, len(entropy))).sum(),
    "both": lambda logprobs, entropy: (logprobs.exp() - 0.1 * entropy).sum(),
}


SCALINGS = {
    "plain": Scaling(),
    "scaled": Scaling(0.25),
    "capped": Scaling(2.0, 3.0),
    "forbidden": Scaling(forbidden=(51, 52)),
}


@pytest.mark.parametrize("chunk", [1, 8, 37, 100])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("loss", LOSSES)
def test_values_and_gradients_are_those_of_the_plain_layer(chunk, scaling, loss):
    hidden, weight, targets, temperature = inputs(dtype=torch.float32)
    found = gradients(
        lambda h, w: token_logprobs(Head(chunk, scaling), h, w, targets, temperature), hidden, weight, LOSSES[loss]
    )
    expected = gradients(lambda h, w: plain(h, w, targets, temperature, scaling), hidden, weight, LOSSES[loss])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("padded", [0, 2])
@pytest.mark.parametrize("kept", [True, False])
def test_candidates_and_rows_that_only_pad(kept, padded):
    """One rank here; groups of ranks are in the contract tests."""
    hidden, weight, targets, temperature = inputs(steps=7, width=6, vocabulary=11, dtype=torch.float32)
    targets = torch.tensor([0, 3, 10, 5, 2, 2, 7])
    ids, counts = torch.tensor([0, 4, 3, 10, 1, 5, 7]), torch.tensor([2, 1, 2, 1, 0, 0, 1])  # 0: all tokens
    rows = [[0, 4], [3], [10, 1], [5], range(11), range(11), [7]]
    allowed = torch.tensor([[token in row for token in range(11)] for row in rows])

    def expected_of(h, w):
        logits = h @ w.t() / temperature[:, None]
        logprobs = torch.log_softmax(logits.masked_fill(~allowed, -1e9) if kept else logits, -1)
        return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)

    def found_of(h, w):
        rest = torch.full((padded, w.shape[1]), 5.0)
        head, candidates = Head(2, size=11), (ids, counts) if kept else None
        return token_logprobs(head, h, torch.cat([w, rest]), targets, temperature, candidates)

    found, expected = (gradients(function, hidden, weight, LOSSES["both"]) for function in (found_of, expected_of))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def test_frozen_weights_get_no_gradient():
    hidden, weight, targets, temperature = inputs(dtype=torch.float32)
    hidden.requires_grad_()
    token_logprobs(Head(8), hidden, weight, targets, temperature)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_no_more_than_a_chunk_of_logits_is_held():
    """Counted in the largest tensor that any operation makes, forward and backward."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(tensor, torch.Tensor):
                    self.size = max(self.size, tensor.numel())
            return result

    hidden, weight, targets, temperature = inputs(steps=4000, width=4, vocabulary=300, dtype=torch.float32)
    hidden.requires_grad_()
    with Largest() as fused:
        token_logprobs(Head(100), hidden, weight, targets, temperature)[0].sum().backward()
    with Largest() as naive:
        plain(hidden, weight, targets, temperature, Scaling())[0].sum().backward()
    assert naive.size == 4000 * 300 and fused.size == 100 * 300
