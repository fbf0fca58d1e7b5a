"""The rehearsal takes the smallest exported block, or none, and leaves no thread."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from blockflow.core.errors import RepositoryError
from blockflow.core.model import TensorSpec
from blockflow.launch.preload import REHEARSAL
from blockflow.launch.process import thread_count
from blockflow.repository.echo import save_echo
from blockflow.repository.export import export_model
from blockflow.repository.machine import fingerprint
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from blockflow.worker import rehearsal


def test_the_name_is_right() -> None:
    assert f"{rehearsal.__name__}:{rehearsal.rehearse.__name__}" == REHEARSAL


def test_nothing_to_rehearse_but_the_fingerprint(tmp_path: Path) -> None:
    fingerprint.cache_clear()
    rehearsal.rehearse({"repository": str(tmp_path / "none")})
    assert fingerprint.cache_info().currsize == 1
    save_echo(BlockRepository(tmp_path), "e", TensorSpec("float32", ("rows", 2)))
    rehearsal.rehearse({"repository": str(tmp_path)})


def test_the_smallest_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = BlockRepository(tmp_path)
    for name, width in (("big", 64), ("small", 4)):
        model = LoadedModel(
            nn.Sequential(nn.Linear(4, width)).eval(), "test", TensorSpec("float32", ("rows", 4))
        )
        export_model(model, repository, names=[name])
    loaded = []
    create = rehearsal.create_engine
    monkeypatch.setattr(
        rehearsal, "create_engine", lambda info, o: (loaded.append(info.name), create(info, o))[1]
    )
    threads = thread_count()
    rehearsal.rehearse({"repository": str(tmp_path)})
    assert set(loaded) == {"small"}
    assert thread_count() == threads
    (tmp_path / "small" / repository.manifest("small").artifact).write_bytes(b"altered")
    with pytest.raises(RepositoryError):
        rehearsal.rehearse({"repository": str(tmp_path)})
