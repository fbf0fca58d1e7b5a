"""repository/profiles: stored whole, found again, refused when they do not hold."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control_rig import save_echoes
from refusals_rig import no_descriptor

from blockflow.core.engines import Selection
from blockflow.core.errors import BlockFlowError, RepositoryError, SystemError_
from blockflow.core.model import BlockInfo, TensorSpec, Variant
from blockflow.core.profile import StageProfile
from blockflow.repository import profiles as module
from blockflow.repository.echo import save_echo
from blockflow.repository.profile_record import (
    ProfileKey,
    ProfileRecord,
    chain_digest,
    ran_by,
    staleness,
)
from blockflow.repository.profiles import ProfileStore
from blockflow.repository.repository import BlockRepository
from tests.unit.test_profile_table import point

SPEC = TensorSpec("float32", ("rows", 4))
FACTS = {"cpu": "X", "torch": "2.13"}
ECHO = Selection("echo", "fp32", {}, None)


@pytest.fixture
def repository(tmp_path: Path) -> BlockRepository:
    return save_echoes(tmp_path / "blocks", "a", "b")


@pytest.fixture
def store(repository: BlockRepository) -> ProfileStore:
    return ProfileStore(repository.root, "m1", FACTS)


def record(store: ProfileStore, infos: list[BlockInfo], **more: Any) -> ProfileRecord:
    selections = [ECHO] * len(infos)
    key = ProfileKey.of([i.name for i in infos], selections)
    values: dict[str, Any] = {
        "key": key,
        "profile": StageProfile(
            key.name, chain_digest(infos), "echo", "fp32", store.machine, (point(1, 2.0),)
        ),
        "parts": (),
        "ran": ran_by(infos, selections),
        "facts": FACTS,
        "settings": {"confidence": 0.02},
        "complete": True,
        "when": "2026-01-01T00:00:00+00:00",
    }
    return ProfileRecord(**{**values, **more})


def test_what_is_saved_is_found_fresh(store: ProfileStore, repository: BlockRepository) -> None:
    info = repository.info("a")
    saved = record(store, [info])
    path = store.save(saved)
    assert path.parent == repository.root / "a" / "profiles"
    assert store.load(saved.key) == saved
    assert store.fresh([info], [ECHO]) == saved
    assert store.reasons(saved, repository.info) == []
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no half-written file
    opened = len(os.listdir("/proc/self/fd"))
    store.save(saved)
    assert store.load(saved.key) == saved and len(os.listdir("/proc/self/fd")) == opened


def test_a_profile_is_no_block_and_survives_an_export(
    store: ProfileStore, repository: BlockRepository
) -> None:
    info = repository.info("a")
    store.save(record(store, [info]))
    assert repository.names() == ["a", "b"]
    save_echo(repository, "a", SPEC)
    assert repository.verify("a").sha256 == info.digest
    assert store.fresh([info], [ECHO])


def test_each_version_has_its_profile(store: ProfileStore, repository: BlockRepository) -> None:
    infos = [
        save_echo(repository, "a", SPEC, settings={"row_ms": v}, version=str(v)) for v in (1, 2)
    ]
    for info in (*infos, infos[0]):
        store.save(record(store, [info]))
        assert store.fresh([info], [ECHO]).profile.digest == info.digest
    assert store.fresh([infos[1]], [ECHO]).profile.digest == infos[1].digest
    assert len(store.records("a")) == 2
    saved = [i.digest for i in infos]
    for v in range(3, 20):
        last = save_echo(repository, "a", SPEC, settings={"row_ms": v}, version=str(v))
        store.save(record(store, [last]))
        assert store.fresh([last], [ECHO]).profile.digest == last.digest
        saved.append(last.digest)
    kept = {r.profile.digest for r in store.records("a")}
    assert len(kept) == 9 and not kept & set(saved[:3]), "the oldest ones went"
    assert (store.reference(infos[1]), store.reference(last)) == ("a@2", "a")
    former = repository.info("a@18")
    begun = record(store, [former], complete=False, when="later")
    store.save(begun)
    assert store.fresh([former], [ECHO]).when < begun.when, "it holds until that is complete"


def test_a_record_that_the_disk_does_not_give_just_now_is_not_replaced(
    store: ProfileStore, repository: BlockRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be of another version of the block, and whole."""
    first, second = (
        save_echo(repository, "a", SPEC, settings={"row_ms": v}, version=str(v)) for v in (1, 2)
    )
    saved = record(store, [first])
    path = store.save(saved)

    def fails(fd: int) -> None:
        os.close(fd)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched:
        patched.setattr(module, "file_of", fails)
        with pytest.raises(RepositoryError, match="does not answer"):
            store.save(record(store, [second]))
    assert store.load(saved.key) == saved
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_variant_that_was_made_anew_has_no_profile_yet(
    store: ProfileStore, repository: BlockRepository
) -> None:
    """The artifact is the same; what is computed from it is not."""

    def converted(digest: str) -> BlockInfo:
        variant = Variant("x.onnx", digest, 1)
        return replace(repository.info("a"), variants={"onnx": variant})

    chosen = Selection("openvino", "int8", {}, "onnx")
    kept = record(store, [converted("1" * 64)], ran=ran_by([converted("1" * 64)], [chosen]))
    for digest, holds in (("1" * 64, True), ("2" * 64, False)):
        now = converted(digest)
        found = staleness(kept, now.digest, ran_by([now], [chosen]), FACTS)
        assert (not found) is holds, found


