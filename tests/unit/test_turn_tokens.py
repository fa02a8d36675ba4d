"""Conversations of ten turns with tools, by the chat templates of families of models: what is trained are the tokens
that the policy sampled, bit for bit, with the logprobs that it sampled them with.

tests/templates has a small template per family, which does with calls, results and thoughts what the family's own does.
The policy is a real network in the embedded engine; the test chooses the tokens that it samples.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config

from gcore.config.generation import Generation
from gcore.content.text import TextModality
from gcore.content.tokens import Tokens
from gcore.generation import embedded
from gcore.generation.embedded import EmbeddedBackend
from gcore.generation.engine_shell import SteppedEngine
from gcore.models.networks import auto_class
from gcore.training.logprob_model import LogprobModel, to_tensors
from gcore.types import Completion, Message, MicroBatch, Prompt, Request, Rollout, Sample
from gcore.workflows import use_tools
from gcore.workflows.context import SampleContext, SharedContext
from tests.unit.test_endpoint import post
from tests.unit.test_evaluation import config_of

FOLDER = Path(__file__).parents[1] / "templates"
LONGEST = 4096
BLOCK = r"<think>\n.*?\n</think>\n\n"


@dataclass(frozen=True)
class Family:
    format: str
    special: str  # tokens that are left out of the clean text
    stops: str
    others: str = ""  # tokens that stay in the clean text
    thinks: str = ""  # the field of thoughts
    calls: int = 2  # per turn
    talks: bool = True  # content beside calls
    ids: str = "call{0:05}"
    moves: str = ""  # what the template leaves out of earlier turns, or puts elsewhere, as a pattern
    end: str = ""  # what the policy ends turns with, if the template does not: after calls, and after answers
    bos: str = "<s>"


CHATML = ("<|im_start|> <|im_end|>", "<|im_end|>", "<tool_call> </tool_call> <think> </think>")
FAMILIES = {
    "qwen3": Family("hermes", *CHATML, thinks="reasoning_content", moves=BLOCK),
    "hermes": Family("hermes", *CHATML),
    "qwen3_coder": Family("qwen3_coder", *CHATML),
    "llama3_1": Family(
        "llama3",
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>",
        *("<|eot_id|> <|eom_id|>",),
        calls=1,
        talks=False,
        bos="<|begin_of_text|>",
    ),
    "llama4": Family("llama4", "<s> <|header_start|> <|header_end|> <|eot|>", "<|eot|>", talks=False),
    "mistral": Family(
        "mistral",
        "<s> </s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        *("</s>",),
        talks=False,
        moves=r"\[AVAILABLE_TOOLS\].*?\[/AVAILABLE_TOOLS\]",
    ),
    "glm4_5": Family(
        "glm",
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|endoftext|>",
        *("<|user|> <|observation|> <|endoftext|>",),
        "<tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value> <think> </think>",
        thinks="reasoning_content",
        moves=r"\n<think>.*?</think>",
        end="<|observation|> <|user|>",
    ),
    "deepseek_v3_1": Family(
        "deepseek",
        "<s> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> "
        "<｜tool▁sep｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>",
        *("<｜end▁of▁sentence｜>", "<think> </think>"),
    ),
    "kimi_k2": Family(
        "kimi",
        "<|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|im_end|> <|tool_calls_section_begin|> "
        "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>",
        *("<|im_end|>",),
        ids="functions.{1}:{0}",
    ),
    "gpt_oss": Family(
        "harmony",
        "<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|>",
        *("<|return|> <|call|>",),
        thinks="thinking",
        calls=1,
        talks=False,
        moves=r"<\|channel\|>analysis<\|message\|>.*?<\|end\|><\|start\|>assistant",
    ),
    "minimax_m2": Family(
        "minimax",
        "]~!b[ ]~b] [e~[",
        *("[e~[", "<minimax:tool_call> </minimax:tool_call> <think> </think>"),
        thinks="reasoning_content",
        moves=BLOCK,
    ),
}


def tool(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [tool("add", a="integer", b="integer"), tool("find", city="string", days="integer")]
ADD, FIND = ("add", {"a": 1, "b": 27}), ("find", {"city": 'Rome, "the city"\n{7}', "days": 3})
# what the policy says in each turn, and what follows it: a result per call, or the next question
PLAN: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = [
    ("One moment.", [ADD]),
    ("", [FIND, ADD]),
    ("It is 28.", []),
    ("", [ADD]),
    ("Again 28.", []),
    ("No tool for that.", []),
    ("First.", [FIND]),
    ("", [ADD, ADD]),
    ("Sunny,\nand 28.", []),
    ("Bye.", []),
]
RESULTS = {"add": "28", "find": '{"sky": "<clear>"}'}


def said_by(family: Family) -> list[Message]:
    """The turns of the policy, as messages."""
    messages = []
    for number, (content, planned) in enumerate(PLAN):
        calls = [
            {"id": family.ids.format(i, name), "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(planned[: family.calls])
        ]
        message: Message = {"role": "assistant", "content": content if family.talks or not calls else ""}
        if family.thinks:
            message[family.thinks] = f"Turn {number}: what next?"
        messages.append({**message, **({"tool_calls": calls} if calls else {})})
    return messages


def answers_to(message: Message, number: int) -> list[Message]:
    if not message.get("tool_calls"):
        return [{"role": "user", "content": f"And {number}?"}]
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": RESULTS[call["function"]["name"]]}
        for call in message["tool_calls"]
    ]


QUESTION = {"role": "user", "content": "What is 1 + 27?"}


@cache
def tokenizer_of(name: str) -> Any:
    """Bytes with merges, trained on the template's own text: tokens across the ends of lines, words and brackets."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    family, template = FAMILIES[name], (FOLDER / f"{name}.jinja").read_text()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([template, json.dumps(PLAN), json.dumps(TOOLS)] * 3, trainer)
    backend.add_tokens([AddedToken(text, normalized=False) for text in family.others.split()])
    special = [*family.special.split(), "<s>", "<pad>"]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in dict.fromkeys(special)])
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=backend, bos_token=family.bos, eos_token=family.stops.split()[0])
    tokenizer.chat_template = template
    return tokenizer


