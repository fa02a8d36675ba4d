from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def return_the_lent() -> Iterator[None]:
    """The engines of vLLM that tests of both files borrow."""
    yield
    from tests.contract.test_engine import lent

    while lent:
        lent.popitem()[1].close()
