"""Images in dataset rows: every style of dataset, every kind of value, and one test per bad input."""

from __future__ import annotations

import base64
import contextlib
import http.server
import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gcore.config.base import BuildModel, Model
from gcore.config.data import Data, Dataset, MediaData
from gcore.content.media import ArrayRef, BadMedia, Video
from gcore.content.processor import MediaProcessor
from gcore.media.images import processors
from gcore.media.pixels import read_image, read_video
from gcore.prompts import media
from gcore.prompts.media import MediaReader, Value, has_media, messages_with_media
from gcore.prompts.processor import load_processor
from gcore.prompts.rows import load_rows
from gcore.prompts.source import Templater, check_bad_rows, measure
from gcore.prompts.tokenizer import load_tokenizer
from gcore.types import UserError
from tests.vision_families import picture

USER = {"role": "user", "content": "1+1="}
PART = {"type": "image"}
MODEL = Model(build=BuildModel(alphabet="0123456789+=", vision={}))


def png(pixels: np.ndarray, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", **options)
    return file.getvalue()


class Reader(MediaReader):
    def image(self, value: Any) -> np.ndarray:
        return read_image(value, self)

    def video(self, value: Any, fps: float | None = None) -> Video:
        return read_video(value, fps, self)


def reader(root: Path | None = None, **limits: Any) -> Reader:
    return Reader(MediaData(**limits), root)


# --- where media are in a row


def test_styles_of_datasets():
    text = {"type": "text", "text": "1+1="}
    trl = messages_with_media({"images": ["a", "b"]}, [USER])
    assert trl[0][0]["content"] == [PART, PART, text] and [v.value for v in trl[1]] == ["a", "b"]
    one = messages_with_media({"image": "a"}, [{"role": "system", "content": "?"}, USER])
    assert one[0][0]["content"] == "?" and one[0][1]["content"] == [PART, text]  # before the first user message
    placed = messages_with_media({"images": ["a"]}, [{"role": "user", "content": [text, PART]}])
    assert placed[0][0]["content"] == [text, PART] and placed[1] == (Value("image", "a"),)
    verl = messages_with_media({"images": ["a", "b"]}, [{"role": "user", "content": "<image>1+<image>1="}])
    assert [p["type"] for p in verl[0][0]["content"]] == ["image", "text", "image", "text"]
    url = [{"type": "image_url", "image_url": {"url": "data:..."}}, text]
    openai = messages_with_media({}, [{"role": "user", "content": url}])
    assert openai[0][0]["content"] == [PART, text] and openai[1] == (Value("image", "data:..."),)
    qwen = messages_with_media({}, [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}])
    assert qwen[1] == (Value("image", "x.png"),)
    video = messages_with_media({"video": ["a", "b"]}, [USER])
    assert video[0][0]["content"][0] == {"type": "video"} and video[1] == (Value("video", ["a", "b"]),)
    assert messages_with_media({"images": []}, [USER]) == ((USER,), ())
    assert has_media({"image": b"x"}) and not has_media({"image": None, "images": []}, [USER])


@pytest.mark.parametrize(
    ("row", "content", "message"),
    [
        ({"images": ["a"]}, [PART, PART], "more image parts than images"),
        ({"images": ["a", "b"]}, [PART], "1 more images in the row's columns than parts"),
        ({}, [{"type": "audio"}], "more audio parts than audios"),
    ],
)
def test_numbers_that_differ_are_bad(row, content, message):
    with pytest.raises(BadMedia, match=message):
        messages_with_media(row, [{"role": "user", "content": content}])


# --- pixels