def test_a_chain_is_of_all_its_artifacts_in_their_order(repository: BlockRepository) -> None:
    a, b = repository.info("a"), repository.info("b")
    other = replace(b, digest="f" * 64)
    a = replace(a, digest="0" * 64)
    chains = [(a,), (b,), (a, b), (b, a), (a, other)]
    assert len({chain_digest(c) for c in chains}) == len(chains)


def test_none_at_all_is_said_with_the_command(
    store: ProfileStore, repository: BlockRepository
) -> None:
    other = record(store, [repository.info("a")])
    profile = replace(other.profile, engine="exported")
    store.save(replace(other, key=replace(other.key, engine="exported"), profile=profile))
    with pytest.raises(RepositoryError) as e:
        store.fresh([repository.info("a")], [ECHO])
    assert e.value.code == "NO_PROFILE"
    assert "blockflow profile a --engines echo --precisions fp32" in e.value.hint


def stale(store: ProfileStore, info: BlockInfo) -> RepositoryError:
    with pytest.raises(RepositoryError) as e:
        store.fresh([info], [ECHO])
    assert e.value.code == "STALE_PROFILE"
    assert "blockflow profile a" in e.value.hint
    return e.value


def test_each_reason_is_named(store: ProfileStore, repository: BlockRepository) -> None:
    info = repository.info("a")
    saved = record(store, [info])
    store.save(saved)
    assert "artifact: measured" in stale(store, replace(info, digest="cd" * 32)).message
    later = ProfileStore(repository.root, "m1", {**FACTS, "torch": "2.14", "openvino": "1"})
    text = stale(later, info).message
    assert "torch: measured on 2.13, now 2.14" in text
    assert "openvino: measured on none, now 1" in text
    lacks = ProfileStore(repository.root, "m1", {"cpu": "X"})
    assert "torch: measured on 2.13, now none" in stale(lacks, info).message
    store.save(replace(saved, ran={"a": "openvino fp32 xyz"}))
    assert "variant" in stale(store, info).message


@pytest.mark.parametrize(("mask", "mode"), [(0, 0o775), (0o022, 0o755), (0o077, 0o700)])
def test_not_everybody_may_write_into_a_repository(tmp_path: Path, mask: int, mode: int) -> None:
    """Nor where the umask is 0: blocks are code that is run."""
    before = os.umask(mask)
    try:
        repository = save_echoes(tmp_path / "new" / "blocks", "a")
        store = ProfileStore(repository.root, "m1", FACTS)
        store.save(record(store, [repository.info("a")]))
    finally:
        os.umask(before)
    made = {p: p.stat().st_mode for p in tmp_path.rglob("*")}
    folders = {p.name: oct(m & 0o777) for p, m in made.items() if p.is_dir()}
    assert folders == dict.fromkeys(("new", "blocks", "a", "profiles"), oct(mode))
    assert not [p for p, m in made.items() if m & 0o002]


def test_a_complete_record_holds_until_the_next_is_complete(
    store: ProfileStore, repository: BlockRepository
) -> None:
    info = repository.info("a")
    saved = record(store, [info])
    store.save(replace(saved, complete=False))
    assert "interrupted" in stale(store, info).message
    store.save(saved)
    assert store.unfinished(saved.key) is None
    begun = replace(saved, complete=False, when="later")
    store.save(begun)
    assert store.fresh([info], [ECHO]) == saved and store.unfinished(saved.key) == begun
    assert len(store.records("a")) == 2
    store.save(replace(begun, complete=True))
    assert store.fresh([info], [ECHO]).when == "later" and store.unfinished(saved.key) is None


def test_another_machines_profile_is_stale_not_absent(
    store: ProfileStore, repository: BlockRepository
) -> None:
    info = repository.info("a")
    other = ProfileStore(repository.root, "m2", {**FACTS, "cpu": "Y"})
    other.save(record(other, [info], facts={**FACTS, "cpu": "Y"}))
    assert "cpu: measured on Y, now X" in stale(store, info).message
    store.save(record(store, [info]))
    assert store.fresh([info], [ECHO]).profile.machine == "m1"
    assert len(store.records("a")) == 2


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"7", b'{"schema_version": 2}', b'{"schema_version": 1}', b"[" * 100_000],
)
def test_an_unreadable_file_is_stale(
    store: ProfileStore, repository: BlockRepository, raw: bytes
) -> None:
    info = repository.info("a")
    path = store.save(record(store, [info]))
    path.write_bytes(raw)
    assert "cannot be read" in stale(store, info).message
    assert store.records("a") == []


