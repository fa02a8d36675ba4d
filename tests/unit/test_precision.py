"""bfloat16 is the precision of weights and activations. Buffers keep float32: rotary frequencies multiply positions."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, Qwen2Config

from gcore.config.base import Lora
from gcore.config.tree import Config
from gcore.content.tokens import Tokens
from gcore.generation.noise import noise_key
from gcore.launch.build import build_engine, build_judge, build_scorer, build_trainer
from gcore.launch.machines import Machine
from gcore.launch.plan import make_plan
from gcore.models.networks import score_texts
from gcore.prompts.tokenizer import build_char_tokenizer
from gcore.protocols import Rendezvous
from gcore.training.logprob_model import to_tensors
from gcore.training.lora import adapt
from gcore.types import MicroBatch, Request, Sample, SamplingParams
from tests.e2e.helpers import RECIPE

ALPHABET = "0123456789+="
HEAD, LONGEST = 64, 4096
EXACT = 10_000.0 ** -(np.arange(0, HEAD, 2, dtype=np.float64) / HEAD)
ALONE = Rendezvous(0, 1, None)
PROMPT, STEPS, ROWS = 560, 48, 4


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy and judge, and beside it a scorer. Attention of these weights depends on distance."""
    where = tmp_path_factory.mktemp("model")
    tokenizer = build_char_tokenizer(ALPHABET)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 2 * HEAD,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": LONGEST,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    scorer = AutoModelForSequenceClassification.from_config(Qwen2Config(**sizes, num_labels=1))
    for network, place in ((policy, where), (scorer, where / "scorer")):
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if parameter.dim() == 2:
                    wide = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
                    parameter.normal_(std=wide * parameter.shape[-1] ** -0.5)
        network.save_pretrained(place)
        tokenizer.save_pretrained(place)
    return where


def config_of(folder: Path) -> Config:
    tree = copy.deepcopy(RECIPE)
    tree["model"] = {"path": str(folder)}
    tree["data"]["max_prompt_length"] = PROMPT
    tree["generation"] = {"max_response_length": STEPS, "dtype": "bfloat16"}
    tree["training"] = {"dtype": "bfloat16", "device": "cpu", "lr": 1e-3}
    common = {"dtype": "bfloat16", "weight": 1.0}
    lengths = {"max_prompt_length": PROMPT, "max_response_length": STEPS}
    judge = {"name": "judge", "model": {"path": str(folder)}, "template": "{response}", **lengths, **common}
    model = {"name": "scorer", "model": {"path": str(folder / "scorer")}, **common}
    tree["rewards"] = {"judges": [judge], "models": [model]}
    return Config.model_validate(tree)


@pytest.fixture(scope="module")
def roles(folder: Path) -> dict[str, Any]:
    config = config_of(folder)
    plan = make_plan(config, Machine(2, 0))
    found = {
        "engine": build_engine(config, plan, ALONE),
        "judge": build_judge(config, plan, "judge", ALONE),
        "scorer": build_scorer(config, plan, 0, ALONE),
        "trainer": build_trainer(config, plan, ALONE),
    }
    yield found
    for name in ("engine", "judge", "scorer"):
        found[name].close()


def network_in(role: Any) -> Any:
    owner = getattr(role, "backend", role)
    return owner.networks["policy"].model.network if hasattr(owner, "networks") else owner._model


@pytest.mark.parametrize("name", ["engine", "judge", "scorer", "trainer"])
def test_angles_are_those_of_float32(name, roles):
    """In bfloat16 they were 0.22 rad off at position 512, and 1.8 rad at 4,095."""
    buffers = {k: v for k, v in network_in(roles[name]).named_buffers() if k.endswith("inv_freq")}
    assert buffers
    for frequencies in buffers.values():
        assert frequencies.dtype == torch.float32
        for position, close in ((512, 2e-5), (4095, 2e-4)):
            assert np.abs(frequencies.double().numpy() - EXACT).max() * position < close


