"""Audio clips, and the models that take them: Qwen2-Audio, whose encoder is that of Whisper.

    wav file, array ──mono, 16 kHz──> waveform ──log-mel spectrogram──> a frame per 10 ms
    frames ──encoder: a position per two frames; pairs of positions are averaged──> features ──projector──> decoder

transformers pads a clip to the window of the encoder (30 s) and masks the padding. Here a clip has its own frames and
the two behind them that the convolutions read, and it is encoded alone. The features are the same; the work is in
proportion to the seconds, and no bit depends on other clips.
"""

from __future__ import annotations

import io
import json
import math
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from gcore.config.base import BuildModel
from gcore.config.data import MediaData
from gcore.content.families import MediaSource
from gcore.content.media import BadMedia, Media, data_url
from gcore.content.processor import FILES, Expanded, KindProcessor, read_settings
from gcore.types import UserError

if TYPE_CHECKING:
    from torch import Tensor

RATE = 16_000  # samples per second of all clips
RATES = range(1_000, 400_001)  # of files
CROSSINGS = 24  # zeros of the filter on each side
SHOWN_RATE, SHOWN_SECONDS = 8_000, 8  # in a page
HOP, PLACEHOLDER = 160, "<|AUDIO|>"
SETTINGS = {"feature_size": 128, "hop_length": HOP, "n_fft": 400, "chunk_length": 30, "sampling_rate": RATE}
FILE = FILES[0]


def read(kind: str, value: Any, fps: float | None, source: MediaSource) -> np.ndarray:
    """Of a wav file, or of {"array": ..., "sampling_rate": ...}."""
    if isinstance(value, Mapping) and "array" in value:
        samples, rate = np.asarray(value["array"]), value.get("sampling_rate")
        if samples.ndim != 1 or samples.dtype.kind != "f" or type(rate) is not int:
            got = f"{samples.dtype} and shape {samples.shape}, sampling_rate={rate!r}"
            raise BadMedia(f"an audio clip of {got}; expected one axis of floats, and samples per second")
        _check_length(len(samples), rate, source.limits)
    else:
        if isinstance(value, Mapping) and "data" in value:  # OpenAI's input_audio
            value = f"data:;base64,{value['data']}"
        samples, rate = _of_wav(source.load("audio", value), source.limits)
    if not np.isfinite(samples).all():
        raise BadMedia("an audio clip with a NaN or an infinity; expected samples from -1 to 1")
    return resample(samples, rate, RATE)


def shown(array: np.ndarray) -> str:
    """The first seconds, as telephones transmit them: 8 kHz, 8 bits."""
    samples = resample(array[: SHOWN_SECONDS * RATE], RATE, SHOWN_RATE)
    with wave.open(file := io.BytesIO(), "wb") as made:
        made.setparams((1, 1, SHOWN_RATE, 0, "NONE", ""))
        made.writeframes((samples * 127 + 128).clip(0, 255).astype(np.uint8).tobytes())
    return data_url("audio/wav", file.getvalue())


