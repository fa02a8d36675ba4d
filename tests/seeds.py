"""How many seeds a seeded test runs with: some in `make test`, more in `make test-all`."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(usual: int, release: int) -> pytest.MarkDecorator:
    """`seed` from 0: the first `usual` always, the rest up to `release` before a release."""
    more = [pytest.param(seed, marks=pytest.mark.release) for seed in range(usual, release)]
    values: list[Any] = [*range(usual), *more]
    return pytest.mark.parametrize("seed", values)
