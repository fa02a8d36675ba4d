"""Judges that see: which images a judge gets, in which order, and in which form."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gcore.config.base import BuildModel, Model
from gcore.config.judges import RemoteJudge, ServedJudge
from gcore.content.media import store
from gcore.content.tokens import Tokens
from gcore.prompts.processor import load_processor
from gcore.prompts.tokenizer import load_tokenizer
from gcore.rewarding.judge import JudgeSource
from gcore.rewarding.judge_backend import EngineBackend, RemoteBackend
from gcore.types import Completion, Prompt, RewardError, Rollout, UserError
from tests.vision_families import picture

ALPHABET = "0123456789+=?"
SEEING, BLIND = (Model(build=BuildModel(alphabet=ALPHABET, vision=vision)) for vision in ({}, None))


def rollout(sibling: int, output: Any, images: list[Any]) -> Rollout:
    prompt = Prompt(7, 0, ({"role": "user", "content": "1+1="},), "", Tokens(np.array([1])), {"images": images})
    one = np.zeros(1, np.int32)
    content = Tokens(np.array([1], np.int32), one)
    return Rollout(prompt, sibling, content, one.astype(np.float32), one > 0, output, one, "stop")


def judge(model: Model, **options: Any) -> tuple[JudgeSource, list[Tokens]]:
    """A judge of 3 whose questions are recorded."""
    spec = ServedJudge(name="critic", model=model, template="{{ response }}?", **options)
    tokenizer, asked = load_tokenizer(model), list[Tokens]()

    async def ask(question: Tokens, params: Any, key: Any) -> Completion:
        asked.append(question)
        answer = np.array([tokenizer.convert_tokens_to_ids("3")], np.int32)
        return Completion(Tokens.steps(answer), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")

    vision = load_processor(model, tokenizer, None)
    return JudgeSource(spec, EngineBackend(spec, tokenizer, (2,), ask, "rewards.judges.0", vision), "k"), asked


def test_it_sees_the_prompt_and_pictures_that_are_answers(tmp_path: Path):
    source, asked = judge(SEEING)
    prompt_image, made = store(picture(0), tmp_path), store(picture(1), tmp_path)
    group = [rollout(0, "2", [prompt_image]), rollout(1, made, [prompt_image])]
    answer = asyncio.run(source.answer(group))
    assert answer.values == [3.0, 3.0]
    assert [
        [np.asarray(m.array.read() if hasattr(m.array, "read") else m.array).tolist() for m in q.media] for q in asked
    ] == [
        [picture(0).tolist()],
        [picture(0).tolist(), picture(1).tolist()],
    ]
    assert [q.size for q in asked] == [1 + 6 + 2, 1 + 12 + 8]  # bos, 4 features and 2 marks per image, the text


def test_a_blind_judge_reads(tmp_path: Path):
    source, asked = judge(BLIND)
    asyncio.run(source.answer([rollout(0, "2", [store(picture(0), tmp_path)])]))
    assert asked[0].media == () and asked[0].size == 3
    source, asked = judge(SEEING, images=False)
    asyncio.run(source.answer([rollout(0, "2", [picture(0)])]))
    assert asked[0].media == ()
    with pytest.raises(UserError, match=r"rewards\.judges\.0\.images=true: its model takes no images"):
        judge(BLIND, images=True)


def test_images_count_in_the_length_limit():
    source, _ = judge(SEEING, max_prompt_length=8)
    with pytest.raises(RewardError, match="the judge's prompt has 9 tokens; expected at most 8"):
        asyncio.run(source.answer([rollout(0, "2", [picture(0)])]))


def test_a_server_gets_png():
    spec = RemoteJudge(name="critic", url="http://127.0.0.1:1/v1", template="{{ response }}?", images=True)
    backend = RemoteBackend(spec, lambda key: 0, "k")
    message = {"role": "user", "content": [{"type": "image", "image": picture(5)}, {"type": "text", "text": "2?"}]}
    sent = backend.question([message], "here")[0][0]["content"]
    url = sent[0]["image_url"]["url"]
    assert sent[1] == message["content"][1] and url.startswith("data:image/png;base64,")
    found = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))
    assert np.array_equal(found, picture(5)) and backend.text([message]) == "[user]\n[image]2?"


def test_judges_get_no_videos():
    frames = np.stack([picture(0), picture(1)])
    source, _ = judge(SEEING)
    with pytest.raises((UserError, RewardError), match="a video; expected images: judges get no videos"):
        asyncio.run(source.answer([rollout(0, "2", [frames])]))
    spec = RemoteJudge(name="critic", url="http://127.0.0.1:1/v1", template="{{ response }}?", images=True)
    message = {"role": "user", "content": [{"type": "image", "image": frames}]}
    with pytest.raises(UserError, match="a video; expected images: judges get no videos"):
        RemoteBackend(spec, lambda key: 0, "k").question([message], "here")