def _of_wav(data: bytes, limits: MediaData) -> tuple[np.ndarray, int]:
    """Samples, the mean of the channels, and their rate. The length is checked before anything is decoded."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            channels, width, rate, number = file.getparams()[:4]
            _check_length(number, rate, limits)
            raw = np.frombuffer(file.readframes(number), np.uint8)
    except (wave.Error, EOFError) as error:
        why = " ".join(str(error).split()) or "it ends too early"
        raise BadMedia(f"{len(data)} bytes that are no wav file of integers: {why}") from error
    if len(raw) < number * channels * width or width > 4:
        raise BadMedia(f"a wav file with {len(raw)} bytes of {number} x {channels} samples of {8 * width} bits")
    whole = np.zeros((number, channels, 4), np.uint8)  # the highest byte is the last one
    whole[..., 4 - width :] = raw.reshape(number, channels, width)
    whole[..., 3] ^= 128 if width == 1 else 0  # these have no sign
    return whole.view("<i4").mean((1, 2)).astype(np.float32) / 2**31, rate


def _check_length(number: int, rate: int, limits: MediaData) -> None:
    if rate not in RATES:
        raise BadMedia(f"an audio clip of {rate} samples per second; expected {RATES[0]:,} to {RATES[-1]:,}")
    if not 0 < number <= limits.max_seconds * rate:
        got = f"an audio clip of {number / rate:.2f} seconds"
        raise BadMedia(f"{got}; expected at most {limits.max_seconds:g} (data.media.max_seconds)")


def resample(samples: np.ndarray, rate: int, new: int) -> np.ndarray:
    """By a polyphase filter: a sinc below half of the lower rate, with a Hann window."""
    if rate == new:
        return np.ascontiguousarray(samples, np.float32)
    common = math.gcd(rate, new)
    up, down, cutoff = new // common, rate // common, min(1.0, new / rate)
    half, number = math.ceil(CROSSINGS / cutoff), -(-len(samples) * up // down)
    firsts, parts = np.divmod(np.arange(min(up, number)) * down, up)
    at = np.arange(1 - half, half + 1) - parts[:, None] / up  # of each phase, the samples around one of the new ones
    filters = cutoff * np.sinc(cutoff * at) * np.cos(np.pi / 2 * np.clip(at / half, -1, 1)) ** 2
    windows = sliding_window_view(np.pad(samples.astype(np.float32), (half - 1, half + down)), 2 * half)
    found = np.empty(number, np.float32)
    for phase, (first, filter_) in enumerate(zip(firsts, filters.astype(np.float32), strict=True)):
        own = found[phase::up]  # einsum makes no copy of the windows
        np.einsum("nk,k->n", windows[first::down][: len(own)], filter_, out=own)
    return found


class Clips:
    """Implements content.processor.KindProcessor. `settings`: of transformers' WhisperFeatureExtractor."""

    def __init__(self, settings: Mapping[str, Any], tokenizer: Any) -> None:
        from transformers.audio_utils import mel_filter_bank

        self._settings = {name: settings.get(name, default) for name, default in SETTINGS.items()}
        bins, self._hop, self._width, seconds, rate = self._settings.values()
        if rate != RATE:
            raise UserError(f"model.path: its processor has sampling_rate={rate}; expected {RATE}")
        self.window = seconds * rate  # samples that the encoder sees
        self._filters = mel_filter_bank(1 + self._width // 2, bins, 0.0, 8000.0, rate, "slaney", "slaney")
        self._hann = np.hanning(self._width + 1)[:-1]
        self.placeholder = str(getattr(tokenizer, "audio_token", PLACEHOLDER))
        self.features: tuple[int, ...] = (int(tokenizer.convert_tokens_to_ids(self.placeholder)),)

    def variant(self, given: Any, number: int) -> str:
        return ""

    def expand(self, array: np.ndarray, given: Any, number: int) -> Expanded:
        frames = -(-len(array) // self._hop)
        if frames < 3 or len(array) > self.window:
            expected = f"more than {2 * self._hop / RATE:g} and at most {self.window / RATE:g}, as its encoder hears"
            raise UserError(f"an audio clip of {len(array) / RATE:.3f} seconds; expected {expected}")
        inputs = {"input_features": self._log_mel(array, frames), "num_frames": np.array([frames])}
        return Expanded(self.placeholder * ((frames + 1) // 4), inputs, work=(("audio", frames),))

    def save(self, folder: Path) -> None:
        kinds = {"feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "Qwen2AudioProcessor"}
        more = {"return_attention_mask": True, "padding_side": "right", "padding_value": 0.0}
        (folder / FILE).write_text(json.dumps({**self._settings, **kinds, **more}, indent=2))

    def _log_mel(self, samples: np.ndarray, frames: int) -> np.ndarray:
        """[bins, frames + 2], as the extractor computes them for a clip that is padded to the window."""
        frames = min(frames + 2, self.window // self._hop)
        end = min(frames * self._hop + self._width, self.window)
        padded = np.pad(np.pad(samples, (0, end - len(samples))).astype(np.float64), self._width // 2, mode="reflect")
        windows = sliding_window_view(padded, self._width)[:: self._hop][:frames] * self._hann
        power = np.abs(np.fft.rfft(windows)) ** 2
        found = np.log10(np.maximum(self._filters.T @ power.T, 1e-10))
        return ((np.maximum(found, found.max() - 8) + 4) / 4).astype(np.float32)


def processors(family: str, folder: Path, tokenizer: Any) -> dict[str, KindProcessor]:
    return {"audio": Clips(read_settings(folder, "feature_extractor"), tokenizer)}


def built_processors(build: BuildModel, tokenizer: Any) -> dict[str, KindProcessor]:
    assert build.audio is not None
    return {"audio": Clips({"feature_size": build.audio.mel_bins, "chunk_length": build.audio.seconds}, tokenizer)}


def build_network(build: BuildModel, tokenizer: Any, decoder: dict[str, Any]) -> Any:
    """A small Qwen2-Audio. Positions of its encoder do not learn: they are sines, as in Whisper."""
    import torch
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration
    from transformers.models.whisper.modeling_whisper import sinusoids

    audio = build.audio
    assert audio is not None
    width, positions = audio.hidden_size, audio.seconds * RATE // HOP // 2
    tower = {"d_model": width, "encoder_layers": audio.layers, "encoder_attention_heads": audio.heads}
    tower |= {"encoder_ffn_dim": audio.intermediate_size, "num_mel_bins": audio.mel_bins}
    tower |= {"max_source_positions": positions}
    tower |= {"initializer_range": width**-0.5}  # what is heard is as large as the sines
    options: dict[str, Any] = {"attn_implementation": "sdpa", "audio_config": tower}
    options["text_config"] = {**decoder, "model_type": "qwen2", "tie_word_embeddings": False}
    config = Qwen2AudioConfig(audio_token_index=tokenizer.convert_tokens_to_ids(PLACEHOLDER), **options)
    network = Qwen2AudioForConditionalGeneration(config)
    with torch.no_grad():
        network.model.audio_tower.embed_positions.weight.copy_(sinusoids(positions, width))
    return network


def encode(network: Any, media: Sequence[Media]) -> list[tuple[Tensor, ...]]:
    return [(_features(network.model, medium.tensors()),) for medium in media]


def _features(model: Any, inputs: Mapping[str, np.ndarray]) -> Tensor:
    import torch
    from torch.nn.functional import gelu

    tower, positions = model.audio_tower, (int(inputs["num_frames"][0]) + 1) // 2
    weight = tower.conv1.weight
    frames = torch.from_numpy(np.array(inputs["input_features"])).to(weight.device, weight.dtype)
    hidden = gelu(tower.conv2(gelu(tower.conv1(frames[None]))))[..., :positions].transpose(1, 2)
    hidden = hidden + tower.embed_positions.weight[:positions]
    for layer in tower.layers:
        hidden = layer(hidden, None)
    hidden = tower.layer_norm(tower.avg_pooler(hidden.transpose(1, 2)).transpose(1, 2))
    features: Tensor = model.multi_modal_projector(hidden)[0]
    return features


def smallest(network: Any) -> Media:
    frames = np.zeros((network.config.audio_config.num_mel_bins, 5), np.float32)
    return Media("audio", "", frames[0], {"input_features": frames, "num_frames": np.array([3])})
