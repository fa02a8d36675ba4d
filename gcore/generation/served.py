"""Which families of models vLLM and SGLang serve: read from the files of the installed version, without importing it.

A library serves the classes of its registry. It runs others by the modules of transformers, if these let a library
compute attention, and have no layers with states. A library that is not installed has a table of one version here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from gcore.config.base import Model
from gcore.config.engines import DEFAULT_ENGINE, ENGINES
from gcore.content.families import built_family
from gcore.hub import model_folder
from gcore.types import UserError

# model_type of transformers 5.19
BOTH = """afmoe apertus arcee cohere cohere2 cohere2_moe cohere2_vision dbrx deepseek_v2 deepseek_v3 deepseek_v32
    deepseek_v4 diffusion_gemma ernie4_5_moe ernie4_5_vl_moe exaone4 falcon_h1 falcon_mamba gemma gemma2 gemma3
    gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe
    glm_moe_dsa glm_ocr gpt-sw3 gpt2 gpt_bigcode gpt_oss gptj granite granitemoe granitemoehybrid granitemoeshared
    hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 kimi_linear laguna lfm2 lfm2_moe lfm2_vl llama llama4 llama4_text
    llava longcat_flash mamba mamba2 mellum mimo_v2_flash minicpm3 minicpmv4_6 minimax_m2 minimax_m3_vl ministral3
    mistral mistral3 mixtral nemotron_h olmo olmo2 olmoe opt paddleocr_vl persimmon phi phi3 qwen2 qwen2_5_vl
    qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe shieldgemma2
    stablelm starcoder2 step3p7"""
VLLM = """aria axk1 aya_vision blip-2 bloom chameleon cwm ernie4_5 exaone4_5 falcon flex_olmo fuyu glm gpt_neox
    granite4_vision hunyuan_vl hyperclovax idefics3 internvl jais2 jamba llava_next llava_next_video llava_onevision mpt
    nemotron olmo3 olmo_hybrid paligemma qianfan_ocr seed_oss smollm3 smolvlm zamba2"""
SGLANG = """cosmos3_edge exaone_moe gemma4_assistant gemma4_unified_assistant glm5_next granite_swa granitemoe_swa hy_v4
    inkling_mm_model minicpmv4_7 muse_glimmer nemotron_h_omni qwen3_5_moe_text qwen3_5_text zaya"""
VERSIONS = {"vllm": ("0.24.0", BOTH + VLLM), "sglang": ("0.5.23", BOTH + SGLANG)}


@dataclass(frozen=True, slots=True)
class Registry:
    """Registry("vLLM 0.24.0", frozenset({"Qwen3ForCausalLM", ...}))"""

    library: str
    classes: frozenset[str]  # as in `architectures` of config.json
    families: frozenset[str] = frozenset()  # instead, of a library that is not installed

    @property
    def header(self) -> str:
        """For tables."""
        return f"{self.library}, not installed" if self.families else self.library

    def has(self, family: str, architecture: str) -> bool:
        return architecture in self.classes or family in self.families


@lru_cache
def registry(engine: str) -> Registry:
    """Of an engine with a registry in its row of ENGINES."""
    traits = ENGINES[engine]
    found = importlib.util.find_spec(traits.packages[0])
    if found is None or found.origin is None:
        version, families = VERSIONS[engine]
        return Registry(f"{traits.library} {version}", frozenset(), frozenset(families.split()))
    assert traits.registry is not None
    files, pattern = traits.registry
    texts = [path.read_text(encoding="utf-8-sig") for path in Path(found.origin).parent.glob(files)]
    lists = [text for file in texts for text in re.findall(pattern, file, re.MULTILINE)]
    return Registry(f"{traits.library} {_version(traits.packages)}", frozenset(re.findall(r"\w+", " ".join(lists))))


def _version(packages: tuple[str, ...]) -> str:
    for name in packages:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of an unknown version"


def class_of(family: str) -> str:
    """The class of transformers that makes a model of this type: with its towers, if it has any."""
    from transformers.models.auto import modeling_auto

    for table in ("IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM"):
        if found := getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").get(family):
            return found if isinstance(found, str) else found[0]
    return ""


def served_by(engine: str, family: str, architecture: str) -> str:
    """How: "its own" code, or "transformers". Raises UserError, without a key, if the engine does not serve it."""
    known = registry(engine)
    if known.has(family, architecture):
        return "its own"
    if _runs_in_libraries(family, architecture):
        return "transformers"
    advice = f"another model, or engine={DEFAULT_ENGINE}"
    outer = family.removesuffix("_text")
    if outer != family and known.has(outer, class_of(outer)):
        advice = f"a folder of type {outer} ({class_of(outer)}), or engine={DEFAULT_ENGINE}"
    raise UserError(f"{known.library} does not serve models of type {family} ({architecture}); expected {advice}")


def _runs_in_libraries(family: str, architecture: str) -> bool:
    """By the modules of transformers, with attention of the library."""
    import transformers

    from gcore.models.decoders import STATEFUL

    network = getattr(transformers, architecture, None)
    return family not in STATEFUL and network is not None and bool(network.is_backend_compatible())


def check_served(model: Model, engine: str, key: str) -> None:
    """Raises UserError, before anything is loaded, if the engine does not serve this family. A plug-in of the library
    may serve more than its registry has."""
    traits = ENGINES[engine]
    added = importlib.metadata.entry_points(group=traits.plugins) if traits.plugins else ()
    if not traits.registry or any(not plugin.value.startswith(f"{traits.packages[0]}.") for plugin in added):
        return
    family, architecture = _type_of(model)
    where = (
        f"{key}.path={model.path}" if model.build is None else f"{key}.build.architecture={model.build.architecture}"
    )
    if architecture:
        try:
            served_by(engine, family, architecture)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


def _type_of(model: Model) -> tuple[str, str]:
    if model.build is not None:
        family = built_family(model.build) or model.build.architecture
        return family, class_of(family)
    config = json.loads((model_folder(model) / "config.json").read_text())
    family = str(config.get("model_type", ""))
    return family, next(iter(config.get("architectures") or ()), class_of(family))
