"""Scalar reward models: the loss, what is learned, and scores that depend on the text alone."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, BertConfig

from gcore.config.base import BuildModel, Model, StoredModel
from gcore.config.data import Data, Dataset
from gcore.config.load import load_config
from gcore.config.preference import OBJECTIVES
from gcore.config.rewards import ScalarReward
from gcore.config.tree import Config
from gcore.content.tokens import Tokens
from gcore.models.networks import load_model, load_scorer, score_texts
from gcore.observe.trace import Tracer
from gcore.prompts.answers import load_answered, pair_of
from gcore.prompts.source import AnswerLimits, Measured, Templater, measure
from gcore.prompts.tokenizer import load_tokenizer, with_padding
from gcore.rewarding.rewarder import WeightedRewarder
from gcore.rewarding.scalar import ScalarModel, ScalarSource, padded_width
from gcore.types import Prompt, RewardError, Rollout, UserError

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
POSITIONS = 400


def model_of(architecture: str = "qwen3", **changes: Any) -> Model:
    small = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "kv_heads": 1}
    build = {**small, "max_length": POSITIONS, "alphabet": "0123456789+=", **changes}
    return Model(build=BuildModel(architecture=architecture, **build))  # type: ignore[arg-type]


def scorer_of(architecture: str = "qwen3", seed: int = 0, **changes: Any) -> Any:
    model = model_of(architecture, **changes)
    network = load_scorer(model, seed, torch.float32, CPU, tokenizer=load_tokenizer(model), new_head=True)
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # scores that differ, not all about 0
        torch.manual_seed(seed)
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return network


TOKENIZER = load_tokenizer(model_of())


def text(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([length, seed]).integers(4, 16, size=length).astype(np.int32)


def tokens(conversation: str) -> np.ndarray:
    return np.asarray(TOKENIZER(f"<bos>{conversation}<eos>", add_special_tokens=False)["input_ids"], np.int32)


def group_of(*texts: str, messages: Any = ({"role": "user", "content": "1+1="},)) -> list[Rollout]:
    prompt = Prompt(70, 6, tuple(messages), "<bos>1+1=", Tokens(np.array([1, 2], np.int32)))
    steps = np.zeros(2, np.float32)
    return [
        Rollout(
            prompt, i, Tokens.steps(np.array([i, 2], np.int32)), steps, steps == 0, said, np.zeros(2, np.int32), "stop"
        )
        for i, said in enumerate(texts)
    ]


# --- folders


def test_a_folder_reloads_to_equal_scores(tmp_path):
    network = scorer_of()
    network.save_pretrained(tmp_path)
    again = load_scorer(Model(path=str(tmp_path)), 0, torch.float32, CPU)
    texts = [text(n) for n in (3, 9, 20)]
    with torch.no_grad():
        assert torch.equal(score_texts(again, texts, 20), score_texts(network, texts, 20))


def test_a_language_model_gets_a_seeded_head_for_training_and_is_refused_for_serving(tmp_path):
    model = model_of()
    load_model(model, TOKENIZER, 0, torch.float32, CPU).save_pretrained(tmp_path)
    path = Model(path=str(tmp_path))

    def head(seed: int) -> torch.Tensor:
        network = load_scorer(path, seed, torch.float32, CPU, tokenizer=TOKENIZER, new_head=True)
        assert network.config.num_labels == 1 and network.config.pad_token_id == TOKENIZER.pad_token_id
        return network.score.weight  # type: ignore[no-any-return]

    assert torch.equal(head(1), head(1)) and not torch.equal(head(1), head(2))
    assert head(1).shape == (1, 32)
    with pytest.raises(UserError, match=r"Qwen3ForCausalLM.*expected a sequence-classification model with one label"):
        load_scorer(path, 0, torch.float32, CPU)


def test_a_scorer_without_a_pad_token_reads_the_end_of_a_conversation(tmp_path):
    """As Llama's: neither config.json nor the tokenizer has one. Padding with eos would hide the eos of a text."""
    network, tokenizer = scorer_of("llama"), load_tokenizer(model_of())
    texts = [tokens("1+1=2"), tokens("12+34=46")]
    expected = score_texts(network, texts, 16)
    assert not torch.equal(expected[:1], score_texts(network, [texts[0][:-1]], 16))  # the eos counts
    network.config.pad_token_id = tokenizer.pad_token = None
    network.config.architectures = ["LlamaForSequenceClassification"]
    network.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = Model(path=str(tmp_path))
    padded = with_padding(load_tokenizer(model), model)
    assert padded.pad_token_id not in (None, padded.eos_token_id)
    again = load_scorer(model, 0, torch.float32, CPU, tokenizer=padded)
    assert torch.equal(score_texts(again, texts, 16), expected)


