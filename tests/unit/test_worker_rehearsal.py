"""The rehearsal takes the smallest exported block, or none, and leaves no thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.engines import TORCH_EXPORT
from blockflow.core.errors import BlockError, RepositoryError
from blockflow.core.model import BlockInfo, TensorSpec
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.targets import UnknownProgram
from blockflow.launch.preload import REHEARSAL, modules_of
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


def test_a_block_that_cannot_be_read_is_left_to_its_worker(tmp_path: Path) -> None:
    repository = BlockRepository(tmp_path)
    for name in ("broken", "sound"):
        save_echo(repository, name, TensorSpec("float32", ("rows", 2)))
    manifest = tmp_path / "sound" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"echo"', f'"{rehearsal.FORMAT}"', 1))
    (tmp_path / "broken" / "manifest.json").write_text("{}")
    assert [block.name for _, block in rehearsal._exported(repository)] == ["sound"]


class Elsewhere(nn.Module):
    """Its program is not read as data: the operator is none of aten's."""

    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = torch.ops.blockflow_test.doubled(x)
        return doubled


def test_torch_export_is_imported_where_a_block_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = torch.library.Library("blockflow_test", "DEF")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: x * 2, "CompositeExplicitAutograd")
    # An export refuses it: of torch's own operators none is left that is not read as data.
    monkeypatch.setattr("blockflow.repository.artifact.refuse_foreign", lambda names: None)
    imported: list[str] = []
    monkeypatch.setattr(rehearsal, "preload", imported.extend)
    repository = BlockRepository(tmp_path)
    spec = TensorSpec("float32", ("rows", 4))
    plain = LoadedModel(nn.Sequential(nn.Linear(4, 2)).eval(), "test", spec)
    export_model(plain, repository, names=["plain"])
    rehearsal.rehearse({"repository": str(tmp_path)})
    assert imported == []
    other = LoadedModel(nn.Sequential(nn.Linear(4, 64), Elsewhere()).eval(), "test", spec)
    export_model(other, repository, names=["other"])
    rehearsal.rehearse({"repository": str(tmp_path)})
    assert tuple(imported) == modules_of([TORCH_EXPORT])


def test_the_smallest_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = BlockRepository(tmp_path)
    for name, width in (("big", 64), ("small", 4)):
        model = LoadedModel(
            nn.Sequential(nn.Linear(4, width)).eval(), "test", TensorSpec("float32", ("rows", 4))
        )
        export_model(model, repository, names=[name])
    save_echo(repository, "tiny", TensorSpec("float32", ("rows", 4)))  # loads nothing worth it
    loaded: list[str] = []
    closed: list[str] = []
    create = rehearsal._DataEngine

    def made(info: BlockInfo, options: EngineOptions) -> Engine:
        engine = create(info, options)
        loaded.append(info.name)
        monkeypatch.setattr(engine, "close", lambda: closed.append(info.name))
        return engine

    monkeypatch.setattr(rehearsal, "_DataEngine", made)
    threads = thread_count()
    rehearsal.rehearse({"repository": str(tmp_path)})
    assert loaded == closed == ["small", "small"], "code is specialised when it runs again"
    assert thread_count() == threads
    with monkeypatch.context() as patch:
        patch.setattr(rehearsal, "_MOST_BYTES", repository.manifest("small").size - 1)
        rehearsal.rehearse({"repository": str(tmp_path)})
    assert len(loaded) == 2
    small = tmp_path / "small" / repository.manifest("small").artifact
    content = bytearray(small.read_bytes())
    at = content.index(b"weights", content.index(b"weight_0"))
    content[at - 100] ^= 1  # within the weights, which are not looked at before
    small.write_bytes(content)
    with pytest.raises(RepositoryError):
        rehearsal.rehearse({"repository": str(tmp_path)})
    small.write_bytes(b"altered")
    rehearsal.rehearse({"repository": str(tmp_path)})
    assert loaded[-2:] == ["big", "big"], "what cannot be read is left to its workers"


def store_linear(folder: Path) -> None:
    linear = LoadedModel(
        nn.Sequential(nn.Linear(4, 2)).eval(), "test", TensorSpec("float32", ("rows", 4))
    )
    export_model(linear, BlockRepository(folder), names=["b"])


def test_a_stored_block_is_never_given_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_linear(tmp_path)
    monkeypatch.setattr(rehearsal, "preload", lambda modules: None)
    monkeypatch.setattr(torch.export, "load", lambda file: pytest.fail("loaded by torch"))
    monkeypatch.setattr(rehearsal, "is_known", lambda file, most: False)
    rehearsal.rehearse({"repository": str(tmp_path)})  # it is left alone

    def unknown(file: object) -> None:
        raise UnknownProgram("replaced since it was looked at")

    monkeypatch.setattr(rehearsal, "is_known", lambda file, most: True)
    monkeypatch.setattr("blockflow.engine.exported.read_program", unknown)
    with pytest.raises(BlockError, match="not read as data"):
        rehearsal.rehearse({"repository": str(tmp_path)})


def test_a_large_graph_is_left_to_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_linear(tmp_path)
    monkeypatch.setattr(rehearsal, "_MOST_JSON", 1000)
    monkeypatch.setattr(rehearsal, "_DataEngine", lambda *_: pytest.fail("was loaded"))
    rehearsal.rehearse({"repository": str(tmp_path)})
