"""Weights in several safetensors files, and the index that tells which has what."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from blockflow.core.errors import ExportError
from blockflow.repository.weights import load_weights

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def stored(folder: Path) -> dict[str, Tensor]:
    """Two files; the second has a tensor that the index gives to the first."""
    state = model(1).state_dict()
    save_file({k: t for k, t in state.items() if k[0] == "0"}, folder / A)
    stale = torch.zeros_like(state["0.bias"])
    save_file({k: t for k, t in state.items() if k[0] == "1"} | {"0.bias": stale}, folder / B)
    return state


def index(folder: Path, document: Any) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def placed(state: dict[str, Tensor]) -> dict[str, str]:
    return {k: A if k[0] == "0" else B for k in state}


def test_each_tensor_is_taken_from_its_file(tmp_path: Path) -> None:
    state = stored(tmp_path)
    path = index(tmp_path, {"metadata": {"total_size": 1}, "weight_map": placed(state)})
    own = model(2)
    digest = load_weights(own, path)
    assert all(torch.equal(own.state_dict()[k], state[k]) for k in state)
    files = [hashlib.sha256(p.read_bytes()).hexdigest() for p in (path, tmp_path / A, tmp_path / B)]
    assert digest == hashlib.sha256("".join(files).encode()).hexdigest()


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("{", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[]", "it has no weight_map"),
        ({"weight_map": {"0.bias": 3}}, "it has no weight_map"),
        ({"weight_map": {"0.bias": "../x.safetensors"}}, "no .safetensors file beside it"),
        ({"weight_map": {"0.bias": "/etc/passwd"}}, "no .safetensors file beside it"),
        ({"weight_map": {"0.bias": "x.pt"}}, "no .safetensors file beside it"),
        ({"weight_map": {"1.bias": A}}, f"'{A}' lacks 1.bias"),
        ({"weight_map": {"0.bias": "x.safetensors"}}, "FileNotFoundError"),
        ({"weight_map": {"0.bias": A}}, "3 missing"),
        ({"weight_map": {}}, "4 missing"),
    ],
)
def test_what_is_no_index(tmp_path: Path, document: Any, words: str) -> None:
    stored(tmp_path)
    with pytest.raises(ExportError) as e:
        load_weights(model(2), index(tmp_path, document))
    assert e.value.code == "WEIGHTS_INVALID" and words in e.value.message


def test_what_torch_saved_may_be_called_bin(tmp_path: Path) -> None:
    state = model(1).state_dict()
    torch.save(state, tmp_path / "pytorch_model.bin")
    own = model(2)
    load_weights(own, tmp_path / "pytorch_model.bin")
    assert all(torch.equal(own.state_dict()[k], state[k]) for k in state)