def test_folders_that_are_no_scorer(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        load_scorer(Model(path=str(tmp_path / "none")), 0, torch.float32, CPU)
    config = scorer_of().config
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "three")
    for new_head in (False, True):
        with pytest.raises(UserError, match="has 3 labels"):
            load_scorer(Model(path=str(tmp_path / "three")), 0, torch.float32, CPU, new_head=new_head)
    for lost, new_head in (("score.weight", False), ("model.norm.weight", True)):
        network = scorer_of()
        kept = {name: value for name, value in network.state_dict().items() if name != lost}
        network.save_pretrained(tmp_path / lost, state_dict=kept)
        with pytest.raises(UserError, match=f"has no weights for {lost}"):
            load_scorer(Model(path=str(tmp_path / lost)), 0, torch.float32, CPU, new_head=new_head)
    network = scorer_of()
    network.config.pad_token_id = None
    network.save_pretrained(tmp_path / "unpadded")
    with pytest.raises(UserError, match="no pad_token_id"):
        load_scorer(Model(path=str(tmp_path / "unpadded")), 0, torch.float32, CPU)


# --- serving


@pytest.fixture(scope="module")
def networks():
    odd = {"hidden_size": 36, "intermediate_size": 50, "heads": 3, "kv_heads": 3}
    families = {"qwen3": {}, "llama": {}, "odd": {"architecture": "qwen2", **odd}}
    return {name: scorer_of(**{"architecture": name, **changes}) for name, changes in families.items()}


@pytest.fixture
def serve():
    models: list[ScalarModel] = []

    def start(network: Any, max_tokens_per_batch: int = 4096, **options: Any) -> Any:
        models.append(ScalarModel(network, max_tokens_per_batch=max_tokens_per_batch, **options))
        return models[-1]

    yield start
    for model in models:
        model.close()


def score(model: ScalarModel, *texts: np.ndarray) -> list[float]:
    return asyncio.run(asyncio.wait_for(model.score(texts), 60))


def watched(model: Any) -> list[tuple[int, list[int]]]:
    """(width, lengths) of every forward pass from now on."""
    seen: list[tuple[int, list[int]]] = []
    forward = model._forward

    def look(texts: list[np.ndarray], width: int) -> list[float]:
        seen.append((width, [len(t) for t in texts]))
        return forward(texts, width)

    model._forward = look
    return seen


def held(model: Any) -> tuple[threading.Event, threading.Event]:
    """(reached, go on): the next forward passes wait."""
    reached, go_on, forward = threading.Event(), threading.Event(), model._forward

    def wait(texts: list[np.ndarray], width: int) -> list[float]:
        reached.set()
        assert go_on.wait(60)
        return forward(texts, width)

    model._forward = wait
    return reached, go_on


@pytest.mark.parametrize("name", ["qwen3", "llama", "odd"])
def test_scores_are_those_of_the_library(serve, networks, name):
    texts = [text(n) for n in (1, 2, 11, 31, 32, 33, 150, 250, POSITIONS - 1)]
    with torch.no_grad():
        alone = [float(networks[name](torch.from_numpy(t.astype(np.int64))[None]).logits) for t in texts]
    assert score(serve(networks[name]), *texts) == pytest.approx(alone, abs=1e-5)
    assert np.std(alone) > 0.1


