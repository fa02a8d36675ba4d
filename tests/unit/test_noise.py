"""Sampling noise: one pinned stream, uniform, and different for every sample and position."""

import numpy as np
import pytest

from gcore.generation.noise import noise_key, uniforms


def stream(key: int, length: int, start: int = 0) -> np.ndarray:
    return uniforms(np.full(length, key, np.uint64), np.arange(start, start + length))


def test_keys_never_change():
    """Recorded runs and their digests depend on these numbers: a change here is a change of every run."""
    assert noise_key(0, 0, 0) == 9617123944752223253
    assert noise_key(0, 70, 3) == 631590824432905067
    assert noise_key(-1, 2**40, 7) == 6105060159669724784


def test_stream_never_changes():
    key = noise_key(0, 70, 3)
    found = uniforms(np.array([key, key, key, 0, 2**64 - 1], np.uint64), np.array([0, 1, 1000, 0, 2**31]))
    assert found.tolist() == [
        0.5970383141762494,
        0.2212353113695591,
        0.4165787657628507,
        0.8833108082136426,
        0.2601204453271765,
    ]


def test_is_splitmix64():
    """The reference generator, in plain integers: the state advances by the golden gamma, the output is mixed."""

    def reference(state: int) -> float:
        z = (state + 0x9E3779B97F4A7C15) % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return ((z ^ (z >> 31)) >> 11) / 2**53

    for key in (0, 1, noise_key(5, 6, 7), 2**64 - 1):
        states = [(key + i * 0x9E3779B97F4A7C15) % 2**64 for i in range(50)]
        assert stream(key, 50).tolist() == [reference(s) for s in states]
    # the published first outputs for seed 1234567
    assert [int(u * 2**53) for u in stream(1234567, 3)] == [
        n >> 11 for n in (6457827717110365317, 3203168211198807973, 9817491932198370423)
    ]


def test_numbers_do_not_depend_on_company():
    keys = np.array([noise_key(1, p, s) for p in range(20) for s in range(4)], np.uint64)
    together = uniforms(keys, np.arange(80))
    alone = [uniforms(keys[i : i + 1], np.array([i]))[0] for i in range(80)]
    assert together.tolist() == alone


def test_neighbours_have_different_keys():
    keys = {noise_key(seed, prompt, sibling) for seed in range(8) for prompt in range(300) for sibling in range(16)}
    assert len(keys) == 8 * 300 * 16
    # "1/11/1" and "11/1/1" are different samples
    assert len({noise_key(1, 11, 1), noise_key(11, 1, 1), noise_key(1, 1, 11)}) == 3


def chi_square(values: np.ndarray, bins: int = 100) -> float:
    """Standardised: about N(0, 1) if the values are uniform."""
    counts = np.histogram(values, bins, (0, 1))[0]
    expected = len(values) / bins
    return (((counts - expected) ** 2 / expected).sum() - (bins - 1)) / np.sqrt(2 * (bins - 1))


KEYS = np.array([noise_key(3, prompt, sibling) for prompt in range(2000) for sibling in range(8)], np.uint64)


@pytest.mark.parametrize("position", [0, 1, 7, 4095])
def test_uniform_over_samples(position):
    values = uniforms(KEYS, np.full(len(KEYS), position))
    assert values.min() >= 0 and values.max() < 1
    assert abs(chi_square(values)) < 4


@pytest.mark.parametrize("sample", [0, 5, 77])
def test_uniform_over_positions(sample):
    assert abs(chi_square(stream(int(KEYS[sample]), 20_000))) < 4


def test_pairs_are_uniform_in_the_square():
    """Siblings, prompts and positions next to each other: no correlation, and 10 x 10 cells filled evenly."""
    at = {p: uniforms(KEYS, np.full(len(KEYS), p)) for p in (0, 1)}
    pairs = {
        "positions": (at[0], at[1]),
        "siblings": (at[0][0::8], at[0][1::8]),
        "prompts": (at[0][:-8], at[0][8:]),
        "within a stream": (stream(int(KEYS[0]), 20_000)[:-1], stream(int(KEYS[0]), 20_000)[1:]),
    }
    for name, (a, b) in pairs.items():
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(len(a)), name
        assert abs(chi_square((np.floor(a * 10) * 10 + np.floor(b * 10)) / 100 + 0.005)) < 4, name