@cache
def network_of(vocabulary: int) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=LONGEST,
    )
    network = auto_class(config).from_config(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return network


@dataclass
class Policy:
    """In place of a pool: the embedded engine, which samples the tokens of the next text of the script."""

    tokenizer: Any
    script: list[str]
    engine: SteppedEngine
    made: list[Completion] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)  # still to be sampled

    async def generate(self, requests: list[Request], priority: int, key: Any) -> list[Completion]:
        self.chosen[:] = self.tokenizer(self.script[len(self.made)], add_special_tokens=False)["input_ids"]
        self.made += await self.engine.generate(requests)
        assert not self.chosen, "the engine has ended the turn before the end of the script"
        return self.made[-1:]

    def sample(self, logits: torch.Tensor, rows: Any) -> Any:
        (temperature,) = rows.temperature[:1]
        rows.position[:1] += 1
        token = self.chosen.pop(0)
        logprobs = torch.log_softmax(logits.float() / temperature, -1)
        return np.array([token]), logprobs[:1, token].numpy(), {}


class World:
    """One sample of a family's policy. `script`: instead of what the template makes of the planned turns."""

    def __init__(self, name: str, monkeypatch: Any, script: list[str] | None = None, **generation: Any) -> None:
        self.family, self.tokenizer = FAMILIES[name], tokenizer_of(name)
        self.network = network_of(len(self.tokenizer))
        self.said = said_by(self.family)
        stops = tuple(self.tokenizer.convert_tokens_to_ids(self.family.stops.split()))
        given = {"max_response_length": LONGEST // 2, "temperature": 0.7, **generation}
        self.modality = TextModality(Generation(**given), self.tokenizer, stops)
        script = [self.text_of(message) for message in self.said] if script is None else script
        engine = SteppedEngine(EmbeddedBackend(self.network, max_concurrent=1, max_length=LONGEST))
        self.policy = Policy(self.tokenizer, script, engine)
        monkeypatch.setattr(embedded, "sample", self.policy.sample)
        self.shared = SharedContext(config_of(), self.policy, SimpleNamespace(), self.modality)  # type: ignore[arg-type]
        self.ctx = SampleContext(self.shared)
        self.prompt = Prompt(7, 7, (QUESTION,), "", Tokens(np.array([1], np.int32)))

    def render(self, messages: list[Message], **options: Any) -> str:
        text: str = self.modality._render(messages, **options)
        return text

    def text_of(self, message: Message) -> str:
        """What the template wants the policy to say, up to the end of the turn."""
        before = self.render([QUESTION], add_generation_prompt=True, tools=TOOLS)
        whole = self.render([QUESTION, message], tools=TOOLS)
        assert whole.startswith(before)
        text = whole[len(before) :].rstrip("\n")
        ends = self.family.end.split()
        return text + (ends[not message.get("tool_calls")] if ends else "")

    def decoded(self, tokens: Any) -> str:
        return str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False))

    async def by_calls(self) -> Rollout:
        """ctx.generate, then ctx.proceed."""
        (rollout,) = await self.ctx.generate(self.prompt, 1, messages=[QUESTION], tools=TOOLS)
        for number, message in enumerate(self.said):
            turn = self.ctx.read(rollout, TOOLS)
            assert rollout.finish == "stop" and turn.content == message["content"]
            assert turn.reasoning == message.get(self.family.thinks, "")
            wanted = [call["function"] for call in message.get("tool_calls", ())]
            assert [{"name": call.name, "arguments": call.arguments} for call in turn.calls] == wanted
            if number + 1 < len(self.said):
                feedback = [{**m, "tool_call_id": None} for m in answers_to(message, number)]
                feedback = [{k: v for k, v in m.items() if v is not None} for m in feedback]
                rollout = await self.ctx.proceed(rollout, feedback)
        return rollout

    async def by_http(self) -> Rollout:
        """An agent that drops the thoughts, as the libraries of agents do."""
        async with self.ctx.serve(self.prompt, 1) as (session,), aiohttp.ClientSession() as http:
            messages: list[Message] = [QUESTION]
            for number, message in enumerate(self.said):
                status, answer = await post(http, session, messages=messages, tools=TOOLS)
                assert status == 200, answer
                said = answer["choices"][0]["message"]
                assert said.pop("reasoning_content", "") == message.get(self.family.thinks, "")
                assert said["content"] == message["content"]
                found = [call["function"] for call in said.get("tool_calls", ())]
                wanted = [call["function"] for call in message.get("tool_calls", ())]
                assert [{**call, "arguments": json.loads(call["arguments"])} for call in found] == wanted
                messages += [said, *answers_to(said, number)]
        return session.rollout

    def check(self, rollout: Rollout) -> None:
        """Its tokens are those that were sampled, its logprobs those of the engine and of the trainer, in each segment.
        No token is trained in two of them."""
        made, tokens, logprobs = self.policy.made, list[Any](), list[Any]()
        assert len(made) == len(self.policy.script)
        for segment in reversed(rollout.trajectory):
            own_S = segment.mask_S & (np.arange(segment.num_steps) >= segment.shared)
            tokens.append(segment.content.tokens_S[own_S])
            logprobs.append(segment.logprobs_S[own_S])
            sample = Sample(7, 0, segment.content, segment.mask_S, segment.logprobs_S, segment.temperature)
            batch = MicroBatch(((sample.key,),), segment.content.size)
            with torch.no_grad():
                packed = to_tensors(batch, {sample.key: sample}, torch.device("cpu"))
                trained = LogprobModel(self.network)(packed)[0].numpy()
            assert segment.logprobs_S[own_S].std() > 0.1
            assert np.abs(trained - segment.logprobs_S)[segment.mask_S].max() <= 1e-5
        assert np.array_equal(np.concatenate(tokens), np.concatenate([one.content.tokens_S for one in made]))
        assert np.array_equal(np.concatenate(logprobs), np.concatenate([one.logprobs_S for one in made]))