def test_an_encoder_does_not_look_at_the_padding(serve):
    """Its attention goes both ways, and its positions end where they end."""
    config = BertConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=70, num_labels=1, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = AutoModelForSequenceClassification.from_config(config).eval()
    texts = [text(n) for n in (3, 11, 31, 40, 60, 69)]
    with torch.no_grad():
        alone = [float(network(torch.from_numpy(t.astype(np.int64))[None]).logits) for t in texts]
    assert score(serve(network), *texts) == pytest.approx(alone, abs=1e-5)
    with pytest.raises(RewardError, match="takes 1 to 69"):
        score(serve(network), text(70))


@pytest.mark.parametrize("name", ["qwen3", "llama", "odd"])
def test_the_last_bit_does_not_depend_on_company(serve, networks, name):
    """Each alone; all at once; in random companies, sizes of batch and orders."""
    rng = np.random.default_rng(3)
    lengths = [*range(1, 34, 4), 32, 40, 63, 64, 100, 130, 180, 190, 200, 250, 256, 300, POSITIONS - 1]
    texts = [text(n) for n in lengths]
    model = serve(networks[name])
    alone = [score(model, t)[0] for t in texts]
    assert score(model, *texts) == alone
    for budget in (1, 300, 1000, 4096):
        crowded = serve(networks[name], budget)
        for _ in range(3):
            some = rng.permutation(len(texts))[: rng.integers(2, len(texts))]
            others = [text(int(rng.integers(1, POSITIONS)), seed=9) for _ in range(rng.integers(0, 6))]
            found = score(crowded, *(texts[i] for i in some), *others)
            assert found[: len(some)] == [alone[i] for i in some], budget


def test_widths():
    assert [padded_width(n) for n in (1, 31, 32, 255, 256, 1000, 1023, 1024)] == [
        32,
        32,
        64,
        256,
        288,
        1024,
        1024,
        1152,
    ]


def test_what_waits_is_scored_together(serve, networks):
    """While one call is being scored, those of 12 callers come in; one forward pass serves them all."""
    model = serve(networks["qwen3"])
    reached, go_on = held(model)
    seen = watched(model)

    async def many() -> list[list[float]]:
        first = asyncio.ensure_future(model.score([text(9)]))
        assert await asyncio.to_thread(reached.wait, 20)
        later = [asyncio.ensure_future(model.score([text(9, i), text(20, i)])) for i in range(1, 13)]
        while (stats := await model.stats()).waiting < 24:  # the event loop is free
            await asyncio.sleep(0.001)
        assert (stats.running, stats.scored) == (1, 0)
        go_on.set()
        return await asyncio.wait_for(asyncio.gather(first, *later), 60)

    found = asyncio.run(many())
    assert seen == [(32, [9]), (32, [9, 20] * 12)]
    assert [s for part in found[1:] for s in part] == score(model, *(text(n, i) for i in range(1, 13) for n in (9, 20)))
    assert asyncio.run(model.stats()).scored == 1 + 24 + 24


def test_batches_keep_to_the_budget_the_longest_first(serve, networks):
    model = serve(networks["qwen3"], 100)
    seen = watched(model)
    score(model, *(text(n) for n in (5, 120, 6, 40, 7, 41, 8, 130, 9)))
    assert seen == [(160, [130]), (128, [120]), (64, [40]), (64, [41]), (32, [5, 6, 7]), (32, [8, 9])]


def test_the_same_text_is_scored_once(serve, networks):
    model = serve(networks["qwen3"])
    seen = watched(model)
    found = score(model, text(5), text(8), text(5), text(5))
    assert seen == [(32, [5, 8])]
    assert found[0] == found[2] == found[3] != found[1]
    assert asyncio.run(model.stats()).scored == 4
    assert score(model) == []


def test_callers_of_several_event_loops(serve, networks):
    model = serve(networks["qwen3"])
    texts = [text(3 + i) for i in range(12)]
    expected, found = score(model, *texts), dict[int, float]()

    def call(i: int) -> None:
        (found[i],) = score(model, texts[i])

    threads = [threading.Thread(target=call, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(12)] == expected


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (text(POSITIONS), f"a text of {POSITIONS} tokens; this reward model takes 1 to {POSITIONS - 1}"),
        (text(0), "got a text of 0 tokens"),
        (np.array([1, 16], np.int32), "got a text with token 16; the reward model's vocabulary has 16"),
    ],
    ids=["long", "empty", "stranger"],
)
def test_texts_that_cannot_be(serve, networks, bad, words):
    model = serve(networks["qwen3"])
    (expected,) = score(model, text(5))
    with pytest.raises(RewardError, match=words):
        score(model, text(5), bad)
    assert score(model, text(5)) == [expected]


