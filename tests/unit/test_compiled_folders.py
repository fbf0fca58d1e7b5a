"""What a loader of machine code has unpacked is removed, and nothing that bears a name like it."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.engine.base import EngineOptions
from blockflow.engine.compiled import CompiledEngine

SPEC = TensorSpec("float32", ("rows", 2))


def mapped(folder: Path) -> mmap.mmap:
    folder.mkdir()
    (folder / "lib.so").write_bytes(b"\x7fELF")
    with (folder / "lib.so").open("rb") as f:
        return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)


def test_a_users_folder_of_that_name_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in which the environment lies, say, so that its libraries are mapped."""
    users, unpacked = tmp_path / "aotinductor_trials", tmp_path / "aotinductor_x1Y2z3"
    held: list[Any] = [mapped(users)]

    class Loader:
        def __init__(self, *_: object) -> None:
            held.append(mapped(unpacked))

        def get_metadata(self) -> dict[str, str]:
            return {}

    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", Loader)
    block = BlockInfo("b", "1", "0" * 64, "pt2", Contract(SPEC, SPEC), 0, 0)
    CompiledEngine(block, EngineOptions()).load(tmp_path / "package")
    assert (users / "lib.so").exists() and not unpacked.exists()
