"""`gcore export`: writes the policy of a checkpoint as a Hugging Face folder, and compares it after reloading.

runs/NAME/step_N ──> FOLDER: safetensors, config, tokenizer with chat template
                 └─> FOLDER-adapter: the adapters in PEFT's format (with model.lora, which FOLDER has merged)

One file of the result is in memory at a time. The whole model is there only if transformers must write it: if it stores
the tensors of this kind of model differently (experts one by one), or if the model has its own code.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore.checkpoint import store
from gcore.config.base import Model
from gcore.config.load import load_config
from gcore.config.tree import Config
from gcore.content.processor import MediaProcessor
from gcore.modalities.table import kind_of
from gcore.types import UserError, writing

if TYPE_CHECKING:
    from huggingface_hub import StateDictSplit
    from torch import Tensor

    from gcore.models.networks import Adapters

PART_BYTES = 5 * 10**9  # of a file of the result


def locate(path: Path) -> tuple[Path, Path]:
    """(run folder, checkpoint) for `runs/NAME` or `runs/NAME/step_N`."""
    if not path.exists():
        raise UserError(f"{path}: no such folder; expected runs/NAME or runs/NAME/step_N")
    if (path / store.MANIFEST).is_file():
        return path.parent, store.verify(path)
    while found := store.complete_checkpoints(path):
        if (name := store.first_damaged_file(found[-1])) is None:
            return path, found[-1]
        if (found[-1] / store.MANIFEST).is_file():
            raise store.damage_error(found[-1], name)  # else the run has deleted it, and has a newer one
    raise UserError(f"{path}: no complete checkpoint there; expected runs/NAME or runs/NAME/step_N")


def adapter_folder(folder: Path) -> Path:
    """The folder of the adapters: export/model -> export/model-adapter"""
    return folder.with_name(f"{folder.resolve().name}-adapter")


def export(source: Path, folder: Path) -> int:
    """Write the policy to `folder`. Returns the number of its tensors, which were read again and compared."""
    from safetensors import SafetensorError

    run, checkpoint = locate(source)
    with store.reading(checkpoint):
        config = load_config(run / "config.yaml")
        for place in (folder, *([adapter_folder(folder)] if config.model.lora else [])):
            _check_place(place)
        try:
            return kind_of(config).export(checkpoint, folder, adapter_folder(folder))
        except (OSError, SafetensorError) as error:  # the disk is full, or a share is gone
            raise UserError(
                f"{folder}: not exported: {' '.join(str(error).split())}; delete what was written there, and try again "
                "where there is enough space"
            ) from error


def export_language_model(
    config: Config, checkpoint: Path, folder: Path, adapters: Path, tokenizer: Any, processor: MediaProcessor | None
) -> int:
    """`processor`: of a model that takes media."""
    from huggingface_hub import split_torch_state_dict_into_shards

    from gcore.hub import model_folder
    from gcore.models.networks import load_whole, make_empty
    from gcore.prompts.tokenizer import with_padding
    from gcore.weights.pretrained import conversions, stored_tensors

    scorer = config.objective == "reward_model"
    network: Any = make_empty(config.model, tokenizer, scorer=scorer)
    if scorer:  # serving reads the last token that is not padding
        network.config.pad_token_id = with_padding(tokenizer, config.model).pad_token_id
    policy = _Policy(checkpoint / "weights", config, network, tokenizer)
    if policy.adapters is not None:
        _save_adapters(adapters, network, policy.adapters, policy.factors, config.model.path)
    files = split_torch_state_dict_into_shards(stored_tensors(network), max_shard_size=PART_BYTES)
    parts = list(files.filename_to_tensors.values())
    if conversions(network) or config.model.trust_remote_code:  # transformers must write it: the whole model at once
        network = load_whole(config.model, tokenizer, config.run.seed)
        for names in parts:
            network.load_state_dict(policy.read(names), strict=False)
        network.save_pretrained(folder, max_shard_size=PART_BYTES)
    else:
        _save_files(folder, policy, files)
        _save_config(folder, network, config.model)
    if config.model.path is not None:
        _copy_left_out(folder, network, config.model)
    tokenizer.save_pretrained(folder)
    if processor is not None:
        processor.save(folder, None if config.model.path is None else model_folder(config.model))
    _compare(folder, policy, parts, tokenizer, config.model.trust_remote_code, scorer)
    return sum(map(len, parts))


def _check_place(folder: Path) -> None:
    """UserError if the folder has files, or cannot be written. It exists afterwards."""
    with writing(folder, "; choose another folder to export to"):
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder}: the folder is not empty; choose another folder to export to")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


class _Policy:
    """The weights of the policy in a checkpoint, with adapters merged. `folder`: its sharded tensors."""

    def __init__(self, folder: Path, config: Config, network: Any, tokenizer: Any) -> None:
        from gcore.checkpoint import tensors
        from gcore.models.networks import adapters_of
        from gcore.weights.pretrained import open_weights, stored_tensors

        self._folder, self._saved, self._read = folder, tensors.shapes(folder).keys(), tensors.read
        self.adapters = adapters_of(network, config.model.lora) if config.model.lora else None
        self.factors = tensors.read(folder, self._saved) if self.adapters else {}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors(network).items()}
        if self._shapes.keys() - self._saved:  # adapters, or buffers that training does not change
            self._base = open_weights(network, config.model, config.run.seed, tokenizer)

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """In float32."""
        found = self._read(self._folder, [name for name in names if name in self._saved])
        return {name: found[name] if name in found else self._merged(name) for name in names}

    def _merged(self, name: str) -> Tensor:
        from gcore.models.networks import LORA_A, LORA_B

        base = self._base(name, tuple(map(slice, self._shapes[name]))).float()
        layer = name.removesuffix(".weight")
        if self.adapters is None or layer not in self.adapters.layers:
            return base
        return self.adapters.merge(base, self.factors[layer + LORA_A], self.factors[layer + LORA_B])


def _save_files(folder: Path, policy: _Policy, files: StateDictSplit) -> None:
    """As transformers writes them, one at a time in memory."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for file, names in files.filename_to_tensors.items():
        tensors = {name: tensor.contiguous() for name, tensor in policy.read(names).items()}
        save_file(tensors, folder / file, {"format": "pt"})
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": dict(sorted(files.tensor_to_filename.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _copy_left_out(folder: Path, network: Any, model: Model) -> None:
    """What transformers does not read of the model's folder, such as the layers of Qwen3.5 that predict several tokens:
    engines may use it. It is as it was."""
    from safetensors.torch import save_file

    from gcore.hub import model_folder
    from gcore.weights.pretrained import INDEX, SINGLE, WeightFiles, left_out

    source = WeightFiles(model_folder(model))
    if not (names := [name for name in source.shapes if left_out(network, name)]):
        return
    file, index = "model-left-out.safetensors", dict[str, Any](metadata={}, weight_map={})
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())
    else:
        index["weight_map"] = dict.fromkeys(WeightFiles(folder).shapes, SINGLE)
    save_file({name: source.read(name).contiguous() for name in names}, folder / file, {"format": "pt"})
    index["weight_map"] |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def _save_config(folder: Path, network: Any, model: Model) -> None:
    from transformers import GenerationConfig

    from gcore.hub import model_folder

    network.config.dtype, network.config.architectures = "float32", [type(network).__name__]
    network.config.save_pretrained(folder)
    generation = getattr(network, "generation_config", None)  # a reward model has none
    if model.path is not None and (model_folder(model) / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(str(model_folder(model)))
    if generation is not None:
        generation.save_pretrained(folder)


def _compare(folder: Path, policy: _Policy, parts: list[list[str]], tokenizer: Any, trust: bool, scorer: bool) -> None:
    """Open the folder as a run would, and compare every tensor with the checkpoint. Raises RuntimeError."""
    from transformers import AutoTokenizer

    from gcore.models.networks import make_empty
    from gcore.weights.pretrained import open_weights, stored_tensors

    if AutoTokenizer.from_pretrained(folder).get_vocab() != tokenizer.get_vocab():
        raise RuntimeError(f"{folder}: the reloaded tokenizer has another vocabulary")
    model = Model(path=str(folder), trust_remote_code=trust)
    network = make_empty(model, tokenizer, scorer=scorer)
    shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors(network).items()}
    read = open_weights(network, model, 0, tokenizer)
    for names in parts:
        for name, expected in policy.read(names).items():
            if not read(name, tuple(map(slice, shapes[name]))).equal(expected):
                raise RuntimeError(f"{folder}: {name} differs from the checkpoint after reloading")


def _save_adapters(
    folder: Path, network: Any, adapters: Adapters, factors: dict[str, Tensor], base: str | None
) -> None:
    from safetensors.torch import save_file

    ends = sorted({layer.rpartition(".")[2] for layer in adapters.layers})
    matched = {name for name, _ in network.named_modules() if name.rpartition(".")[2] in ends}
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ends if matched == set(adapters.layers) else list(adapters.layers),
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in factors.items()}
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(about, indent=1))
