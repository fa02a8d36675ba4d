"""Speculative decoding: the samples are those without it, whatever is proposed; what is counted; when it stops."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gcore.config.base import Serving
from gcore.content.tokens import Tokens
from gcore.generation.embedded import EmbeddedBackend
from gcore.generation.engine_shell import Job, SteppedEngine
from gcore.generation.noise import uniform, uniforms
from gcore.generation.speculation import NUM_KINDS, Balance, Speculation, StepCost, SuffixAutomaton, speculation_of
from gcore.types import Completion, Request, SamplingParams
from tests.contract.test_engine import ask, bits, crowd, embedded, network_of, prompt, run, truncated

LENGTH = 64


class Guess(Speculation):
    """Proposes tokens that are right with a chance of three in four, whatever the texts: rows of all kinds, in which
    proposals are accepted whole, in part, and not at all."""

    def __init__(self, truth: dict[int, list[int]], tokens: range = range(4, 16)) -> None:
        super().__init__(always=True)
        self._truth, self._tokens, self._random = truth, tokens, np.random.default_rng(0)
        self.kept: Counter[tuple[int, int]] = Counter()  # (proposed, accepted) of a row and step

    def drafts(self, jobs: Any, multiple: int, aligned: bool) -> list[list[int]]:
        found = []
        for job in jobs:
            left = job.request.params.max_tokens - len(job.tokens) - 1
            size = int(self._random.integers(0, max(min(left, 15), 0) + 1))
            known = self._truth[job.request.noise_key]
            draft = known[len(job.tokens) : len(job.tokens) + size]  # shorter if a stop token ends the sample
            draft += [self._tokens[0]] * (size - len(draft))
            wrong = self._random.random(size) > 0.75
            others = self._random.choice(self._tokens, size).tolist()
            found.append([b if is_wrong else a for a, b, is_wrong in zip(draft, others, wrong, strict=True)])
        return found

    def record(self, jobs: Any, drafts: Any, taken: Any, *rest: Any) -> None:
        for draft, number in zip(drafts, taken, strict=True):
            self.kept[len(draft), number - 1] += 1


def guessing(network: Any, requests: list[Request], expected: list[Completion], fused: bool) -> tuple[Any, Guess]:
    truth = {r.noise_key: c.content.tokens_S.tolist() for r, c in zip(requests, expected, strict=True)}
    guess = Guess(truth)
    return SteppedEngine(EmbeddedBackend(network, 32, LENGTH, fused=fused, speculation=guess)), guess


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return network_of("qwen3")


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "by library"])
def test_any_proposals_leave_the_samples_as_they_are(qwen3, fused):
    """Lengths, temperatures, truncations and stop tokens of all kinds; more requests than slots."""
    requests = crowd(60) + [ask(prompt(6, i), 20, key=1000 + i, stop=(5, 9)) for i in range(20)]
    plain = SteppedEngine(EmbeddedBackend(qwen3, 32, LENGTH, fused=fused))
    expected = run(plain, *requests)
    engine, guess = guessing(qwen3, requests, expected, fused)
    found = run(engine, *requests)
    stats = asyncio.run(engine.stats())
    for closed in (engine, plain):
        closed.close()
    if fused:  # to the last bit
        assert [bits(c) for c in found] == [bits(c) for c in expected]
    assert [(c.content.tokens_S.tolist(), c.finish) for c in found] == [
        (c.content.tokens_S.tolist(), c.finish) for c in expected
    ]
    assert max(abs(a.logprobs_S - b.logprobs_S).max() for a, b in zip(found, expected, strict=True)) < 1e-5
    kinds = {"all": 0, "some": 0, "none": 0}
    for (size, accepted), number in guess.kept.items():
        if size:
            kinds["all" if accepted == size else "some" if accepted else "none"] += number
    assert all(number > 20 for number in kinds.values())
    assert stats.generated_tokens == sum(c.content.num_steps for c in expected)
    ends = [c.finish for c in found]
    assert "stop" in ends and "length" in ends


# --- what is kept beside the tokens, and when a sample ends early


@pytest.mark.parametrize("params", [{"top_p": 0.8}, {"top_k": 3, "temperature": 0.7}], ids=str)
def test_sampling_masks_are_those_of_single_steps(qwen3, params):
    requests = [ask(prompt(7, i), 24, key=i, keep_mask=True, **params) for i in range(12)]
    plain = embedded(qwen3)
    expected = run(plain, *requests)
    engine, guess = guessing(qwen3, requests, expected, True)
    found = run(engine, *requests)
    for closed in (engine, plain):
        closed.close()
    assert [bits(c) for c in found] == [bits(c) for c in expected]
    for a, b in zip(found, expected, strict=True):
        assert a.content.sampling_mask is not None and b.content.sampling_mask is not None
        assert np.array_equal(a.content.sampling_mask.ids_K, b.content.sampling_mask.ids_K)
        assert np.array_equal(a.content.sampling_mask.counts_S, b.content.sampling_mask.counts_S)
    assert sum(accepted * number for (_, accepted), number in guess.kept.items()) > 50


def test_experts_are_those_of_each_accepted_token():
    network = network_of("qwen3_moe", experts=8, active_experts=2)
    requests = [ask(prompt(n, n), 20, key=n, keep_experts=True) for n in (1, 5, 9, 30)]
    plain = embedded(network)
    expected = run(plain, *requests)
    engine, guess = guessing(network, requests, expected, True)
    found = run(engine, *requests)
    for closed in (engine, plain):
        closed.close()
    assert sum(accepted * number for (_, accepted), number in guess.kept.items()) > 20
    for a, b in zip(found, expected, strict=True):
        assert a.content.tokens_S.tolist() == b.content.tokens_S.tolist()
        assert a.content.experts is not None and np.array_equal(a.content.experts, b.content.experts)


def test_aborted_samples_are_the_beginnings_of_whole_ones(qwen3):
    requests = [ask(prompt(5, i), 50, key=i) for i in range(40)]
    plain = embedded(qwen3)
    expected = run(plain, *requests)
    plain.close()
    engine, _ = guessing(qwen3, requests, expected, True)

    async def abort() -> list[Completion]:
        answers = asyncio.ensure_future(engine.generate(requests, "mine"))
        while (await engine.stats()).generated_tokens < 400:
            await asyncio.sleep(0.001)
        await engine.abort("mine")
        return await answers

    found = asyncio.run(abort())
    again = run(engine, *requests[:5])  # in rows that aborted ones have left
    engine.close()
    assert any(0 < c.content.num_steps < 50 for c in found)
    for c, whole in zip(found, expected, strict=True):
        number = c.content.num_steps
        assert c.content.tokens_S.tolist() == whole.content.tokens_S[:number].tolist()
        assert len(c.logprobs_S) == len(c.versions_S) == number
    assert [bits(c) for c in again] == [bits(c) for c in expected[:5]]


# --- the distribution


@pytest.mark.parametrize("params", [{"temperature": 0.7}, {"temperature": 1.0}, {"top_p": 0.8}], ids=str)
def test_the_second_token_is_distributed_as_the_model_says(qwen3, params):
    """Proposals of the automaton. Of samples that begin with the likeliest token, the next one is compared with the
    model's distribution: by then texts of hundreds of siblings are known, and most second tokens were proposed."""
    number, p = 3000, prompt(9, 3)
    speculation = Speculation(always=True)
    engine = SteppedEngine(EmbeddedBackend(qwen3, 256, LENGTH, speculation=speculation))
    found = run(engine, *(ask(p, 3, key=i, **params) for i in range(number)))
    engine.close()
    first = Counter(int(c.content.tokens_S[0]) for c in found).most_common(1)[0][0]
    seconds = [int(c.content.tokens_S[1]) for c in found if c.content.tokens_S[0] == first]
    with torch.no_grad():
        logits = qwen3(torch.tensor([[*p.tolist(), first]])).logits[0, -1].double().numpy()
    scaled = np.exp((logits - logits.max()) / params.get("temperature", 1.0))
    expected = truncated(scaled / scaled.sum(), 0, params.get("top_p", 1.0)) * len(seconds)
    counts = np.bincount(seconds, minlength=16)
    assert counts[expected == 0].sum() == 0
    likely = expected >= 5
    statistic = ((counts - expected) ** 2 / np.where(likely, expected, 1))[likely].sum()
    free = max(int(likely.sum()) - 1, 1)
    assert statistic <= free + 4 * np.sqrt(2 * free)
    assert speculation.proposed > number / 2
    assert speculation.accepted > 0.5 * speculation.proposed  # far more often than the likeliest token is sampled