@pytest.mark.parametrize("name", FAMILIES)
def test_ten_turns_with_tools_are_the_tokens_that_were_sampled(name, monkeypatch):
    world = World(name, monkeypatch)
    assert world.shared.tool_format.name == world.family.format
    rollout = asyncio.run(world.by_calls())
    world.check(rollout)
    # the whole is what the template makes of the conversation, except for what it changes in earlier turns
    conversation: list[Message] = [QUESTION]
    for number, message in enumerate(world.said):
        conversation += [message, *answers_to(message, number)]
    wanted = world.render(conversation[:-1], tools=TOOLS)
    whole = world.decoded(rollout.content.tokens_T)
    assert comparable(world.family, whole) == comparable(world.family, wanted)
    if world.family.thinks:
        assert whole.count("what next?") == 10 > wanted.count("what next?")
    # an agent by HTTP gets the same sample, or if the template leaves out thoughts, a segment for each question
    again = World(name, monkeypatch)
    served = asyncio.run(again.by_http())
    again.check(served)
    if not world.family.thinks:
        (whole,) = served.trajectory
        assert whole.content.tokens_T.tolist() == rollout.content.tokens_T.tolist()
        assert whole.mask_S.tolist() == rollout.mask_S.tolist()
    else:
        questions = [i for i, message in enumerate(conversation[:-1]) if message["role"] == "user"]
        spoken = [{k: v for k, v in m.items() if k != world.family.thinks} for m in conversation]
        contexts = [world.render(spoken[: i + 1], tools=TOOLS, add_generation_prompt=True) for i in questions]
        found = [world.decoded(segment.content.tokens_P) for segment in reversed(served.trajectory)]
        assert len(found) == 5 and found == contexts
    assert world.shared.take_calls()["calls"] == sum(len(m.get("tool_calls", ())) for m in world.said)