def test_a_torn_file_is_stale_at_every_tenth_byte(
    store: ProfileStore, repository: BlockRepository
) -> None:
    info = repository.info("a")
    path = store.save(record(store, [info]))
    whole = path.read_bytes()
    for cut in range(0, len(whole) - 2, 10):
        path.write_bytes(whole[:cut])
        stale(store, info)


def test_a_huge_file_is_not_read(
    store: ProfileStore, repository: BlockRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = repository.info("a")
    path = store.save(record(store, [info]))
    monkeypatch.setattr(module, "MAX_BYTES", path.stat().st_size - 1)
    assert "larger than" in stale(store, info).message


def test_links_are_not_followed(
    store: ProfileStore, repository: BlockRepository, tmp_path: Path
) -> None:
    info = repository.info("a")
    path = store.save(record(store, [info]))
    outside = tmp_path / "outside.json"
    os.replace(path, outside)
    path.symlink_to(outside)
    assert "cannot be read" in stale(store, info).message
    path.unlink()
    path.parent.rmdir()
    path.parent.symlink_to(tmp_path)
    with pytest.raises(BlockFlowError):
        store.save(record(store, [info]))
    assert store.records("a") == []


@pytest.mark.parametrize("name", ["../a", "a/b", "", "nope"])
def test_a_folder_that_is_none(store: ProfileStore, repository: BlockRepository, name: str) -> None:
    info = replace(repository.info("a"), name=name)
    assert store.records(name) == []
    with pytest.raises(RepositoryError) as e:
        store.save(record(store, [info]))
    assert e.value.code == "UNKNOWN_BLOCK"


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "NO_SPACE"),
        (errno.ENFILE, "NO_SPACE"),
        (errno.EROFS, "REPOSITORY_UNUSABLE"),
    ],
)
def test_a_disk_that_takes_nothing_is_said(
    store: ProfileStore,
    repository: BlockRepository,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: str,
) -> None:
    info = repository.info("a")
    saved = record(store, [info])
    store.save(saved)

    replaced = os.replace

    def refused(source: str, target: str, **more: Any) -> None:
        if source.endswith(".part"):
            raise OSError(number, os.strerror(number))
        replaced(source, target, **more)

    monkeypatch.setattr(module.os, "replace", refused)
    with pytest.raises(BlockFlowError) as e:
        store.save(replace(saved, when="later"))
    assert e.value.code == code
    assert store.load(saved.key) == saved
    assert len(list((store.root / "a" / "profiles").iterdir())) == 1, "no half of a file is left"


def test_a_record_that_no_descriptor_is_left_for_is_not_called_stale(
    store: ProfileStore, repository: BlockRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = record(store, [repository.info("a")])
    store.save(saved)

    monkeypatch.setattr(module.os, "open", no_descriptor)
    with pytest.raises(SystemError_, match="NO_SPACE"):
        store.load(saved.key)


def test_chains_and_options_have_files_of_their_own(
    store: ProfileStore, repository: BlockRepository
) -> None:
    a, b = repository.info("a"), repository.info("b")
    store.save(record(store, [a]))
    chained = record(store, [a, b])
    store.save(chained)
    assert store.load(chained.key) == chained
    assert chained.key.name == "a+b"
    assert "--chain a,b" in chained.key.subject().command()
    assert store.fresh([a, b], [ECHO, ECHO]) == chained
    with_options = ProfileKey(("a",), "exported", "fp32", {"memory_format": "channels_last"})
    files = {
        k.file("m1")
        for k in (
            with_options,
            chained.key,
            ProfileKey(("a",), "exported", "fp32"),
            ProfileKey(("a",), "exported", "bf16"),
            replace(chained.key, blocks=("a", "c")),
        )
    }
    assert len(files) == 5
    options = {"spin": True, "fixed_rows": [1]}
    one, other = (
        ProfileKey(("a",), "x", "fp32", dict(sorted(options.items(), reverse=r)))
        for r in (False, True)
    )
    assert one.file("m1") == other.file("m1")
    command = with_options.subject().command()
    assert "--option 'memory_format=\"channels_last\"'" in command


def test_mixed_engines_of_a_chain_are_auto() -> None:
    key = ProfileKey.of(["a", "b"], [ECHO, Selection("exported", "fp32", {}, None)])
    assert (key.engine, key.precision, key.options) == ("auto", "auto", {})


def test_a_block_that_is_gone_is_a_reason(store: ProfileStore, repository: BlockRepository) -> None:
    saved = record(store, [repository.info("a")])

    def lookup(name: str) -> BlockInfo:
        raise RepositoryError("UNKNOWN_BLOCK", f"no block {name!r}")

    assert store.reasons(saved, lookup) == ["no block 'a'"]


def test_records_survive_json(store: ProfileStore, repository: BlockRepository) -> None:
    a, b = repository.info("a"), repository.info("b")
    part = StageProfile("b", b.digest, "echo", "fp32", "m1", (point(1, 1.0),))
    saved = record(store, [a, b], parts=(part, part))
    assert ProfileRecord.from_dict(json.loads(json.dumps(saved.to_dict()))) == saved
    assert staleness(saved, saved.profile.digest, saved.ran, FACTS) == []
