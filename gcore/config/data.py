"""Section `data`: datasets of prompts, and the media in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from gcore.config.base import Arguments, Count, PositiveInt, Section
from gcore.config.objects import PythonObject, RowsPath, is_rows
from gcore.config.run import SetName


class Stored(Section):
    """A dataset in a file, in a folder, or on the hub."""

    path: RowsPath | None = None
    """A file (.jsonl, .json, .csv, .tsv or .parquet), the folder of a Hugging Face dataset, or a hub id such as
    `openai/gsm8k` (needs the extra `datasets`)."""
    subset: str | None = None
    """Hub ids and dataset folders: name of the subset (also called configuration), such as `main`."""
    split: str | None = None
    """Hub ids and dataset folders: name of the split, such as `test`. Default: `train` for the training set. A held-out
    set must name its split."""
    revision: str | None = None
    """Hub ids: branch, tag or commit. Default: `main`. The run's `config.yaml` records the commit."""


class Dataset(Stored):
    task: str | None = None
    """A generated task instead of `path`: `arithmetic`, `needle`, `keypad` (audio), `digits` (images; needs the extra
    `vision`), `draw_digits` (needs the extra `diffusion`), `reasoning_gym/NAME` (needs the extra `reasoning-gym`), or a
    function `package.module:NAME` or `file.py:NAME` that returns rows."""
    args: Arguments = {}
    """Arguments of the task."""
    size: PositiveInt | None = None
    """Use at most this many rows."""
    prompt_column: str = "auto"
    """Column with the prompt: a string or a list of messages. `auto`: `prompt`, `question`, `input` or `messages`."""
    answer_column: str = "auto"
    """Column with the reference answer. `auto`: `answer`, `ground_truth`, `label`, `solution` or verl's
    `reward_model.ground_truth`."""
    chosen_column: str = "chosen"
    """Pairs: column with the better answer: a string, messages, or the whole conversation as messages."""
    rejected_column: str = "rejected"
    """Pairs: column with the worse answer, in the same form."""

    @model_validator(mode="before")
    @classmethod
    def _of_rows(cls, value: Any) -> Any:
        """From Python, the rows themselves: a list of dicts, or a datasets.Dataset."""
        return {"path": PythonObject("rows", value)} if is_rows(value) else value

    @model_validator(mode="after")
    def _one_source(self) -> Dataset:
        if (self.path is None) == (self.task is None):
            raise ValueError("set exactly one of path (a file, folder or hub id) and task (a generated task)")
        if self.task is not None and (unused := [k for k in Stored.model_fields if getattr(self, k) is not None]):
            raise ValueError(f"{', '.join(unused)}: only for datasets with a path; this one has a task")
        return self


def _one_or_named(value: Any) -> str:
    """Sets are named if all keys are other than those of a dataset and all values are datasets."""
    if isinstance(value, Mapping) and value and not set(value) & set(Dataset.model_fields):
        named = all(isinstance(v, Mapping | Dataset) or is_rows(v) for v in value.values())
        return "named[]" if named else "one[]"
    return "one[]"


EvalSets = Annotated[
    Annotated[Dataset, Tag("one[]")] | Annotated[dict[SetName, Dataset], Tag("named[]")], Discriminator(_one_or_named)
]


class MediaData(Section):
    max_pixels: PositiveInt = 16_777_216
    """Maximum number of pixels of an image (or of a frame). Checked before it is decoded."""
    max_images: PositiveInt = 64
    """Maximum number of images, videos and audio clips of a prompt."""
    max_frames: PositiveInt = 64
    """Maximum number of frames of a video. A longer one is sampled at equal distances, to this number."""
    fps: Annotated[float, Field(gt=0)] = 2.0
    """Frames per second of videos whose data do not have it: a message part may have its own `fps`, and animated images
    have durations. The model sees it, as timestamps or positions."""
    max_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Maximum length of an audio clip. Checked before it is decoded."""
    max_bad_rows: Count = 0
    """Rows that may be dropped because a medium is corrupt, too large, missing or outside of `folder`; they are
    reported. With more of them the run ends before it starts."""
    folder: str | None = None
    """Folder that paths of images are relative to, and must be in. Default: the folder of the dataset's file."""
    allow_urls: bool = False
    """Download images from http and https addresses of the dataset when they are read."""


class Data(Section):
    train: Dataset
    """Prompts to train on."""
    eval: EvalSets | None = None
    """Held-out prompts, answered and scored by `rewards` as `evaluation` says: `eval/accuracy`. One dataset, or several
    with names, `{gsm8k: {path: ...}, sums: {task: ...}}`: `eval/NAME/accuracy` of each, and `eval/accuracy`, their
    mean."""
    system_prompt: str | None = None
    """System message before every prompt that is a string; needs a chat template."""
    max_prompt_length: PositiveInt = 512
    """Maximum length of a prompt in tokens, after the chat template. Longer ones are dropped and reported at load."""
    shuffle: bool = True
    """Use a seeded random order of the rows in each epoch."""
    media: MediaData = MediaData()
    """Images, videos and audio clips of the rows, for models that take them, see docs/vision.md and docs/audio.md."""

    @property
    def eval_sets(self) -> dict[str, Dataset]:
        """Evaluation sets by name; the name of a single set is empty."""
        if self.eval is None:
            return {}
        return {"": self.eval} if isinstance(self.eval, Dataset) else self.eval
