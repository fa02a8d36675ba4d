"""Today's families in vLLM and SGLang: the names of their weights, and what is computed where a CPU can compute it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gcore.weights.pretrained import WeightFiles
from gcore.weights.receiver import FolderWeights
from tests.contract.test_families import TODAY, save


@pytest.mark.parametrize("family", sorted(TODAY))
def test_what_trainers_send_is_what_files_have(family: str, tmp_path: Path) -> None:
    """Tensor by tensor: names in files differ, and stacked experts and convolutions are there in parts."""
    save(TODAY[family](), tmp_path)
    files, weights = WeightFiles(tmp_path), FolderWeights(tmp_path)
    network = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    sent = {name: parameter.detach() for name, parameter in network.named_parameters()}
    assert weights.shapes == {name: tuple(tensor.shape) for name, tensor in sent.items()}
    found: dict[str, Any] = {}
    for name in reversed(sent):
        parts = weights.as_stored({name: sent[name]}, last=False)
        assert parts and not found.keys() & parts.keys()
        found |= parts
    found |= weights.as_stored({}, last=True)
    assert found.keys() == files.shapes.keys()
    assert all(torch.equal(tensor, files.read(name)) for name, tensor in found.items())