def test_kinds_of_values(tmp_path):
    pixels, read = picture(0, 8, 12), reader(tmp_path).image
    data = png(pixels)
    (tmp_path / "a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for value in (pixels, data, bytearray(data), Image.fromarray(pixels), "a.png", str(tmp_path / "a.png"), url):
        assert np.array_equal(read(value), pixels), value
    for value in ({"bytes": data, "path": None}, {"bytes": None, "path": "a.png"}):  # Hugging Face image features
        assert np.array_equal(read(value), pixels)
    assert np.array_equal(read(pixels[..., 0]), np.repeat(pixels[..., :1], 3, 2))  # grey
    transparent = Image.fromarray(np.dstack([pixels, np.full((8, 12), 9, np.uint8)]), "RGBA")
    assert read(transparent).shape == (8, 12, 3)


def test_videos():
    frames = [picture(i, 8, 8) for i in range(3)]
    for value in (frames, tuple(png(frame) for frame in frames), np.stack(frames)):
        found = reader(fps=3.0).video(value)
        assert np.array_equal(found.frames, np.stack(frames)) and found.fps == 3.0
    assert reader().video(frames).fps == 2.0 and reader().video(frames, 7.0).fps == 7.0
    animated = movie(frames, duration=250)
    found = reader().video(animated)
    assert np.array_equal(found.frames, np.stack(frames)) and found.fps == 4.0  # four frames per second
    assert reader().video(animated, 7.0).fps == 7.0 and reader().video(movie(frames)).fps == 2.0


def movie(frames: list[np.ndarray], **options: Any) -> bytes:
    first, *rest = (Image.fromarray(frame) for frame in frames)
    file = io.BytesIO()
    first.save(file, "PNG", save_all=True, append_images=rest, **options)
    return file.getvalue()


def test_long_videos_are_sampled_evenly():
    frames = [picture(i, 8, 8) for i in range(9)]
    for value in (frames, np.stack(frames), movie(frames)):
        found = reader(max_frames=3).video(value, 4.0)
        assert np.array_equal(found.frames, np.stack([frames[i] for i in (0, 4, 8)]))
        assert found.fps == 1.0  # the last frame is two seconds after the first one, as before
    assert len(reader(max_frames=9).video(frames).frames) == 9


def test_frame_rates_in_message_parts():
    parts = [{"type": "video", "video": ["a"], "fps": 4}, {"type": "video", "sample_fps": 0.5}, PART]
    row = {"videos": [["b"]], "image": "c"}
    _, values = messages_with_media(row, [{"role": "user", "content": parts}])
    assert values == (Value("video", ["a"], 4.0), Value("video", ["b"], 0.5), Value("image", "c"))
    for fps in (0, -1.0, "2", True, float("nan")):
        with pytest.raises(BadMedia, match=r"a video with fps=.*; expected a number above 0"):
            messages_with_media({}, [{"role": "user", "content": [{**parts[0], "fps": fps}]}])


def truncated() -> bytes:
    return png(picture(0, 64, 64))[:-2000]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"no image", "8 bytes that are no image: Pillow finds no format in them"),
        (b"", "0 bytes that are no image"),
        (truncated(), "cannot be decoded"),
        ("../secret.png", "is outside of"),
        ("/etc/hostname", "is outside of"),
        ("missing.png", "cannot be read: No such file"),
        ("http://127.0.0.1:1/a.png", r"data\.media\.allow_urls=true"),
        ("https://example.com/a.png", r"data\.media\.allow_urls=true"),
        ("data:image/png;base64,@@@@", "a data URL that cannot be decoded"),
        ("data:image/png,abc", "a data URL that cannot be decoded"),
        (None, "an image that is null"),
        (7, "an image of type int"),
        (np.zeros((4, 4, 3), np.float32), r"of float32 and shape \(4, 4, 3\); expected uint8"),
        (np.zeros((4, 4, 2), np.uint8), "expected uint8, height x width x 3"),
        (np.zeros((0, 4, 3), np.uint8), "of 4 x 0 pixels"),
    ],
)
def test_bad_images(value, message, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "secret.png").write_bytes(png(picture(0)))
    with pytest.raises(BadMedia, match=message) as caught:
        reader(tmp_path / "data").image(value)
    assert "\n" not in str(caught.value)


def test_images_behind_addresses_have_a_largest_size_and_a_longest_time(monkeypatch):
    monkeypatch.setattr(media, "URL_BYTES", 1 << 20)
    served, sent = png(picture(3)), list[int]()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(404 if "missing" in self.path else 200)
            self.end_headers()
            with contextlib.suppress(OSError):
                match self.path:
                    case "/good.png":
                        self.wfile.write(served)
                    case "/endless":
                        for _ in range(1 << 10):
                            sent.append(self.wfile.write(bytes(1 << 20)))
                    case "/slow":
                        while not done.wait(0.01):
                            self.wfile.write(b"x")

        def log_message(self, *_):
            pass

    done = threading.Event()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        allowed = reader(allow_urls=True)
        assert np.array_equal(allowed.image(f"{address}/good.png"), picture(3))
        with pytest.raises(BadMedia, match="has more than 1 MB; expected an image"):
            allowed.image(f"{address}/endless")
        assert sum(sent) < 64 << 20
        with pytest.raises(BadMedia, match="cannot be read: HTTP status 404"):
            allowed.image(f"{address}/missing")
        monkeypatch.setattr(media, "URL_SECONDS", 0.2)
        with pytest.raises(BadMedia, match=r"cannot be read: it took more than 0\.2 s"):
            allowed.image(f"{address}/slow")
    finally:
        done.set()
        server.shutdown()
        server.server_close()