def test_adapters_leave_buffers_in_float32(folder):
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapt(network, Lora(rank=4), 0, torch.bfloat16)
    assert network.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    assert {buffer.dtype for buffer in network.buffers()} == {torch.float32}


def test_a_decoding_step_turns_by_the_same_angles(roles):
    """The engine's table: cosines and sines rounded to bfloat16, of exact angles."""
    for name in ("engine", "judge"):
        fused = roles[name].backend._fused
        positions = np.arange(len(fused.cos))
        for table, function in ((fused.cos, np.cos), (-fused.sin, np.sin)):
            exact = function(positions[:, None] * EXACT)
            found = table[:, 0, : HEAD // 2].double().numpy()
            assert np.abs(found - exact).max() < 2.0**-9 + 1e-4


def logprobs_by(network: Any, tokens_T: np.ndarray) -> np.ndarray:
    tokens = torch.from_numpy(tokens_T.astype(np.int64))
    with torch.no_grad():
        logprobs = torch.log_softmax(network(tokens[None], use_cache=False).logits[0].float(), -1)
    return logprobs[:-1].gather(-1, tokens[1:, None])[-STEPS:, 0].numpy()


@pytest.fixture(scope="module")
def texts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(4, 16, PROMPT + STEPS).astype(np.int32) for _ in range(ROWS)]


@pytest.fixture(scope="module")
def libraries(folder: Path) -> tuple[Any, Any]:
    """The library's own networks: in float32, and in bfloat16 with the buffers it keeps in float32."""
    return tuple(AutoModelForCausalLM.from_pretrained(folder, dtype=t).eval() for t in (torch.float32, torch.bfloat16))


def error(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    return float(np.mean([np.abs(a - b).mean() for a, b in zip(found, wanted, strict=True)]))


@pytest.mark.parametrize("name", ["engine", "judge"])
def test_engines_in_bfloat16_are_as_near_to_float32_as_the_library(name, roles, texts, libraries):
    requests = [
        Request(Tokens(text[:PROMPT]), SamplingParams(max_tokens=STEPS), noise_key(0, i))
        for i, text in enumerate(texts)
    ]
    found = asyncio.run(roles[name].generate(requests))
    whole = [np.concatenate([text[:PROMPT], c.content.tokens_S]) for text, c in zip(texts, found, strict=True)]
    wanted, usual = ([logprobs_by(network, text) for text in whole] for network in libraries)
    assert error([c.logprobs_S for c in found], wanted) < 1.3 * error(usual, wanted)


def test_the_trainer_in_bfloat16_is_as_near_to_float32_as_the_library(roles, texts, libraries):
    zeros = np.zeros(STEPS, np.float32)
    samples = [Sample(i, 0, Tokens.split(text, STEPS), np.ones(STEPS, bool), zeros) for i, text in enumerate(texts)]
    keys = [s.key for s in samples]
    wanted, usual = ([logprobs_by(network, text) for text in texts] for network in libraries)
    for rows in ((tuple(keys),), tuple((key,) for key in keys)):
        width = len(rows[0]) * (PROMPT + STEPS)
        packed = to_tensors(MicroBatch(rows, width), {s.key: s for s in samples}, torch.device("cpu"))
        with torch.no_grad():
            logprobs_S, _ = roles["trainer"].backend.networks["policy"].model(packed)
        found = [logprobs_S[packed.sample_S == i].numpy() for i in range(len(packed.keys))]
        assert error(found, wanted) < 1.3 * error(usual, wanted)


def test_a_scorer_in_bfloat16_is_as_near_to_float32_as_the_library(folder, roles, texts):
    exact, usual = (
        AutoModelForSequenceClassification.from_pretrained(folder / "scorer", dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    with torch.no_grad():
        wanted, library = (score_texts(network, texts, PROMPT + STEPS + 1).numpy() for network in (exact, usual))
    found = np.array(asyncio.run(roles["scorer"].score(texts)))
    assert np.abs(found - wanted).mean() < 1.3 * np.abs(library - wanted).mean()