def test_a_batch_that_fails_fails_its_callers_alone(serve, networks):
    model = serve(networks["qwen3"])
    (expected,) = score(model, text(40))
    forward = model._forward

    def short_of_memory(texts: list[np.ndarray], width: int) -> list[float]:
        if width == 32:
            raise ValueError("no more memory")
        return forward(texts, width)

    model._forward = short_of_memory

    async def both() -> list[Any]:
        calls = [model.score([text(40)]), model.score([text(5)])]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)

    fine, failed = asyncio.run(both())
    assert fine == [expected]
    assert str(failed) == "scoring failed: ValueError: no more memory"
    model._forward = forward
    assert score(model, text(40)) == [expected]


def test_closing_ends_waiters(serve, networks):
    """One is being scored (and gets its answer), one is in the same wave, one came later: both are told."""
    model = serve(networks["qwen3"])
    reached, go_on = held(model)

    async def wait() -> list[Any]:
        calls = [asyncio.ensure_future(model.score([text(n)])) for n in (100, 5)]
        assert await asyncio.to_thread(reached.wait, 20)
        calls.append(asyncio.ensure_future(model.score([text(6)])))
        while (await model.stats()).waiting != 1:
            await asyncio.sleep(0.001)
        closing = asyncio.ensure_future(asyncio.to_thread(model.close))
        while not model._closed:
            await asyncio.sleep(0.001)
        go_on.set()
        await closing
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)

    first, second, third = asyncio.run(wait())
    assert len(first) == 1
    assert [str(error) for error in (second, third)] == ["the scorer was closed"] * 2
    with pytest.raises(RuntimeError, match="the scorer has stopped"):
        score(model, text(5))
    model.close()  # twice is fine


def test_who_gave_up_is_not_scored(serve, networks):
    model = serve(networks["qwen3"])
    reached, go_on = held(model)
    seen = watched(model)

    async def give_up() -> None:
        first = asyncio.ensure_future(model.score([text(9)]))
        assert await asyncio.to_thread(reached.wait, 20)
        bored, patient = (asyncio.ensure_future(model.score([text(n)])) for n in (10, 11))
        while (await model.stats()).waiting < 2:
            await asyncio.sleep(0.001)
        bored.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait_for(asyncio.gather(first, patient), 60)

    asyncio.run(give_up())
    assert seen == [(32, [9]), (32, [11])]


def test_scoring_is_traced(serve, networks, tmp_path):
    model = serve(networks["qwen3"], tracer=Tracer(tmp_path, "scorer-0"))
    score(model, text(5), text(6))
    model.close()
    (span,) = map(json.loads, (tmp_path / "trace" / "scorer-0.jsonl").read_text().splitlines())
    assert (span["name"], span["args"]) == ("score", {"texts": 2})


# --- the source


SPEC = ScalarReward(name="taste", model=StoredModel(path="scorer"), weight=0.5, max_length=12)


def source_of(*answers: Any, tokenizer: Any = TOKENIZER, attempts: int = 2) -> tuple[ScalarSource, list[list[str]]]:
    """A source whose model says `answers`, one after another; and what it was asked."""
    asked: list[list[str]] = []
    script = iter(answers)

    async def scorer(texts: Any) -> list[float]:
        asked.append([TOKENIZER.decode(t) for t in texts])
        return next(script)  # type: ignore[no-any-return]

    return ScalarSource(SPEC, tokenizer, scorer, attempts), asked


def blend(source: ScalarSource, group: list[Rollout]) -> list[float]:
    return [s.reward for s in asyncio.run(WeightedRewarder([source], backoff_s=0).reward(group))]