def comparable(family: Family, text: str) -> str:
    """Without what the template changes in earlier turns, and without the end of the last turn."""
    if family.moves:
        text = re.sub(family.moves, "", text, flags=re.DOTALL)
    if family.format == "harmony":
        text = text.replace("<|return|>", "<|end|>")
    ends = "|".join(map(re.escape, ["<|end|>", *family.stops.split()]))
    return re.sub(rf"(?:{ends})?\s*\Z", "", text)


@pytest.mark.parametrize("end", ["<|eot_id|>", "<|eom_id|>"])
def test_the_policy_may_end_its_turn_by_another_token_than_the_template(end, monkeypatch):
    world = World("llama3_1", monkeypatch, script=["28" + end, "Bye.<|eot_id|>"])
    rollout = asyncio.run(by_question(world))
    start = "<|start_header_id|>"
    asked = f"{start}user<|end_header_id|>\n\nSure?<|eot_id|>{start}assistant<|end_header_id|>\n\n"
    assert world.decoded(rollout.content.tokens_S) == f"28{end}{asked}Bye.<|eot_id|>"


def test_a_turn_that_was_cut_gets_the_end_of_a_turn(monkeypatch):
    cut, last = "<|channel|>final<|message|>2", "<|channel|>final<|message|>Bye.<|return|>"
    world = World("gpt_oss", monkeypatch, script=[cut, last])
    length = len(world.tokenizer(cut, add_special_tokens=False)["input_ids"])
    rollout = asyncio.run(by_question(world, max_tokens=length))
    asked = "<|end|><|start|>user<|message|>Sure?<|end|><|start|>assistant"
    assert world.decoded(rollout.content.tokens_S) == cut + asked + last


async def by_question(world: World, **first: Any) -> Rollout:
    (rollout,) = await world.ctx.generate(world.prompt, 1, messages=[QUESTION], **first)
    return await world.ctx.proceed(rollout, [{"role": "user", "content": "Sure?"}])


def test_calls_in_special_tokens_run_and_broken_ones_are_counted(monkeypatch):
    section, call = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>", "<|tool_call_begin|>{}<|tool_call_end|>"
    argument = "<|tool_call_argument_begin|>"
    right, broken = (
        call.format(f'functions.add:0{argument}{{"a": 1, "b": 27}}'),
        call.format(f"functions.add:1{argument}1+"),
    )
    script = [section.format(right + broken) + "<|im_end|>", "It is 28.<|im_end|>"]
    world = World("kimi_k2", monkeypatch, script)

    def add(a: int, b: int) -> int:
        """The sum."""
        return a + b

    world.shared.n = 1
    (rollout,) = asyncio.run(use_tools(world.ctx, world.prompt, [add]))
    text = world.decoded(rollout.content.tokens_S)
    assert "## Return of functions.add:0\n28<|im_end|>" in text and "error: the call is not JSON" in text
    assert rollout.text.startswith('functions.add:0{"a": 1') and rollout.turn == "It is 28."  # as before, for people
    assert world.shared.take_calls() == {"calls": 2, "unparsed_calls": 1} and not world.shared.take_calls()


def test_an_agent_gets_a_broken_call_as_text(monkeypatch):
    broken = "<think>\nso\n</think>\n\n<tool_call>\nadd(1)\n</tool_call>"
    world = World("qwen3", monkeypatch, [broken + "<|im_end|>", "Sorry.<|im_end|>"])

    async def main() -> Any:
        async with world.ctx.serve(world.prompt, 1) as (session,), aiohttp.ClientSession() as http:
            body = {"messages": [QUESTION], "tools": TOOLS}
            choice = (await post(http, session, **body))[1]["choices"][0]
            again = [QUESTION, choice["message"], {"role": "user", "content": "?"}]
            assert (await post(http, session, messages=again, tools=TOOLS))[0] == 200
            return choice, session.rollout

    choice, rollout = asyncio.run(main())
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("<tool_call>\nadd(1)\n</tool_call>", "so")
    assert choice["finish_reason"] == "stop" and "tool_calls" not in message
    assert world.shared.take_calls() == {"calls": 1, "unparsed_calls": 1}
    world.check(rollout)
