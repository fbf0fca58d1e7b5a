"""Versions of a block side by side: which one a reference or a digest means, what is kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from torch import nn

from blockflow.core.errors import ExportError, RepositoryError
from blockflow.core.model import TensorSpec
from blockflow.repository import folder
from blockflow.repository.echo import save_echo
from blockflow.repository.export import export_model
from blockflow.repository.manifest import VariantForm
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel

SPEC = TensorSpec("float32", ("rows", 4))


@pytest.fixture
def repo(tmp_path: Path) -> BlockRepository:
    repository = BlockRepository(tmp_path / "blocks")
    for version in ("1", "2", "3"):
        save(repository, version)
    return repository


def save(repository: BlockRepository, version: str, delay_ms: int | None = None) -> str:
    settings = {"delay_ms": int(version) if delay_ms is None else delay_ms}
    return save_echo(repository, "e", SPEC, settings=settings, version=version).digest


def content(repository: BlockRepository, name: str, digest: str | None = None) -> dict[str, int]:
    with repository.artifact(name, digest=digest) as path:
        found: dict[str, int] = json.loads(path.read_bytes())
        return found


def files(repository: BlockRepository) -> list[str]:
    return sorted(os.listdir(repository.root / "e"))


def test_the_latest_is_the_current_one_and_all_can_be_named(repo: BlockRepository) -> None:
    assert repo.names() == ["e"]
    assert repo.versions("e") == ["3", "1", "2"]
    assert repo.info("e").version == "3"
    for version in ("1", "2", "3"):
        reference = f"e@{version}"
        info = repo.info(reference)
        assert (info.name, info.version) == ("e", version)
        assert content(repo, reference) == {"delay_ms": int(version)}
        assert repo.verify(reference).sha256 == info.digest


def test_a_digest_finds_its_version(repo: BlockRepository) -> None:
    for version in ("1", "2", "3"):
        digest = repo.info(f"e@{version}").digest
        assert repo.info("e", digest=digest).version == version
        assert content(repo, "e", digest) == {"delay_ms": int(version)}
        assert content(repo, "e@1", digest) == {"delay_ms": int(version)}
        assert repo.verify("e", digest=digest).version == version


def test_a_digest_that_is_not_stored(repo: BlockRepository) -> None:
    with pytest.raises(RepositoryError) as e:
        repo.info("e", digest="0" * 64)
    assert e.value.code == "ARTIFACT_MISSING" and "'e'" in e.value.message
    with pytest.raises(RepositoryError) as e, repo.artifact("e", digest="0" * 64, check=False):
        pass
    assert e.value.code == "ARTIFACT_MISSING" and "update again" in e.value.hint


@pytest.mark.parametrize("reference", ["e@4", "e@", "e@a/b", "e@../1", "e@1@2", "@1", "e@.json"])
def test_a_version_that_is_not_there(repo: BlockRepository, reference: str) -> None:
    with pytest.raises(RepositoryError) as e:
        repo.info(reference)
    assert e.value.code == "UNKNOWN_BLOCK"
    if reference == "e@4":
        assert e.value.hint == "stored versions: 3, 1, 2"


def test_the_same_label_replaces_its_artifact_and_becomes_current(repo: BlockRepository) -> None:
    old = repo.info("e@1").digest
    new = save(repo, "1", delay_ms=10)
    assert repo.versions("e") == ["1", "2", "3"]
    assert repo.info("e").digest == new
    assert content(repo, "e@1") == {"delay_ms": 10}
    with pytest.raises(RepositoryError):
        repo.info("e", digest=old)
    assert files(repo) == sorted(
        ["manifest.json", "manifest@2.json", "manifest@3.json"]
        + [f"{repo.info(r).digest[:16]}.echo" for r in ("e@1", "e@2", "e@3")]
    )


def test_versions_may_share_an_artifact(repo: BlockRepository) -> None:
    digest = save(repo, "4", delay_ms=1)
    assert digest == repo.info("e@1").digest
    save(repo, "1", delay_ms=99)
    assert content(repo, "e@4") == {"delay_ms": 1}


def variant_of(repository: BlockRepository, reference: str, data: bytes) -> str:
    form = VariantForm(
        file="unset", digest="0" * 64, bytes=0, error=0, tolerance=0, created="2026-01-01T00:00Z"
    )
    digest = repository.info(reference).digest
    stored = repository.save_variant(reference, "onnx", form, data, digest=digest)
    return stored.variants["onnx"].digest


def test_a_variant_belongs_to_its_version(repo: BlockRepository) -> None:
    one, three = variant_of(repo, "e@1", b"one"), variant_of(repo, "e", b"three")
    assert not repo.info("e@2").variants
    assert repo.info("e").version == "3"
    for digest, data in ((one, b"one"), (three, b"three")):
        with repo.artifact("e", digest=digest, variant="onnx") as path:
            assert path.read_bytes() == data
        repo.verify("e", digest=digest, variant="onnx")


def test_a_broken_version_neither_hides_nor_loses_the_others(repo: BlockRepository) -> None:
    kept = repo.info("e@1").digest
    (repo.root / "e" / "manifest@2.json").write_text("{")
    with pytest.raises(RepositoryError) as e:
        repo.info("e@2")
    assert e.value.code == "CORRUPT_MANIFEST"
    assert repo.info("e", digest=kept).version == "1"
    before = [f for f in files(repo) if f.endswith(".echo")]
    save(repo, "4")
    # what the broken one pins cannot be known: nothing is removed
    assert set(before) < set(files(repo))


def test_links_are_no_versions(repo: BlockRepository, tmp_path: Path) -> None:
    (repo.root / "e" / "manifest@9.json").symlink_to(repo.root / "e" / "manifest@1.json")
    with pytest.raises(RepositoryError) as e:
        repo.info("e@9")
    assert e.value.code == "CORRUPT_MANIFEST"


def test_a_crash_at_any_step_of_a_save_loses_no_version(
    repo: BlockRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = {repo.info(f"e@{v}").digest for v in ("1", "2", "3")}
    real = os.replace
    for allowed in range(3):  # artifact, kept manifest, current manifest
        calls = 0

        def crash(*args: object, allowed: int = allowed, **kw: object) -> None:
            nonlocal calls
            calls += 1
            if calls > allowed:
                raise KeyboardInterrupt
            real(*args, **kw)  # type: ignore[arg-type]

        monkeypatch.setattr(folder.os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            save(repo, "4")
        monkeypatch.setattr(folder.os, "replace", real)
        assert repo.info("e").version == "3"
        assert {repo.info("e", digest=d).digest for d in digests} == digests
    save(repo, "4")
    assert repo.versions("e") == ["4", "1", "2", "3"]


def test_an_export_over_a_stored_version_is_refused(repo: BlockRepository) -> None:
    for version in ("1", "3"):
        with pytest.raises(ExportError) as e:
            repo.refuse_stored(["other", "e"], version)
        assert e.value.code == "VERSION_EXISTS" and " e " in e.value.message
    repo.refuse_stored(["e"], "4")
    repo.refuse_stored(["other"], "1")


def test_a_version_that_appears_during_an_export_is_not_replaced(tmp_path: Path) -> None:
    repo = BlockRepository(tmp_path / "blocks")
    loaded = LoadedModel(nn.Linear(4, 4).eval(), "late", SPEC)

    def meanwhile(what: str, _part: float) -> None:
        if what == "storing":
            save(repo, "1")

    with pytest.raises(ExportError) as e:
        export_model(loaded, repo, names=["e"], replace_stored=False, progress=meanwhile)
    assert e.value.code == "VERSION_EXISTS"
    assert repo.info("e").format == "echo"
    export_model(loaded, repo, names=["e"], progress=meanwhile)
    assert repo.info("e").format == "pt2"