# --- what is proposed, and when


RATES = [0.5] * NUM_KINDS


def speculated(speculation: Speculation, tokens: list[int], key: int) -> Job:
    """A sample whose prompt has this text twice, and ends after its first token."""
    content = Tokens(np.array([*tokens, *tokens, 3, *tokens, *tokens, 3, tokens[0]], np.int32))
    job = Job(Request(content, SamplingParams(max_tokens=40), key), "", key, Future())
    speculation.begin([job])
    return job


def test_the_places_of_media_are_not_proposed():
    """Their tokens may have no embedding."""
    speculation, text = Speculation(always=True), [5, 6, 7, 8] * 4
    picture: Any = SimpleNamespace(key="picture", places=np.array([2]))
    plain, seen = (Tokens(np.array([*text, 5], np.int32), media=media) for media in ((), (picture,)))
    for content, size in ((seen, 0), (plain, 15)):
        job = Job(Request(content, SamplingParams(max_tokens=40), 1), "", 1, Future())
        (draft,) = speculation.drafts([job], 1, False)
        assert len(draft) == size


@pytest.mark.parametrize("alphabet", [2, 5])
def test_the_automaton_counts_what_came_next(alphabet):
    """Texts that grow in turns, against a search of all of them."""
    random = np.random.default_rng(alphabet)
    automaton, texts, lasts = SuffixAutomaton(), [[] for _ in range(4)], [0] * 4
    for _ in range(120):
        i = int(random.integers(4))
        token = int(random.integers(alphabet)) + 4
        texts[i].append(token)
        lasts[i] = automaton.extend(lasts[i], token)
    for text in texts:
        for start in range(0, len(text), 3):
            for length in range(1, min(8, len(text) - start + 1)):
                context = text[start : start + length]
                at = 0
                for token in context:
                    at = automaton.nexts[at][token]
                found = {token: automaton.counts[new] for token, new in automaton.nexts[at].items()}
                places = [(t, p) for t in texts for p in range(len(t) - length) if t[p : p + length] == context]
                assert found == Counter(t[p + length] for t, p in places)


