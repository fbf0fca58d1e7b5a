"""Variants and choices in a repository: pinned, checked, replaced, and never stale."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from blockflow.core.errors import RepositoryError
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.repository.manifest import (
    Choice,
    VariantForm,
    VerdictForm,
    new_manifest,
)
from blockflow.repository.repository import BlockRepository

SPEC = TensorSpec("float32", ("rows", 2))
WHEN = datetime.now(UTC).isoformat()


def save_block(
    repository: BlockRepository, name: str, data: bytes = b"reference", spec: TensorSpec = SPEC
) -> BlockInfo:
    """A block of format pt2 that nothing could load."""
    return repository.save(new_manifest(name, "pt2", Contract(spec, spec)), data)


def form(machine: str = "") -> VariantForm:
    return VariantForm(
        file="unset",
        digest="0" * 64,
        bytes=0,
        machine=machine,
        error=1e-6,
        tolerance=1e-4,
        created=WHEN,
    )


def refused(**engines: str) -> VariantForm:
    """A form that these engines may not run."""
    found = {name: VerdictForm(refused=why) for name, why in engines.items()}
    return form().model_copy(update={"engines": found})


def choice() -> Choice:
    return Choice(
        engine="openvino",
        precision="fp32",
        ms=1.0,
        reference_ms=2.0,
        error=1e-6,
        tolerance=1e-2,
        when=WHEN,
    )


@pytest.fixture
def repository(tmp_path: Path) -> BlockRepository:
    return BlockRepository(tmp_path)


def test_a_variant_is_pinned_beside_the_artifact(repository: BlockRepository) -> None:
    info = save_block(repository, "b")
    after = repository.save_variant("b", "onnx", form(), b"an onnx file", digest=info.digest)
    assert repository.info("b") == after
    assert after.digest == info.digest
    pinned = after.variants["onnx"]
    assert pinned.file.endswith(".onnx") and pinned.bytes == len(b"an onnx file")
    with repository.artifact("b", digest=pinned.digest, variant="onnx") as path:
        assert path.read_bytes() == b"an onnx file"
    with repository.artifact("b", digest=info.digest) as path:
        assert path.read_bytes() == b"reference"
    stored = json.loads((repository.root / "b" / "manifest.json").read_text())
    assert stored["variants"]["onnx"]["digest"] == pinned.digest


def test_verdicts_are_kept_and_a_form_without_any_refuses_nobody(
    repository: BlockRepository,
) -> None:
    digest = save_block(repository, "b").digest
    made = refused(openvino="differs", onnxruntime="")
    info = repository.save_variant("b", "onnx", made, b"x", digest=digest)
    assert info.variants["onnx"].refused == {"openvino": "differs"}
    assert BlockInfo.from_dict(info.to_dict()) == info
    file = repository.root / "b" / "manifest.json"
    data = json.loads(file.read_text())
    del data["variants"]["onnx"]["engines"]  # as versions before wrote it
    file.write_text(json.dumps(data))
    plain = repository.info("b")
    assert not plain.variants["onnx"].refused
    stored = plain.to_dict()
    del stored["variants"]["onnx"]["refused"]
    assert BlockInfo.from_dict(stored) == plain


def test_a_new_variant_replaces_the_old_file(repository: BlockRepository) -> None:
    info = save_block(repository, "b")
    for data in (b"one", b"two"):
        repository.save_variant("b", "onnx", form(), data, digest=info.digest)
    repository.save_variant("b", "aoti", form("m"), b"code", digest=info.digest)
    files = {p.name for p in (repository.root / "b").iterdir()}
    assert files == {"manifest.json", *repository.manifest("b").files}
    assert len(files) == 4


def test_a_variant_that_cannot_be_read_leaves_nothing(repository: BlockRepository) -> None:
    digest = save_block(repository, "b").digest
    before = sorted(p.name for p in (repository.root / "b").iterdir())
    missing = repository.root / "missing"
    with pytest.raises(RepositoryError, match="REPOSITORY_UNUSABLE"):
        repository.save_variant("b", "onnx", form(), missing, digest=digest)
    assert sorted(p.name for p in (repository.root / "b").iterdir()) == before


def test_a_missing_or_altered_variant(repository: BlockRepository) -> None:
    info = save_block(repository, "b")
    with pytest.raises(RepositoryError) as e, repository.artifact("b", variant="onnx"):
        pass
    assert e.value.code == "ARTIFACT_MISSING" and "convert b@1 --to onnx" in e.value.hint
    info = repository.save_variant("b", "onnx", form(), b"an onnx file", digest=info.digest)
    file = repository.root / "b" / info.variants["onnx"].file
    file.write_bytes(b"an onnx fill")
    with pytest.raises(RepositoryError) as e:
        repository.verify("b", variant="onnx")
    assert e.value.code == "DIGEST_MISMATCH"
    file.unlink()
    file.symlink_to("/etc/hostname")
    with pytest.raises(RepositoryError) as e:
        repository.verify("b", variant="onnx")
    assert e.value.code == "ARTIFACT_MISSING"
    repository.verify("b")  # the artifact itself is as it was


def test_what_was_made_of_another_artifact_is_not_kept(repository: BlockRepository) -> None:
    old = save_block(repository, "b")
    repository.save_variant("b", "onnx", form(), b"an onnx file", digest=old.digest)
    repository.save_choice(old, "machine", choice())
    profile = repository.root / "b" / "profile-machine.json"
    profile.write_text("{}")
    new = save_block(repository, "b", b"another model")
    assert not new.variants and not new.choices
    assert not list((repository.root / "b").glob("*.onnx"))
    assert profile.exists()  # its owner judges it
    for save in (
        lambda: repository.save_variant("b", "onnx", form(), b"x", digest=old.digest),
        lambda: repository.save_choice(old, "machine", choice()),
    ):
        with pytest.raises(RepositoryError) as e:
            save()
        assert e.value.code == "DIGEST_MISMATCH"
    assert not repository.info("b").variants
    was = repository.info("b").digest
    with pytest.raises(RepositoryError, match="as 'onnx'") as e:
        repository.verify("b", variant="onnx", digest=was)
    assert e.value.code == "ARTIFACT_MISSING" and "it was replaced" in e.value.hint


def test_choices_are_kept_per_machine(repository: BlockRepository) -> None:
    info = save_block(repository, "b")
    for machine in ("one", "two"):
        info = repository.save_choice(info, machine, choice())
    assert set(info.choices) == {"one", "two"}
    assert info.choices["one"]["engine"] == "openvino"
    again = repository.save_variant("b", "onnx", form(), b"x", digest=info.digest)
    assert set(again.choices) == {"one", "two"}


def test_a_choice_that_does_not_hold_for_another_file_is_forgotten(
    repository: BlockRepository,
) -> None:
    """What ``auto`` is said to be would not be true: as exact as that, or there at all."""
    digest = save_block(repository, "b").digest
    by_int8 = choice().model_copy(update={"precision": "int8"})
    of_another_release = choice().model_copy(update={"engine": "tensorrt"})
    compiled = choice().model_copy(update={"engine": "compiled"})
    made = {"m": choice(), "n": by_int8, "o": of_another_release, "p": compiled, "q": compiled}
    for kind, machine in (("onnx", ""), ("onnx-int8", ""), ("aoti", "q")):
        repository.save_variant("b", kind, form(machine), b"one", digest=digest)
    for machine, one in made.items():
        repository.save_choice(repository.info("b"), machine, one)

    def after(kind: str, data: bytes, machine: str = "", **errors: float | None) -> str:
        engines = {name: VerdictForm(error=error) for name, error in errors.items()}
        other = form(machine).model_copy(update={"engines": engines, "error": 0.01})
        return "".join(repository.save_variant("b", kind, other, data, digest=digest).choices)

    assert after("onnx", b"one", openvino=0.011) == "mnopq", "the file is the same"
    assert after("onnx", b"two", openvino=0.01) == "mnopq", "as exact as was asked for"
    assert after("onnx", b"three") == "mnopq", "by those who were there"
    assert after("aoti", b"two", "q") == "mnoq", "of another machine than p's"
    assert after("onnx-int8", b"two", openvino=0.011, onnxruntime=0.0) == "moq"
    assert after("onnx", b"four", openvino=None) == "oq", "not finite"


def test_a_choice_measured_with_a_file_that_was_replaced_meanwhile_is_not_recorded(
    repository: BlockRepository,
) -> None:
    """By a ``convert`` beside a ``profile``; unless it holds for the new one as well."""
    digest = save_block(repository, "b").digest
    measured = repository.save_variant("b", "onnx", form(), b"one", digest=digest)
    exact = {"openvino": VerdictForm(error=0.01)}
    for data, engines in ((b"two", exact), (b"three", {"openvino": VerdictForm(error=0.011)})):
        other = form().model_copy(update={"engines": engines})
        repository.save_variant("b", "onnx", other, data, digest=digest)
        if engines is exact:
            assert repository.save_choice(measured, "m", choice()).choices.keys() == {"m"}
    with pytest.raises(RepositoryError, match="while it was being measured") as e:
        repository.save_choice(measured, "n", choice())
    assert e.value.code == "DIGEST_MISMATCH" and not repository.info("b").choices
    by_itself = choice().model_copy(update={"engine": "exported"})
    assert repository.save_choice(measured, "n", by_itself).choices.keys() == {"n"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("file", "../escape"),
        ("file", "manifest.json"),
        ("digest", "short"),
        ("bytes", -1),
        ("error", float("nan")),
        ("engines", {"openvino": {"error": -1.0}}),
        ("unknown", 1),
    ],
)
def test_a_corrupt_variant_is_a_corrupt_manifest(
    repository: BlockRepository, field: str, value: object
) -> None:
    info = save_block(repository, "b")
    repository.save_variant("b", "onnx", form(), b"x", digest=info.digest)
    file = repository.root / "b" / "manifest.json"
    data = json.loads(file.read_text())
    data["variants"]["onnx"][field] = value
    file.write_text(json.dumps(data))
    with pytest.raises(RepositoryError) as e:
        repository.info("b")
    assert e.value.code == "CORRUPT_MANIFEST"


def test_a_manifest_that_is_saved_again_takes_no_variants_along(
    repository: BlockRepository,
) -> None:
    """They, and what was measured, are of the artifact that it had."""
    stored = save_block(repository, "a")
    repository.save_variant("a", "openvino", form(), b"converted", digest=stored.digest)
    repository.save_choice(stored, "machine", choice())
    known = repository.manifest("a")
    assert known.variants and known.choices
    again = repository.save(known, b"retrained")
    assert (again.variants, again.choices) == ({}, {})


def test_no_manifest_is_written_that_could_not_be_read(repository: BlockRepository) -> None:
    save_block(repository, "b")
    large = choice().model_copy(update={"options": {"x": "y" * 100_000}})
    for machine in ("m1", "m2"):
        repository.save_choice(repository.info("b"), machine, large)
    with pytest.raises(RepositoryError, match="none of more than") as e:
        repository.save_choice(repository.info("b"), "m3", large)
    assert e.value.code == "REPOSITORY_UNUSABLE"
    assert set(repository.info("b").choices) == {"m1", "m2"}