def test_a_link_out_of_the_folder_is_bad(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "secret.png").write_bytes(png(picture(0)))
    (tmp_path / "data" / "a.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(BadMedia, match="is outside of"):
        reader(tmp_path / "data").image("a.png")
    with pytest.raises(BadMedia, match=r"the dataset has no folder \(set data\.media\.folder\)"):
        reader(None).image("a.png")
    assert reader(None, folder=str(tmp_path)).image("secret.png").shape == (16, 16, 3)


def test_decompression_bombs_are_refused_by_their_header():
    """20,000 x 20,000 pixels in a small file: it is never decoded."""
    file = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(file, "PNG")
    assert len(file.getvalue()) < 100_000
    with pytest.raises(BadMedia, match=r"of 20000 x 20000 pixels; expected at most 16,777,216.*max_pixels"):
        reader().image(file.getvalue())


def test_caps():
    with pytest.raises(BadMedia, match="an image of 16 x 16 pixels; expected at most 255"):
        reader(max_pixels=255).image(picture(0))
    with pytest.raises(BadMedia, match="a video without frames"):
        reader().video([])
    with pytest.raises(BadMedia, match="frames have different sizes"):
        reader().video([picture(0), picture(0, 8, 8)])
    with pytest.raises(BadMedia, match=r"3 images; expected at most 2 \(data\.media\.max_images\)"):
        reader(max_images=2).read([Value("image", picture(0))] * 3)


# --- rows


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(MODEL)


def test_rows_by_reference_and_a_budget_of_bad_ones(tokenizer, tmp_path):
    vision = load_processor(MODEL, tokenizer, tmp_path / "media")
    templater = Templater(tokenizer, Data(train=Dataset(path="x")), processor=vision)
    good = {"prompt": "1+1=", "images": [picture(0), picture(1)], "answer": "2"}
    prompt = templater.prompt(good, 0, 0)
    assert all(
        isinstance(m.array, ArrayRef) and isinstance(m.inputs["pixel_values"], ArrayRef) for m in prompt.content.media
    )
    assert np.array_equal(prompt.columns["images"][1].read(), picture(1)) and prompt.columns["answer"] == "2"
    assert prompt.content.nbytes < 1000 and [m.grid for m in prompt.content.media] == [(1, 2, 2)] * 2
    assert prompt.content.work.media == (("image", 256), ("image", 256))
    rows = [good, {**good, "images": [b"x"]}, {"prompt": "2"}, {**good, "images": [picture(0), picture(2)]}]
    found = measure(rows, templater, 99)
    assert (found.kept, list(found.bad), found.with_media) == ([0, 2, 3], [1], 2)
    assert measure(rows[:1], templater, 99).digest != measure(rows[3:], templater, 99).digest  # the pixels count
    assert "(dropped, data.media.max_bad_rows=1)" in str(check_bad_rows(found.bad, 4, 1, "data.train"))
    with pytest.raises(
        UserError, match=r"data\.train: 1 of 4 rows have media that cannot be used: row 1: 1 bytes that"
    ):
        check_bad_rows(found.bad, 4, 0, "data.train")
    assert measure([good], templater, 10).too_long == [0]  # measured after expansion


def test_videos_of_a_built_model(tokenizer, tmp_path):
    data = Data(train=Dataset(path="x"))
    row = {"prompt": "1", "video": [picture(0, 40, 40)] * 4}
    templater = Templater(tokenizer, data, processor=load_processor(MODEL, tokenizer, None))
    with pytest.raises(
        BadMedia, match=r"no token for the characters ' \.<>cdenos' .*\(add them to model\.build\.alphabet"
    ):
        templater.content(row)
    model = Model(build=BuildModel(alphabet="0123456789+= .<>cdenos", vision={}))
    own = load_tokenizer(model)
    vision = load_processor(model, own, None)
    templater = Templater(own, data, processor=vision)
    found = templater.content(row)[2]
    (medium,) = found.media
    # 40 x 40 -> 32 x 32: the pixels of all frames together are at most 16 * 16**2
    assert medium.grid == (2, 4, 4) and found.work.media == (("image", 1024), ("image", 1024))
    wrapped = "<0.2 seconds><|vision_start|>" + "<|video_pad|>" * 16 + "<|vision_end|><1.2 seconds><|vision_start|>"
    assert f"<|vision_start|>{wrapped}" in own.decode(found.tokens_P)
    vision.save(tmp_path, None)  # as an export does
    again = MediaProcessor("qwen3_vl", own, processors("qwen3_vl", tmp_path, own)).content(
        *templater_input(templater, row)
    )
    assert again.context_bytes() == found.context_bytes() and again.media[0].grid == medium.grid


def templater_input(templater: Templater, row: dict[str, Any]) -> tuple[str, Any]:
    messages, values = messages_with_media(row, templater.messages(row))
    return templater._text(messages), reader().read(values)


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_image_features_of_datasets(kind, tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    pixels = picture(3)
    made = datasets.Dataset.from_dict({"prompt": ["1"], "images": [[{"bytes": png(pixels), "path": None}]]}, features)
    path = tmp_path / ("d.parquet" if kind == "parquet" else "d")
    made.to_parquet(str(path)) if kind == "parquet" else made.save_to_disk(str(path))
    row = load_rows(Dataset(path=str(path)), media=True)[0]
    _, values = messages_with_media(row, [USER])
    assert np.array_equal(reader().image(values[0].value), pixels)
    with pytest.raises(
        UserError, match=r"column 'images' holds .*; expected text only, because the model takes no media"
    ):
        load_rows(Dataset(path=str(path)))
