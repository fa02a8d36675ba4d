"""Models whose files are in FP8 (one scale per block) or MXFP4 are read as the weights that they stand for."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gcore.models.networks import load_model
from gcore.types import UserError
from gcore.weights.pretrained import WeightFiles
from tests.contract.test_families import FAMILIES, family, save
from tests.unit.test_loading import CPU, assert_same, filled, path_of

BLOCK = 16


def quantise(folder: Path, about: dict[str, object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": about}))


def in_fp8(folder: Path) -> dict[str, torch.Tensor]:
    """Writes the projections again, in FP8. Returns what they stand for, from a loop over blocks."""
    file = folder / "model.safetensors"
    tensors, meant = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in load_file(file).items():
        if not name.endswith("proj.weight"):
            tensors[name] = weight
            continue
        rows, columns = weight.shape
        stored, plain = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
        scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
        for r in range(0, rows, BLOCK):
            for c in range(0, columns, BLOCK):
                block = weight[r : r + BLOCK, c : c + BLOCK].float()
                scale = block.abs().max() / 448
                stored[r : r + BLOCK, c : c + BLOCK] = (block / scale).to(torch.float8_e4m3fn)
                scales[r // BLOCK, c // BLOCK] = scale
                plain[r : r + BLOCK, c : c + BLOCK] = stored[r : r + BLOCK, c : c + BLOCK].float() * scale
        tensors |= {name: stored, f"{name}_scale_inv": scales}
        meant[name] = plain
    save_file(tensors, file, metadata={"format": "pt"})
    about = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    quantise(folder, about)
    return meant


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_fp8_is_read_part_by_part(name, tmp_path, caplog):
    save(FAMILIES[name](), tmp_path)
    meant = in_fp8(tmp_path)
    with caplog.at_level(logging.WARNING):
        network = filled(path_of(tmp_path))
    assert "the whole model" not in caplog.text
    assert "quantization_config" not in network.config.to_dict()  # which is what an export writes
    parameters = dict(network.named_parameters())
    assert len(meant) > 10 and all(torch.equal(parameters[n], w) for n, w in meant.items())
    assert_same(network, load_model(path_of(tmp_path), None, 0, torch.float32, CPU))  # as transformers reads it
    files = WeightFiles(tmp_path)
    for tensor, weight in meant.items():
        part = (slice(3, weight.shape[0] - 1), slice(5, 30))
        assert torch.equal(files.read(tensor, part), weight[part])
        assert torch.equal(files.read(tensor), weight)


def test_experts_in_mxfp4_are_read(tmp_path):
    """Pairs of 4-bit numbers in a byte, 32 of them with a power of two as their scale."""
    save(family("GptOssConfig", head_dim=8, hidden_size=32, intermediate_size=32, num_local_experts=4)(), tmp_path)
    tensors, meant = load_file(tmp_path / "model.safetensors"), dict[str, torch.Tensor]()
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat([numbers, -numbers])
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 126, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
        pairs = torch.stack([numbers[(blocks & 15).long()], numbers[(blocks >> 4).long()]], -1).flatten(-2)
        plain = pairs * torch.exp2(scales.float() - 127)[..., None]
        meant[name] = plain.flatten(-2).transpose(1, 2).bfloat16()
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    quantise(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": []})
    network = filled(path_of(tmp_path))
    parameters = dict(network.named_parameters())
    assert len(meant) == 8 and all(torch.equal(parameters[n].bfloat16(), w) for n, w in meant.items())


def test_another_quantisation_is_refused(tmp_path):
    save(FAMILIES["qwen3"](), tmp_path)
    quantise(tmp_path, {"quant_method": "awq", "bits": 4})
    with pytest.raises(UserError, match=r"has quantised weights \(awq; expected fp8, mxfp4 or none\)"):
        load_model(path_of(tmp_path), None, 0, torch.float32, CPU)
