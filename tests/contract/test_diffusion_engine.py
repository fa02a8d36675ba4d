"""The contract of engines (test_engine.py) for the diffusion engine: a step is a denoising step."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from gcore.content.latents import Latents
from gcore.types import Completion, Request, UserError
from tests.unit.denoisers import config_of, engine_of, generate, network_of, request_of, states

WORK = {"model": {"denoiser": {"hidden_size": 32, "layers": 2, "heads": 2, "image_size": 8, "patch_size": 2}}}


@pytest.fixture()
def open_engine(tmp_path):
    opened = []

    def make(config, **options):
        opened.append(engine_of(config, tmp_path / f"engine-{len(opened)}", **options))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def requests_of(config, number=12, **options) -> list[Request]:
    return [request_of(config, str(i % 10), 100 + i, **options) for i in range(number)]


def same(a: Completion, b: Completion) -> bool:
    content = a.content, b.content
    return (
        np.array_equal(states(a), states(b))
        and np.array_equal(a.logprobs_S, b.logprobs_S)
        and content[0].digest() == content[1].digest()
    )


@pytest.mark.parametrize("denoising", [{}, {"guidance_scale": 2.0}, {"sampler": "ddim"}, {"sampler": "dance"}])
def test_completions_are_typed_ordered_and_by_reference(open_engine, denoising):
    config = config_of(denoising=denoising)
    found = generate(open_engine(config), requests_of(config, 3))
    for completion in found:
        assert completion.finish == "stop" and isinstance(completion.content, Latents)
        assert completion.content.num_steps == 4 and states(completion).shape == (5, 1, 4, 4)
        assert completion.logprobs_S.dtype == np.float32 and completion.versions_S.tolist() == [0] * 4
        assert completion.content.actions_S.tolist() == [True, True, True, False]
        assert completion.logprobs_S[3] == 0 and (completion.logprobs_S[:3] != 0).all()
        picture = completion.content.picture.read()
        assert picture.dtype == np.uint8 and picture.shape == (4, 4, 3)
        expected = ((states(completion)[-1, 0] + 1) * 127.5).round().clip(0, 255)
        assert np.array_equal(picture[..., 0], expected.astype(np.uint8))
        assert len(pickle.dumps(completion)) < 2500  # whatever the size of the pictures: see the test below


def test_bytes_of_a_completion_do_not_grow_with_the_latents(open_engine):
    sizes = []
    for side in (4, 32):
        config = config_of(model={"denoiser": {"hidden_size": 16, "layers": 1, "heads": 2, "image_size": side}})
        (completion,) = generate(open_engine(config), [request_of(config)])
        assert states(completion).nbytes == 5 * side * side * 4
        whole = request_of(config).content.extended(completion.content)
        sizes.append((len(pickle.dumps(completion)), whole.nbytes))
    assert abs(sizes[0][0] - sizes[1][0]) < 16 and sizes[0][1] == sizes[1][1] < 64


def test_the_last_bit_does_not_depend_on_company(open_engine):
    """Alone, in a batch, with rows at other steps, and with other rows aborted."""
    config = config_of(denoising={"steps": 6}, **WORK)
    requests = requests_of(config)
    alone = [generate(open_engine(config), [request])[0] for request in requests[:4]]
    together = generate(open_engine(config), requests)
    narrow = generate(open_engine(config, max_concurrent=3), requests)  # new rows join while others are in the middle
    assert all(same(a, b) for a, b in zip(alone, together, strict=False))
    assert all(same(a, b) for a, b in zip(narrow, together, strict=True))


def test_the_key_decides_the_sample_and_greedy_ones_have_other_noise(open_engine):
    config = config_of()
    engine = open_engine(config)
    one, two, other = generate(engine, [request_of(config, key=k) for k in (1, 1, 2)])
    assert same(one, two) and not np.array_equal(states(one), states(other))
    greedy = generate(engine, [request_of(config, key=1, greedy=True)])[0]
    assert not np.array_equal(states(greedy)[0], states(one)[0]) and not greedy.logprobs_S.any()


def test_siblings_may_share_their_start(open_engine):
    config = config_of(denoising={"shared_start": True})
    requests = [request_of(config, key=k) for k in (1, 2)]
    shared = [dataclasses.replace(r, content=dataclasses.replace(r.content, start_key=77)) for r in requests]
    one, two = map(states, generate(open_engine(config), shared))
    assert np.array_equal(one[0], two[0]) and not np.array_equal(one[1], two[1])


def test_a_request_that_was_cut_continues_on_another_engine(open_engine):
    config = config_of(denoising={"steps": 6}, **WORK)
    request = request_of(config)
    (whole,) = generate(open_engine(config), [request])

    async def cut(engine) -> Completion:
        answer = asyncio.ensure_future(engine.generate([request], "t"))
        while not (await engine.stats()).running_tokens:
            await asyncio.sleep(0.001)
        await engine.abort("t")
        return (await answer)[0]

    piece = asyncio.run(cut(open_engine(config, min_step_s=0.05)))
    assert piece.finish == "abort" and 0 < piece.content.num_steps < 6 and piece.content.picture is None
    rest = generate(open_engine(config), [request.after(piece)])[0]
    joined = piece.joined(rest)
    assert same(joined, whole) and joined.content.num_steps == 6
    content = request.content.extended(joined.content)
    assert np.array_equal(content.picture.read(), whole.content.picture.read())
    assert content.actions_S.tolist() == [True] * 5 + [False]


def test_new_weights_take_effect_between_steps_and_every_step_is_stamped(open_engine):
    config = config_of(denoising={"steps": 6}, **WORK)
    old, new = network_of(config, 0), network_of(config, 9)
    weights = {name: p.detach().numpy() for name, p in new.named_parameters()}
    request = request_of(config)

    async def update_in_the_middle(engine) -> Completion:
        answer = asyncio.ensure_future(engine.generate([request]))
        while not (await engine.stats()).running_tokens:
            await asyncio.sleep(0.001)
        assert await engine.load_weights(3, weights) == 3
        return (await answer)[0]

    mixed = asyncio.run(update_in_the_middle(open_engine(config, network=old, min_step_s=0.05)))
    (before,) = generate(open_engine(config, network=network_of(config, 0)), [request])
    changed = int((mixed.versions_S == 0).sum())
    assert 0 < changed < 6 and mixed.versions_S.tolist() == [0] * changed + [3] * (6 - changed)
    assert np.array_equal(states(mixed)[: changed + 1], states(before)[: changed + 1])
    assert not np.array_equal(states(mixed)[changed + 1], states(before)[changed + 1])


def test_weights_that_do_not_fit_are_refused(open_engine):
    config = config_of()
    engine = open_engine(config)
    weights = {name: p.detach().numpy() for name, p in network_of(config, 9).named_parameters()}
    (before,) = generate(engine, [request_of(config)])
    weights.pop("transformer.head.weight")
    with pytest.raises(ValueError, match="lack"):
        asyncio.run(engine.load_weights(1, weights))
    assert same(generate(engine, [request_of(config)])[0], before)


def test_compiled_layers_serve_new_weights_without_compiling_again(open_engine, compiled_layers):
    """Also after sleep, which replaces the memory of all weights."""
    config, frames = config_of(denoising={"guidance_scale": 2.0}, **WORK), compiled_layers
    old, new = network_of(config), network_of(config, 9)
    weights = {name: p.detach().clone().numpy() for name, p in new.named_parameters()}
    requests = requests_of(config, 8)
    expected = [states(c) for c in generate(open_engine(config), requests)]
    renewed = [states(c) for c in generate(open_engine(config, network=new), requests)]
    engine = open_engine(config, network=old, compiled=True)
    assert np.allclose([states(c) for c in generate(engine, requests)], expected, atol=1e-5)
    assert frames.frame_count == 1  # of two layers and four denoising steps
    asyncio.run(engine.load_weights(1, weights))
    assert np.allclose([states(c) for c in generate(engine, requests)], renewed, atol=1e-5)
    asyncio.run(engine.sleep(1))
    asyncio.run(engine.wake())
    assert np.allclose([states(c) for c in generate(engine, requests)], renewed, atol=1e-5)
    assert frames.frame_count == 1


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_it_waits_and_awake_it_answers_as_before(open_engine, level):
    config = config_of()
    network = network_of(config)
    weights = {name: p.detach().clone().numpy() for name, p in network.named_parameters()}
    engine = open_engine(config, network=network)
    (before,) = generate(engine, [request_of(config)])

    async def night() -> Completion:
        assert (await engine.sleep(level)).gigabytes > 0
        assert sum(p.numel() for p in network.transformer.parameters()) == 0
        answer = asyncio.ensure_future(engine.generate([request_of(config)]))
        await asyncio.sleep(0.05)
        assert not answer.done()
        await engine.wake()
        if level == 2:  # the weights are lost
            assert not answer.done()
            await engine.load_weights(0, weights)
        return (await answer)[0]

    assert same(asyncio.run(night()), before)


def test_files_of_old_versions_are_removed(open_engine, tmp_path):
    config = config_of()
    engine = open_engine(config, keep=1)
    for version in (1, 2, 3, 7):
        weights = {name: p.detach().numpy() for name, p in network_of(config, version).named_parameters()}
        asyncio.run(engine.load_weights(version, weights))
        generate(engine, [request_of(config)])
        kept = sorted(int(folder.name) for folder in (tmp_path / "engine-0").iterdir())
        assert kept == [v for v in (1, 2, 3, 7) if version - 1 <= v <= version]


def test_impossible_requests_are_refused_and_change_no_other(open_engine):
    config = config_of()
    engine = open_engine(config)
    good = request_of(config)
    with pytest.raises(UserError, match="no class of the model"):
        generate(engine, [request_of(config, "eleven")])
    with pytest.raises(UserError, match="ends at denoising step 9"):
        generate(engine, [dataclasses.replace(good, params=dataclasses.replace(good.params, max_tokens=9))])
    assert generate(engine, [good])[0].finish == "stop"


def test_content_is_saved_and_loaded(open_engine):
    config = config_of()
    request = request_of(config)
    (completion,) = generate(open_engine(config), [request])
    whole = request.content.extended(completion.content)
    again = request.content.with_steps(whole.step_arrays())
    assert again == whole and again.digest() == whole.digest() and again.end(request.params) == "stop"
    assert whole.size == 4 and whole.work.passes == 3


def test_the_sampler_draws_from_its_transition(open_engine):
    """(next latents - mean) / std of many samples is standard normal."""
    config = config_of()
    network = network_of(config)
    engine = open_engine(config, network=network, max_concurrent=256)
    found = generate(engine, [request_of(config, key=k) for k in range(256)])
    from gcore.diffusion.samplers import schedule_of

    schedule = schedule_of(config.generation.denoising)
    latents = torch.from_numpy(np.stack([states(completion) for completion in found]))
    steps, every = torch.full((256,), 1), torch.ones(256, dtype=torch.bool)
    with torch.no_grad():
        label = {"label": torch.full((256,), 3)}
        prediction = network(latents[:, 1], schedule.times(steps), label, 1.0)
    transition = schedule.step(latents[:, 1], prediction, steps, every)
    noise = (latents[:, 2] - transition.mean) / transition.std_B.view(-1, 1, 1, 1)
    assert float(noise.mean()) == pytest.approx(0, abs=0.05) and float(noise.std()) == pytest.approx(1, abs=0.05)
    expected = transition.logprob(latents[:, 2], "mean")
    assert np.allclose([completion.logprobs_S[1] for completion in found], expected.numpy(), atol=1e-5)
