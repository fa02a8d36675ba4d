"""Audio clips in dataset rows: wav files and arrays, their rate, one test per bad input; and a built model's processor,
costs and page. The task `keypad`."""

from __future__ import annotations

import base64
import io
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gcore.config.base import BuildModel, Model
from gcore.config.data import Data, Dataset, MediaData
from gcore.config.generation import Generation
from gcore.config.tree import Config
from gcore.content.media import ArrayRef, BadMedia, shown_media
from gcore.content.processor import MediaProcessor
from gcore.content.text import TextModality
from gcore.content.tokens import Tokens
from gcore.cost.shapes import model_shape, shape_of
from gcore.media.audio import RATE, processors, resample
from gcore.modalities.media_keys import check_media_keys
from gcore.prompts.keypad import COLUMNS, ROWS, make_keypad
from gcore.prompts.media import MediaReader, Value, messages_with_media
from gcore.prompts.processor import load_processor
from gcore.prompts.rows import load_rows
from gcore.prompts.source import Templater, measure
from gcore.prompts.tokenizer import load_tokenizer
from gcore.types import SampleMeta, UserError

PART = {"type": "audio"}
USER = {"role": "user", "content": "1+1="}
AUDIO = {"hidden_size": 32, "intermediate_size": 32, "layers": 1, "heads": 2, "mel_bins": 16}
MODEL = Model(build=BuildModel(architecture="qwen2", alphabet="0123456789+=", audio=AUDIO))