def test_the_model_reads_the_conversation():
    source, asked = source_of([3.0, -1.5])
    assert blend(source, group_of("2", "34")) == [1.5, -0.75]
    assert asked == [["<bos>1+1=2<eos>", "<bos>1+1=34<eos>"]]
    turns = ("user", "1+1="), ("assistant", "3"), ("user", "2=")
    source, asked = source_of([0.0])
    blend(source, group_of("2", messages=[{"role": role, "content": content} for role, content in turns]))
    assert asked == [["<bos>1+1=3<eos>2=2<eos>"]]


def test_the_template_alone_frames_the_conversation():
    """Nothing opens another turn of the assistant, and the tokenizer adds no special tokens of its own."""
    tokenizer = load_tokenizer(model_of())
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '9' if add_generation_prompt }}"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    source, asked = source_of([0.0], tokenizer=tokenizer)
    blend(source, group_of("2"))
    assert asked == [["1+1=2"]]


def test_conversations_that_are_too_long_have_no_reward():
    source, asked = source_of([0.0], [0.0])
    assert blend(source, group_of("123456")) == [0.0]  # <bos>, 4, 6, <eos>
    with pytest.raises(
        RewardError, match=r"reward 'taste', prompt 70: got a conversation of 13 tokens; expected at most 12"
    ):
        blend(source, group_of("2", "1234567"))
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([1.0, math.nan], "returned nan"),
        ([math.inf, 0.0], "returned inf"),
        ([1.0], "returned 1 scores; expected 2, one per text"),
    ],
    ids=["nan", "inf", "short"],
)
def test_scores_that_are_no_reward_are_asked_for_again(answer, words):
    source, asked = source_of(answer, [1.0, 2.0])
    assert blend(source, group_of("2", "3")) == [0.5, 1.0]
    assert len(asked) == 2
    source, asked = source_of(answer, answer, answer, attempts=3)
    with pytest.raises(RewardError, match=rf"{words}.*\(tried 3 times\)"):
        blend(source, group_of("2", "3"))
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "leaves out a message"),
        ("{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}", "leaves out a message"),
        ("{{ raise_exception('no system here') }}", "rejects messages of roles .*: no system here"),
    ],
    ids=["deaf", "blind", "picky"],
)
def test_the_template_is_checked_before_the_run(template, words):
    tokenizer = load_tokenizer(model_of())
    tokenizer.chat_template = template
    source, _ = source_of(tokenizer=tokenizer)
    with pytest.raises(UserError, match=rf"rewards.models: taste: .*{words}.*\(set its model.chat_template\)"):
        source.check([])
    source_of()[0].check([])


def test_a_template_that_refuses_a_prompt_is_not_asked_again():
    tokenizer = load_tokenizer(model_of())
    tokenizer.chat_template = "{{ raise_exception('no system here') }}"
    source, asked = source_of(tokenizer=tokenizer)
    with pytest.raises(RewardError, match="reward 'taste', prompt 70: the chat template rejects"):
        blend(source, group_of("2"))
    assert asked == []


# --- pairs


def said(*turns: str) -> list[dict[str, str]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": turn} for i, turn in enumerate(turns)]


ANSWER = [{"role": "assistant", "content": "2", "name": None}]  # as parquet fills in


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"question": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": said("1+1="), "chosen": ANSWER, "rejected": "3"},
        {"prompt": said("1+1="), "chosen": "2", "rejected": said("", "3")[1:]},
        {"chosen": said("1+1=", "2"), "rejected": said("1+1=", "3")},
        {"prompt": "1+1=", "chosen": said("1+1=", "2"), "rejected": said("1+1=", "3")},  # both: UltraFeedback
        {"prompt": None, "chosen": said("1+1=", "2"), "rejected": said("1+1=", "3")},
    ],
    ids=["strings", "question", "messages", "mixed", "implicit", "both", "null"],
)
def test_forms_of_pairs(row):
    assert pair_of(row, Dataset(path="x"), "data.train") == (said("1+1=", "2"), said("1+1=", "3"))


