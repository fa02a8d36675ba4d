from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def return_the_lent() -> Iterator[None]:
    """The engines of vLLM that tests of both files borrow."""
    yield
    from tests.contract.test_engine import lent

    while lent:
        lent.popitem()[1].close()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Engines are compared bit by bit with transformers: on one thread, sums have one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture()
def compiled_layers(monkeypatch) -> Iterator[Any]:
    """Layers are traced, each in one graph, and run without generated code. Counts what was traced."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter, original = CompileCounter(), torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: original(module, backend=counter, fullgraph=True))
    with torch._dynamo.config.patch(suppress_errors=False):  # restored afterwards: what is compiled changes it
        yield counter
    torch._dynamo.reset()