def tone(seconds: float = 0.1, rate: int = RATE, frequency: float = 1000.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def wav(samples: np.ndarray, width: int = 2, rate: int = RATE) -> bytes:
    """`samples`: [time], or [time, channels]."""
    channels = samples.shape[1] if samples.ndim == 2 else 1
    whole = np.round(samples.astype(np.float64) * (2 ** (8 * width - 1) - 1)).astype(np.int64) + (
        128 if width == 1 else 0
    )
    data = whole.astype("<i8").reshape(-1, 1).view(np.uint8)[:, :width].tobytes()
    file = io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setparams((channels, width, rate, 0, "NONE", ""))
        made.writeframes(data)
    return file.getvalue()


def read_clip(value: Any, root: Path | None = None, **limits: Any) -> np.ndarray:
    ((kind, found),) = MediaReader(MediaData(**limits), root).read([Value("audio", value)])
    assert kind == "audio" and found.dtype == np.float32 and found.ndim == 1
    return found


# --- values


def test_styles_of_datasets():
    text = {"type": "text", "text": "1+1="}
    trl = messages_with_media({"audios": ["a", "b"]}, [USER])
    assert trl[0][0]["content"] == [PART, PART, text] and [v.value for v in trl[1]] == ["a", "b"]
    stored = {"array": [0.0, 0.5], "sampling_rate": 8000}
    one = messages_with_media({"audio": stored}, [USER])
    assert one[0][0]["content"] == [PART, text] and one[1] == (Value("audio", stored),)
    verl = messages_with_media({"audios": ["a"]}, [{"role": "user", "content": "1<audio>="}])
    assert verl[0][0]["content"] == [{"type": "text", "text": "1"}, PART, {"type": "text", "text": "="}]
    parts = [{"type": "audio", "audio": "a"}, {"type": "audio_url", "audio_url": {"url": "b"}}, PART]
    parts.append({"type": "input_audio", "input_audio": {"data": "YQ==", "format": "wav"}})
    own = messages_with_media({"audio": "c"}, [{"role": "user", "content": parts}])
    assert own[0][0]["content"] == [PART] * 4
    assert [v.value for v in own[1]] == ["a", "b", "c", {"data": "YQ==", "format": "wav"}]


@pytest.mark.parametrize(("width", "close"), [(1, 1 / 120), (2, 1e-4), (3, 1e-6), (4, 1e-7)])
def test_wav_files(width: int, close: float, tmp_path: Path):
    given = tone()
    data = wav(given, width)
    assert np.abs(read_clip(data) - given).max() < close
    both = np.stack([given, 0.5 * given], 1)
    assert np.abs(read_clip(wav(both, width)) - 0.75 * given).max() < close  # the mean of the channels
    (tmp_path / "a.wav").write_bytes(data)
    encoded = base64.b64encode(data).decode()
    for value in ("a.wav", {"bytes": data, "path": None}, {"bytes": None, "path": "a.wav"}, bytearray(data),
                  f"data:audio/wav;base64,{encoded}", {"data": encoded, "format": "wav"}):  # fmt: skip
        assert np.array_equal(read_clip(value, tmp_path), read_clip(data))


def test_arrays_have_a_rate():
    given = tone()
    for array in (given, given.astype(np.float64), given.tolist()):
        assert np.abs(read_clip({"array": array, "sampling_rate": RATE}) - given).max() < 1e-7
    with pytest.raises(BadMedia, match=r"an audio clip of int16 and .*; expected one axis of floats"):
        read_clip({"array": given.astype(np.int16), "sampling_rate": RATE})


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 16_001])
def test_other_rates_are_resampled(rate: int):
    """A tone that both rates have stays as it is; one that the lower rate cannot have disappears."""
    found = resample(tone(0.2, rate), rate, RATE)
    assert found.shape == (-(-round(0.2 * rate) * RATE // rate),)
    middle = slice(400, -400)
    assert np.abs(found - tone(0.21)[: len(found)])[middle].max() < 2e-3
    if rate > RATE + 1:
        assert np.abs(resample(tone(0.2, rate, 10_000), rate, RATE))[middle].max() < 5e-3
    assert np.array_equal(read_clip(wav(tone(0.2, rate), 2, rate)), resample(read_16(tone(0.2, rate)), rate, RATE))
    assert resample(np.ones(1, np.float32), rate, RATE).shape == (-(-RATE // rate),)


def read_16(samples: np.ndarray) -> np.ndarray:
    return (np.round(samples.astype(np.float64) * 32767) / 32768).astype(np.float32)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"no sound", "8 bytes that are no wav file of integers: file does not start with RIFF id"),
        (wav(tone())[:30], "30 bytes that are no wav file of integers: it ends too early"),
        (b"ID3" + bytes(99), "102 bytes that are no wav file of integers: file does not start with RIFF id"),
        (wav(tone())[:-1000], r"a wav file with 2200 bytes of 1600 x 1 samples of 16 bits"),
        (wav(tone())[:20] + struct.pack("<H", 3) + wav(tone())[22:], "no wav file of integers: unknown format: 3"),
        (wav(tone(), rate=999), "of 999 samples per second; expected 1,000 to 400,000"),
        (wav(tone()[:0]), r"an audio clip of 0\.00 seconds; expected at most 30"),
        ("missing.wav", r"the audio 'missing\.wav' cannot be read: No such file"),
        ("../secret.wav", "is outside of"),
        (None, "an audio clip that is null"),
        (7, "an audio clip of type int; expected bytes, a path, a URL"),
        (tone(), "an audio clip of type ndarray; expected bytes"),
        ({"array": tone()}, "sampling_rate=None; expected"),
        ({"array": np.stack([tone()] * 2), "sampling_rate": RATE}, r"shape \(2, 1600\), sampling_rate=16000"),
        ({"array": ["a"], "sampling_rate": RATE}, "an audio clip of <U1"),
        ({"array": [0.0, float("nan")], "sampling_rate": RATE}, "an audio clip with a NaN or an infinity"),
        ("http://127.0.0.1:1/a.wav", r"data\.media\.allow_urls=true"),
    ],
)
def test_bad_clips(value: Any, message: str, tmp_path: Path):
    (tmp_path / "data").mkdir()
    with pytest.raises(BadMedia, match=message) as caught:
        read_clip(value, tmp_path / "data")
    assert "\n" not in str(caught.value)


def test_long_clips_are_refused_by_their_header():
    data = bytearray(wav(tone()))
    data[40:44] = struct.pack("<I", 2**31)  # bytes of samples that are not there
    with pytest.raises(BadMedia, match=r"of 67108\.86 seconds; expected at most 30 \(data\.media\.max_seconds\)"):
        read_clip(bytes(data))
    with pytest.raises(BadMedia, match=r"of 0\.10 seconds; expected at most 0\.05"):
        read_clip(wav(tone()), max_seconds=0.05)
    with pytest.raises(BadMedia, match=r"3 audio clips; expected at most 2 \(data\.media\.max_images\)"):
        MediaReader(MediaData(max_images=2), None).read([Value("audio", wav(tone()))] * 3)


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_audio_features_of_datasets(kind: str, tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    stored = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = datasets.Features({"prompt": datasets.Value("string"), "audio": stored})
    made = datasets.Dataset.from_dict({"prompt": ["1"], "audio": [{"bytes": wav(tone()), "path": None}]}, features)
    made = made.cast_column("audio", datasets.Audio(decode=False))
    path = tmp_path / ("d.parquet" if kind == "parquet" else "d")
    made.to_parquet(str(path)) if kind == "parquet" else made.save_to_disk(str(path))
    row = load_rows(Dataset(path=str(path)), media=("audio",))[0]
    _, values = messages_with_media(row, [USER])
    assert np.abs(read_clip(values[0].value) - tone()).max() < 1e-4
    with pytest.raises(UserError, match=r"column 'audio' holds .*; expected text only"):
        load_rows(Dataset(path=str(path)))


# --- prompts of a built model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(MODEL)


def test_rows_by_reference_and_what_they_cost(tokenizer: Any, tmp_path: Path):
    templater = Templater(
        tokenizer, Data(train=Dataset(path="x")), processor=load_processor(MODEL, tokenizer, tmp_path)
    )
    good = {"prompt": "1+1=", "audios": [wav(tone(0.5)), wav(tone(0.1))], "answer": "2"}
    prompt = templater.prompt(good, 0, 0)
    assert prompt.text.count("<|AUDIO|>") == 2 and prompt.content.nbytes < 1000
    assert all(isinstance(m.array, ArrayRef) and isinstance(m.inputs["input_features"], ArrayRef)
               for m in prompt.content.media)  # fmt: skip
    heard = prompt.columns["audios"][1].read()
    assert heard.dtype == np.float32 and np.abs(heard - tone(0.1)).max() < 1e-4
    assert "images" not in prompt.columns and prompt.columns["prompt"][0]["content"][0] == PART
    rows = [good, {**good, "audios": [b"x"]}, {"prompt": "2"}]
    found = measure(rows, templater, 99)
    assert (found.kept, list(found.bad), found.with_media) == ([0, 2], [1], 1)
    # seconds are work: 50 and 10 frames, two for a token of the encoder
    assert prompt.content.work.media == (("audio", 50), ("audio", 10))
    cost = model_shape(MODEL, "model").cost
    tower = cost.tower("audio")
    assert tower is not None and tower.patch == 2 and cost.tower("image") is None
    meta = SampleMeta(0, 0, prompt.content.work, actions=1)
    work = cost.of_sample(meta) - cost.of(prompt.content.size)
    assert work == pytest.approx((tower.of(25) + tower.of(5)) * tower.flops / cost.flops) and work > 0.2


def test_the_cost_of_the_encoder_is_read_from_config_json(tmp_path: Path):
    from transformers import Qwen2AudioConfig, Qwen2Config

    Qwen2AudioConfig(text_config=Qwen2Config().to_dict()).save_pretrained(tmp_path)
    tower = shape_of(str(tmp_path)).cost.tower("audio")
    assert tower is not None and tower.flops == 2 * 32 * (4 * 1280**2 + 2 * 1280 * 5120) and not tower.causal


def test_an_export_has_the_settings(tokenizer: Any, tmp_path: Path):
    from transformers import AutoProcessor

    own = load_processor(MODEL, tokenizer, None)
    own.save(tmp_path, None)
    mark = "<|audio_bos|><|AUDIO|><|audio_eos|>="
    again = MediaProcessor("qwen2_audio", tokenizer, processors("qwen2_audio", tmp_path, tokenizer))
    a, b = (each.content(mark, [("audio", tone(0.5))]) for each in (own, again))
    assert a.context_bytes() == b.context_bytes()
    assert np.array_equal(a.media[0].inputs["input_features"], b.media[0].inputs["input_features"])
    tokenizer.save_pretrained(tmp_path)
    theirs = AutoProcessor.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "Qwen2AudioProcessor" and theirs.feature_extractor.chunk_length == 2
    assert theirs(text=mark, audio=[tone(0.5)], sampling_rate=RATE)["input_ids"][0] == a.tokens_P.tolist()


def test_a_page_plays_the_clip():
    (url,) = shown_media({"audios": [tone(0.5)], "images": "x"})
    assert url.startswith("data:audio/wav;base64,") and len(url) < 6_000
    found = read_clip(url)
    assert np.abs(found - tone(0.5))[400:-400].max() < 0.02 and len(found) == RATE // 2
    (long,) = shown_media({"audios": [tone(20)]})
    assert len(read_clip(long)) == 8 * RATE


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_other_engines_are_refused(engine: str):
    config = Config.model_validate({
        "model": MODEL.model_dump(exclude_unset=True), "data": {"train": {"task": "keypad"}, "max_prompt_length": 32},
        "generation": {"engine": engine, "max_response_length": 8},
        "rewards": {"functions": [{"name": "exact", "path": "gcore.rewarding.rules:exact_answer"}]},
    })  # fmt: skip
    with pytest.raises(UserError, match=f"engine={engine}: audio clips need embedded; the model takes audio"):
        check_media_keys(config, "qwen2_audio")


def test_built_models_of_audio():
    with pytest.raises(ValueError, match="audio needs architecture=qwen2, got qwen3"):
        BuildModel(audio={})
    with pytest.raises(ValueError, match=r"4 \* heads=16 must divide hidden_size=36"):
        BuildModel(architecture="qwen2", audio={"hidden_size": 36})
    templater = Templater(load_tokenizer(MODEL), Data(train=Dataset(path="x")), processor=load_processor(
        MODEL, load_tokenizer(MODEL), None))  # fmt: skip
    with pytest.raises(BadMedia, match="an image; expected audio clips: images are not supported for qwen2_audio"):
        templater.content({"prompt": "1", "image": np.zeros((4, 4, 3), np.uint8)})


def test_audio_of_tools_is_refused(tokenizer: Any):
    modality = TextModality(Generation(), tokenizer, (2,), processor=load_processor(MODEL, tokenizer, None))
    tool = [{"role": "tool", "content": [{"type": "audio", "audio": tone()}]}]
    with pytest.raises(UserError, match=r"ctx\.proceed: an audio clip of a tool; expected images"):
        modality.between_turns(Tokens.steps(np.array([5, 2], np.int32)), tool)


# --- the task


def test_keys_are_two_tones():
    rows = make_keypad({"answer": "read", "noise": 0.0, "most": 1, "least": 1}, 60, "data.train")
    for row in rows:
        clip, rate = row["audio"]["array"], row["audio"]["sampling_rate"]
        power = np.abs(np.fft.rfft(clip, 1 << 15))
        heard = [max(group, key=lambda f: power[round(f * (1 << 15) / rate)]) for group in (ROWS, COLUMNS)]
        names = "123456789*0#"
        assert names[3 * ROWS.index(heard[0]) + COLUMNS.index(heard[1])] == row["answer"]
        assert 0.09 <= len(clip) / rate <= 0.22
    assert {row["answer"] for row in rows} == set("0123456789")


def test_clips_of_the_splits_differ_and_demonstrations_are_wrong_in_one_way():
    rows = list(make_keypad({"sloppy": 0.7, "most": 3}, 300, "data.train"))
    wrong = [row for row in rows if row["demonstration"] != row["answer"]]
    assert 0.6 < len(wrong) / len(rows) < 0.8 and {row["answer"].count("+") for row in rows} == {1, 2}
    for row in wrong:
        (*before, total), (*seen, sloppy) = row["answer"].split("="), row["demonstration"].split("=")
        assert before == seen and int(sloppy) == int(total) + 1
    held_out = list(make_keypad({"most": 3, "split": "eval"}, 300, "data.eval"))
    clips = [{row["audio"]["array"].tobytes() for row in each} for each in (rows, held_out)]
    assert len(clips[0] | clips[1]) == 600
    again = make_keypad({"sloppy": 0.7, "most": 3}, 300, "data.train")[7]
    assert np.array_equal(again["audio"]["array"], rows[7]["audio"]["array"])
    for args, message in (({"least": 3}, "least: expected 1 to 2, got 3"), ({"answer": "x"}, "read, sum or steps")):
        with pytest.raises(UserError, match=message):
            make_keypad(args, 4, "data.train")
