"""Weights: what a file may hold for a model, and every way in which it does not fit."""

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from blockflow.repository.sources import build, load_weights
from tests.unit.test_export import refused


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
def test_weights_are_loaded(tmp_path: Path, suffix: str) -> None:
    source, target = nn.Linear(4, 3), nn.Linear(4, 3)
    file = tmp_path / f"w{suffix}"
    if suffix == ".safetensors":
        save_file(source.state_dict(), file)
    else:
        torch.save({"state_dict": source.state_dict()}, file)
    digest = load_weights(target, file)
    assert torch.equal(source.weight, target.weight) and len(digest) == 64


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"weight": torch.zeros(3, 4)}, "1 missing: bias"),
        ({"weight": torch.zeros(3, 4), "bias": torch.zeros(3), "x": torch.zeros(1)},
         "1 unexpected: x"),
        ({"weight": torch.zeros(4, 3), "bias": torch.zeros(3)}, "weight [4, 3] into [3, 4]"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit(tmp_path: Path, state: dict, words: str) -> None:
    save_file(state, tmp_path / "w.safetensors")
    error = refused(
        "WEIGHTS_INVALID", lambda: load_weights(nn.Linear(4, 3), tmp_path / "w.safetensors")
    )
    assert words in error.message


def test_weights_of_a_wrapped_model_are_told_as_such(tmp_path: Path) -> None:
    state = {f"module.{k}": v for k, v in nn.Linear(4, 3).state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    error = refused(
        "WEIGHTS_INVALID", lambda: load_weights(nn.Linear(4, 3), tmp_path / "w.safetensors")
    )
    assert "'module.' before every name" in error.hint


@pytest.mark.parametrize(
    ("strange", "words"),
    [
        (torch.zeros(3, 4).to_sparse(), "its layout is sparse_coo"),
        (torch.zeros(3, 4, device="meta"), "a meta tensor has no elements"),
        (torch.zeros(3, 4, dtype=torch.complex64), "it is complex"),
    ],
    ids=["sparse", "meta", "complex"],
)
def test_weights_of_another_kind(tmp_path: Path, strange: torch.Tensor, words: str) -> None:
    torch.save({"weight": strange, "bias": torch.zeros(3)}, tmp_path / "w.pt")
    error = refused("WEIGHTS_INVALID", lambda: load_weights(nn.Linear(4, 3), tmp_path / "w.pt"))
    assert "1 of no use: weight" in error.message and words in error.message


def lazy() -> nn.Module:
    return nn.LazyLinear(3)


def scripted() -> nn.Module:
    return torch.jit.script(nn.Linear(4, 3))


@pytest.mark.parametrize(("factory", "words"), [(lazy, "lazy modules"), (scripted, "TorchScript")])
def test_models_that_are_not_ready(
    factory: Callable[[], nn.Module], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ModuleType("made_of_tests")
    made.factory = factory
    monkeypatch.setitem(sys.modules, "made_of_tests", made)
    assert words in refused("FACTORY_FAILED", lambda: build("made_of_tests:factory", {}, 0)).message


class Tied(nn.Module):
    """An embedding whose table is also the last layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.last = nn.Linear(4, 5, bias=False)
        self.last.weight = self.table.weight


@pytest.mark.parametrize("given", [("table.weight",), ("last.weight",), None])
def test_weights_that_are_tied_may_be_given_once(
    tmp_path: Path, given: tuple[str, ...] | None
) -> None:
    source, target = Tied(), Tied()
    state = {k: v.clone() for k, v in source.state_dict().items() if given is None or k in given}
    save_file(state, tmp_path / "w.safetensors")
    load_weights(target, tmp_path / "w.safetensors")
    assert torch.equal(source.table.weight, target.last.weight)
    assert target.last.weight is target.table.weight


def test_tied_weights_that_differ_in_the_file(tmp_path: Path) -> None:
    state = {k: v + n for n, (k, v) in enumerate(Tied().state_dict().items())}
    save_file(state, tmp_path / "w.safetensors")
    error = refused("WEIGHTS_INVALID", lambda: load_weights(Tied(), tmp_path / "w.safetensors"))
    assert "last.weight with table.weight" in error.message


class Evil:
    def __reduce__(self) -> tuple:
        return os.system, ("touch evil-was-here",)


_SAID = {
    "saved.pt": ("it asks for posix.system", "never code"),
    "list.pt": ("it holds a list",),
    "number.pt": ("entry 'weight' is a int",),
    "unnamed.pt": ("the name of entry 7 is a int",),
    "missing.pt": ("the file cannot be read: FileNotFoundError",),
}


def test_weights_files_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pickled.pt").write_bytes(pickle.dumps({"weight": Evil()}))
    torch.save({"weight": Evil()}, tmp_path / "saved.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"weight": 3}, tmp_path / "number.pt")
    torch.save({7: torch.zeros(1)}, tmp_path / "unnamed.pt")
    (tmp_path / "garbage.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "weights.bin").write_bytes(b"")
    for file in [*tmp_path.iterdir(), tmp_path / "missing.pt"]:
        error = refused("WEIGHTS_INVALID", lambda f=file: load_weights(nn.Linear(4, 3), f))
        assert error.where == str(file)
        assert "weights_only" not in str(error), "advice that runs a stranger's code"
        for word in _SAID.get(file.name, ()):
            assert word in error.message
    assert not (tmp_path / "evil-was-here").exists()