def test_columns_by_name():
    spec = Dataset(path="x", prompt_column="q", chosen_column="yes", rejected_column="no")
    row = {"q": "1+1=", "yes": "2", "no": "3", "prompt": "not me", "chosen": "nor me", "rejected": "nor me"}
    assert pair_of(row, spec, "data.train") == (said("1+1=", "2"), said("1+1=", "3"))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"chosen": "2", "rejected": "3"},
            "no prompt for the answer in column 'chosen' (set data.train.prompt_column)",
        ),
        ({"prompt": "1", "chosen": 5, "rejected": "3"}, "column 'chosen' holds 5; expected a string or messages"),
        ({"prompt": "1", "chosen": "2"}, "column 'rejected' is not there; the row has chosen, prompt"),
        ({"prompt": "1", "chosen": "2", "rejected": []}, "column 'rejected' holds []"),
        ({"chosen": said("1", "2", "3"), "rejected": said("1", "3")}, "ends with a message of 'user'"),
        ({"chosen": said("1", "2"), "rejected": said("4", "3")}, "start with different messages"),
        ({"prompt": "4", "chosen": said("1", "2"), "rejected": said("1", "3")}, "does not start with the prompt"),
    ],
    ids=["no prompt", "number", "missing", "empty", "user last", "strangers", "other prompt"],
)
def test_rows_that_are_no_pair(tmp_path, row, words):
    file = tmp_path / "pairs.jsonl"
    good = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    file.write_text(json.dumps(good) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(UserError) as error:
        measured(file)
    assert "data.train: row 1: " in str(error.value) and words in str(error.value)


def templater_of(file: Path) -> Templater:
    return Templater(TOKENIZER, Data(train=Dataset(path=str(file))), scored=True)


def measured(file: Path) -> Measured:
    templater = templater_of(file)
    rows = load_answered(templater.spec, OBJECTIVES["reward_model"], "data.train")
    return measure(rows, templater, 20, answers=AnswerLimits(9, True))


def test_pairs_become_conversations(tmp_path):
    """Whole ones, of one step; the second pair has nothing to prefer, and the fourth is too long."""
    file = tmp_path / "pairs.jsonl"
    rows = [("2", "3"), ("2", "2"), ("2", "11"), ("2", "1111")]
    file.write_text("".join(json.dumps({"prompt": "1+1=", "chosen": c, "rejected": r}) + "\n" for c, r in rows))
    found = measured(file)
    assert (found.kept, found.equal, found.too_long) == ([0, 2], [1], [3])
    templater = templater_of(file)
    pairs = load_answered(templater.spec, OBJECTIVES["reward_model"], "data.train")
    for index, (chosen, rejected) in ((0, ("2", "3")), (2, ("2", "11"))):
        answers = [answer for answer, _ in templater.answers(pairs[index])]
        assert [a.tokens_T.tolist() for a in answers] == [tokens(f"1+1={t}").tolist() for t in (chosen, rejected)]
        assert [a.num_steps for a in answers] == [1, 1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": "1", "chosen": "2x", "rejected": "2"}', "no token for the characters 'x'"),
        ('{"prompt": "1", "good": "2", "rejected": "2"}', "data.train: row 0: column 'chosen' is not there"),
        ("", "data.train.* no rows"),
    ],
    ids=["alphabet", "column", "empty"],
)
def test_files_without_pairs(tmp_path, content, words):
    file = tmp_path / "pairs.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=words):
        measured(file)


# --- configuration


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rewards.functions=[{name: x, path: 'a:b'}]", "got rewards; expected none: nothing is generated"),
        ("model.lora={}", "got model.lora; expected none: all weights are trained"),
        ("training.warm_start={steps: 1}", "got training.warm_start; expected none"),
        ("placement.trainer={ranks: 2, tensor_parallel: 2}", "got placement.trainer.tensor_parallel; expected 1"),
        ("training.context_parallel=2", "got training.context_parallel; expected 1"),
    ],
)
def test_what_a_reward_model_has_no_part_in(override, words):
    recipe = ROOT / "recipes" / "reward_model.yaml"
    with pytest.raises(UserError) as error:
        load_config(recipe, [override, "runtime=ray"], into=Config)
    assert f"objective=reward_model: {words}" in str(error.value)
