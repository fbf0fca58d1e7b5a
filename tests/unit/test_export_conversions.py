"""Modules may convert what they load, of older checkpoints: weights go through that as in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import weight_norm

from blockflow.core.errors import ExportError
from blockflow.repository.weights import load_weights


class Doubled(nn.Linear):
    """Weights of before version 2 were half as large."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"] * 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Turned(nn.Module):
    """Checkpoints hold ``[in, out]``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4))
        self.register_load_state_dict_pre_hook(self._turn)

    @staticmethod
    def _turn(_module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        state[prefix + "w"] = state[prefix + "w"].T

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def _versioned() -> nn.Module:
    return nn.Sequential(nn.Sequential(Doubled(4, 3)), Doubled(3, 2))


def _refused(module: nn.Module, path: Path) -> ExportError:
    with pytest.raises(ExportError) as e:
        load_weights(module, path)
    assert e.value.code == "WEIGHTS_INVALID"
    return e.value


def _wrapped(module: nn.Module, wrappers: str) -> nn.Module:
    for letter in wrappers:
        module = nn.DataParallel(module) if letter == "d" else torch.compile(module)
    return module


@pytest.mark.parametrize("wrappers", ["", "d", "c", "dc", "cd"])
def test_versions_of_modules_are_kept_where_a_wrapper_is_left_out(
    tmp_path: Path, wrappers: str
) -> None:
    source, target = _versioned(), _versioned()
    torch.save(_wrapped(source, wrappers).state_dict(), tmp_path / "w.pt")
    load_weights(target, tmp_path / "w.pt")
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name


def test_weights_of_a_version_before_are_converted(tmp_path: Path) -> None:
    source, target = _versioned(), _versioned()
    state: Any = nn.DataParallel(source).state_dict()
    state._metadata["module.1"]["version"] = 1
    torch.save(state, tmp_path / "w.pt")
    load_weights(target, tmp_path / "w.pt")
    assert torch.equal(target[1].weight, source[1].weight * 2)
    assert torch.equal(target[0][0].weight, source[0][0].weight)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("prefix", ["", "module."])
def test_other_names_are_the_models_to_convert(tmp_path: Path, prefix: str) -> None:
    """weight_g and weight_v, into what torch's parametrization has instead."""
    source = nn.Sequential(old_weight_norm(nn.Linear(4, 3)))
    target = nn.Sequential(weight_norm(nn.Linear(4, 3)))
    state = {prefix + k: t for k, t in source.state_dict().items()}
    torch.save(state, tmp_path / "w.pt")
    load_weights(target, tmp_path / "w.pt")
    x = torch.randn(2, 4)
    torch.testing.assert_close(target(x), source(x))
    torch.save({**state, prefix + "more": torch.zeros(1)}, tmp_path / "w.pt")
    error = _refused(target, tmp_path / "w.pt")
    assert "1 unexpected" in error.message and "more" in error.message
    assert "missing" not in error.message
    del state[prefix + "0.bias"]
    torch.save(state, tmp_path / "w.pt")
    error = _refused(target, tmp_path / "w.pt")
    assert "1 missing: 0.bias" in error.message and "unexpected" not in error.message


def test_other_dims_are_the_models_to_convert(tmp_path: Path) -> None:
    source, target = Turned(), Turned()
    torch.save({"w": source.w.detach().T}, tmp_path / "w.pt")
    load_weights(target, tmp_path / "w.pt")
    assert torch.equal(target.w, source.w)
    torch.save({"w": source.w.detach()}, tmp_path / "w.pt")
    error = _refused(target, tmp_path / "w.pt")
    assert "does not take" in error.message or "misshapen" in error.message
