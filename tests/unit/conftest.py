"""Fixtures of unit tests."""

import pytest


@pytest.fixture(scope="module")
def one_rank():
    """This process is the only trainer rank, with one thread: sums then have one order."""
    import torch

    from gcore.protocols import Rendezvous
    from gcore.runtime.gloo import join

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    join(Rendezvous(0, 1, None), "gloo")
    yield
    torch.set_num_threads(threads)
