"""An export without room for its temporary files: NO_SPACE, and nothing stored."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import nn

from blockflow.core.errors import SystemError_
from blockflow.core.model import TensorSpec
from blockflow.repository import pieces
from blockflow.repository.artifact import FORMATS
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.scratch import scratch
from blockflow.repository.sources import LoadedModel


@pytest.mark.parametrize("format_", FORMATS)
def test_a_full_disk_is_told_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: str
) -> None:
    @contextmanager
    def full() -> Iterator[Path]:
        (tmp_path / "0.artifact").symlink_to("/dev/full")
        yield tmp_path

    monkeypatch.setattr(pieces, "scratch", full)
    repository = BlockRepository(tmp_path / "blocks")
    loaded = LoadedModel(nn.Linear(4, 400).eval(), "wide", TensorSpec("float32", ("rows", 4)))
    with pytest.raises(SystemError_) as e:
        export_model(loaded, repository, names=("wide",), format=format_)
    assert e.value.code == "NO_SPACE" and "0.artifact" in e.value.where
    assert repository.names() == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_no_place_for_temporary_files_is_told(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def nowhere() -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(SystemError_, match=os.strerror(number)) as e, scratch():
        pass
    assert e.value.code == "NO_SPACE" and "descriptors" in e.value.hint
