"""Sampling noise that depends on the sample, not on the process that draws it.

The uniform number that selects the token at `position` of sibling `sibling` of prompt `prompt_id` is a hash of
(seed, prompt_id, sibling, position). So the samples of a run do not depend on the number of controllers or engines, on
the other requests in the batch, or on the order of arrival.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_ALL = (1 << 64) - 1


def noise_key(*names: object) -> int:
    """64 bits that identify one noise stream: noise_key(seed, prompt_id, sibling)."""
    digest = hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniforms(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (key, position)."""
    return (bits(keys, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform(key: int, position: int) -> float:
    """The same for one of them: without arrays it takes a microsecond."""
    z = (key + (position + 1) * int(_GOLDEN)) & _ALL
    z = ((z ^ (z >> 30)) * int(_MIX_1)) & _ALL
    z = ((z ^ (z >> 27)) * int(_MIX_2)) & _ALL
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


def bits(keys: npt.NDArray[np.uint64] | np.uint64, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """SplitMix64: the position-th output of the key's stream, for each (key, position)."""
    with np.errstate(over="ignore"):
        z = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        return z ^ (z >> np.uint64(31))