def test_a_proposal_is_drawn_with_the_number_of_the_sampler():
    automaton = SuffixAutomaton()
    for token in [7, 7, 7, 5, 9, 9, 9, 9]:
        automaton.extend(automaton.extend(0, 4), token)
    at = automaton.nexts[0][4]
    drawn = {key: automaton.draft(at, 9, (key, 5), RATES, 0)[0] for key in range(99)}
    numbers = uniforms(np.arange(99, dtype=np.uint64), np.full(99, 5))
    assert [uniform(key, 5) for key in range(99)] == numbers.tolist()
    for key, number in enumerate(numbers):  # 1, 3 and 4 of 8, in the order of the tokens; and nothing came after them
        assert drawn[key] == [5 if number < 1 / 8 else 7 if number < 1 / 2 else 9]
    assert automaton.draft(at, 9, None, RATES, 0)[0] == [9]
    assert automaton.draft(at, 9, None, RATES, 0.6)[0] == []


def test_it_proposes_what_pays_and_what_fills_the_batch():
    """Of the text 4 5 6 7 ... in which all rows are, with a chance of 0.5 for each proposal."""
    speculation = Speculation()
    jobs = [speculated(speculation, list(range(4, 12)), key) for key in range(3)]
    speculation._balances = {2: Balance(on=True)}
    for tokens in (8, 16, 64):
        speculation._cost.add(tokens, 0.001 + tokens * 1e-4)  # a token is worth a chance of 0.23 with 3 rows
    assert [len(d) for d in speculation.drafts(jobs, 8, False)] == [3, 3, 3]  # of 16
    assert [len(d) for d in speculation.drafts(jobs, 1, False)] == [2, 2, 2]
    assert [len(d) for d in speculation.drafts(jobs, 2, False)] == [3, 2, 2]
    assert [len(d) for d in speculation.drafts(jobs, 1, True)] == [2, 2, 2]
    assert [len(d) for d in speculation.drafts(jobs, 8, True)] == [0, 0, 0]  # five more rows would be as wide


def test_it_stops_where_it_does_not_pay_and_starts_again():
    cost, balance = StepCost(), Balance()
    for tokens in (8, 16, 64, 128, 256) * 20:
        cost.add(tokens, 0.001 + tokens * 1e-5)
    fixed, per_token = cost.fit()
    assert fixed == pytest.approx(0.001, rel=0.1) and per_token == pytest.approx(1e-5, rel=0.1)
    for size, pays in ((8, True), (256, False)):  # of 2 proposals per sample and step, 0.6 are accepted
        for _ in range(100):
            balance.add(size, 2 * size, 0.6 * size, 2e-6 * size)
            balance.decide(size, cost)
        assert balance.on == pays
        balance = Balance()
    # 16 samples and 10 proposals per step cost 0.3 ms: as much as 4.1 accepted ones save
    for accepted, on in ((0, False), (4.3, False), (6, True), (4, True), (3, False)):
        for _ in range(400):
            balance.add(16, 10, accepted, 2e-4)
            balance.decide(16, cost)
        assert balance.on == on, accepted


def test_only_what_an_engine_and_a_model_can_do():
    for kind in ("mtp", "draft"):
        with pytest.raises(
            ValueError, match=f"speculation={kind} is not built yet; expected off, auto, ngram or suffix"
        ):
            Serving(speculation=kind)
    with pytest.raises(ValueError, match="speculation=suffix needs engine=embedded, got vllm"):
        Serving(engine="vllm", speculation="suffix")
    assert Serving(engine="vllm", speculation="auto").speculation == "auto"
    network = network_of("qwen3")
    assert speculation_of("off", network) is None and speculation_of("auto", network) is not None
