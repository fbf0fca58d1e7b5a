"""The repository: verified reads, atomic writes, and no way out of its folder."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals_rig import no_room

from blockflow.core.errors import BlockFlowError, ExportError, RepositoryError, SystemError_
from blockflow.core.model import TensorSpec
from blockflow.repository import folder as folder_module
from blockflow.repository import repository as module
from blockflow.repository.echo import save_echo
from blockflow.repository.profiles import ProfileStore
from blockflow.repository.repository import BlockRepository

SPEC = TensorSpec("float32", ("rows", 4))


@pytest.fixture
def repo(tmp_path: Path) -> BlockRepository:
    repository = BlockRepository(tmp_path / "blocks")
    save_echo(repository, "echo1", SPEC, settings={"delay_ms": 1})
    return repository


def artifact_file(repo: BlockRepository, name: str = "echo1") -> Path:
    return repo.root / name / repo.manifest(name).artifact


def failure(code: str, repo: BlockRepository, name: str = "echo1") -> RepositoryError:
    with pytest.raises(RepositoryError) as e, repo.artifact(name):
        pass
    assert e.value.code == code, str(e.value)
    return e.value


def test_what_was_saved_is_found(repo: BlockRepository) -> None:
    assert repo.names() == ["echo1"]
    info = repo.info("echo1")
    assert info.format == "echo" and info.contract.input == SPEC
    with repo.artifact("echo1", digest=info.digest) as path:
        assert json.loads(path.read_bytes()) == {"delay_ms": 1}
    assert repo.verify("echo1").sha256 == info.digest


def test_no_descriptor_stays_open(repo: BlockRepository) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        repo.verify("echo1")
        failure("UNKNOWN_BLOCK", repo, "nothing")
    assert len(os.listdir("/proc/self/fd")) == before


def test_saving_the_same_version_again_replaces(repo: BlockRepository) -> None:
    old = artifact_file(repo)
    save_echo(repo, "echo1", SPEC, settings={"delay_ms": 2})
    assert repo.versions("echo1") == ["1"]
    assert not old.exists()
    assert sorted(p.name for p in (repo.root / "echo1").iterdir()) == sorted(
        ["manifest.json", artifact_file(repo).name]
    )


def test_an_altered_artifact_is_refused(repo: BlockRepository) -> None:
    file = artifact_file(repo)
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(bytes(data))
    assert "sha256" in failure("DIGEST_MISMATCH", repo).message
    with pytest.raises(RepositoryError):
        repo.verify("echo1")


def test_a_truncated_artifact_is_refused(repo: BlockRepository) -> None:
    artifact_file(repo).write_bytes(b"{")
    assert "bytes" in failure("DIGEST_MISMATCH", repo).message


def test_a_folder_that_cannot_be_written(repo: BlockRepository) -> None:
    (repo.root / "echo2").write_text("a file where a block's folder should be")
    with pytest.raises(RepositoryError, match="cannot be written") as e:
        save_echo(repo, "echo2", SPEC)
    assert e.value.code == "REPOSITORY_UNUSABLE" and "permissions" in e.value.hint


def test_another_digest_than_the_caller_expects(repo: BlockRepository) -> None:
    with (
        pytest.raises(RepositoryError, match="no stored version of block 'echo1'"),
        repo.artifact("echo1", digest="f" * 64),
    ):
        pass


def test_a_missing_artifact(repo: BlockRepository) -> None:
    artifact_file(repo).unlink()
    assert "built, not committed" in failure("ARTIFACT_MISSING", repo).hint


@pytest.mark.parametrize("kind", ["symlink", "fifo", "folder"])
def test_an_artifact_that_is_no_file(repo: BlockRepository, kind: str, tmp_path: Path) -> None:
    file = artifact_file(repo)
    outside = tmp_path / "outside"
    outside.write_bytes(file.read_bytes())
    file.unlink()
    if kind == "symlink":
        file.symlink_to(outside)
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        file.mkdir()
    failure("ARTIFACT_MISSING", repo)


def test_a_linked_manifest_is_refused(repo: BlockRepository, tmp_path: Path) -> None:
    manifest = repo.root / "echo1" / "manifest.json"
    moved = manifest.rename(tmp_path / "m.json")
    manifest.symlink_to(moved)
    failure("CORRUPT_MANIFEST", repo)


def test_a_folder_in_the_place_of_a_manifest_is_that_blocks_trouble_alone(
    repo: BlockRepository,
) -> None:
    (repo.root / "odd" / "manifest.json").mkdir(parents=True)
    (repo.root / "echo1" / "profiles" / "x.echo.fp32.json").mkdir(parents=True)
    open_before = os.listdir("/proc/self/fd")
    for _ in range(20):
        failure("CORRUPT_MANIFEST", repo, "odd")
        assert repo.info("echo1").name == "echo1"
        with pytest.raises(RepositoryError) as e:
            ProfileStore(repo.root)._read("echo1", "x.echo.fp32.json")
        assert e.value.code == "STALE_PROFILE"
    assert os.listdir("/proc/self/fd") == open_before


def test_a_broken_manifest_is_replaced_as_its_hint_says(repo: BlockRepository) -> None:
    (repo.root / "echo1" / "manifest.json").write_text("{")
    with pytest.raises(RepositoryError) as e:
        repo.refuse_stored(["echo1"], "1")  # as an export does without --force
    assert e.value.code == "CORRUPT_MANIFEST" and "--force" in e.value.hint
    assert save_echo(repo, "echo1", SPEC) == repo.info("echo1")


def test_a_linked_folder_is_no_block(repo: BlockRepository) -> None:
    (repo.root / "alias").symlink_to(repo.root / "echo1")
    assert repo.names() == ["echo1"]
    assert "is a link" in failure("REPOSITORY_UNUSABLE", repo, "alias").message


@pytest.mark.parametrize(
    "name", ["..", ".", "", "../echo1", "echo1/../echo1", "/etc", "echo1\n", "echo1\0", "a" * 65]
)
def test_names_that_would_leave_the_folder(repo: BlockRepository, name: str) -> None:
    assert "not a block name" in failure("UNKNOWN_BLOCK", repo, name).message


@settings(max_examples=60, deadline=None)
@given(name=st.text(max_size=80))
def test_any_name_gives_a_typed_error(name: str) -> None:
    with pytest.raises(RepositoryError) as e:
        BlockRepository("/nonexistent-blockflow").manifest(name)
    assert e.value.code == "UNKNOWN_BLOCK"


def test_a_folder_that_is_closed_to_this_user_is_told(
    repo: BlockRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refused(path: Any, *args: Any, **more: Any) -> int:
        if path in ("echo1", repo.root / "echo1"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *args, **more)

    monkeypatch.setattr(os, "open", refused)
    monkeypatch.setattr(Path, "is_symlink", refused)  # nor may its repository be looked into
    with pytest.raises(RepositoryError, match=r"UNKNOWN_BLOCK: .*Permission denied") as e:
        repo.manifest("echo1")
    assert "let this user read" in e.value.hint


def test_an_unknown_name_lists_near_ones(repo: BlockRepository) -> None:
    error = failure("UNKNOWN_BLOCK", repo, "echo2")
    assert error.details["near"] == ["echo1"]
    assert "did you mean echo1" in error.hint


def test_a_list_of_blocks_that_is_cut_off_says_so(repo: BlockRepository) -> None:
    for n in range(9):
        save_echo(repo, f"b{n}", SPEC)
    assert failure("UNKNOWN_BLOCK", repo, "zzz").hint.endswith("b8, echo1")
    save_echo(repo, "b9", SPEC)
    assert failure("UNKNOWN_BLOCK", repo, "zzz").hint.endswith("b8, b9 ...")


def test_an_empty_repository(tmp_path: Path) -> None:
    repo = BlockRepository(tmp_path / "none")
    assert repo.names() == []
    failure("UNKNOWN_BLOCK", repo)


def test_a_half_written_block_is_no_block(repo: BlockRepository) -> None:
    half = repo.root / "half"
    half.mkdir()
    (half / ".artifact.1").write_bytes(b"...")
    assert repo.names() == ["echo1"]
    failure("UNKNOWN_BLOCK", repo, "half")


def test_a_save_that_fails_leaves_the_old_block(
    repo: BlockRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = repo.manifest("echo1")
    monkeypatch.setattr(module.os, "replace", no_room)
    with pytest.raises(Exception) as e:
        save_echo(repo, "echo1", SPEC, settings={"delay_ms": 5})
    assert getattr(e.value, "code", "") == "NO_SPACE"
    monkeypatch.undo()
    assert repo.verify("echo1") == before
    assert len(list((repo.root / "echo1").iterdir())) == 2


def test_an_interrupt_in_the_middle_of_a_save_loses_no_version(
    repo: BlockRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def interrupted(source: str, target: str, **at: int) -> None:
        replace(source, target, **at)
        if target == "manifest.json":
            monkeypatch.undo()
            raise KeyboardInterrupt

    before = repo.manifest("echo1")
    monkeypatch.setattr(module.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_echo(repo, "echo1", SPEC, settings={"delay_ms": 5}, version="2")
    assert repo.verify("echo1") == before and repo.versions("echo1") == ["1"]


def test_a_full_disk_leaves_no_folder_of_a_block_that_was_none(
    repo: BlockRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(repo.root.iterdir())
    monkeypatch.setattr(module.os, "replace", no_room)
    with pytest.raises(SystemError_, match="NO_SPACE"):
        save_echo(repo, "new", SPEC)
    assert sorted(repo.root.iterdir()) == before


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENFILE, "NO_SPACE"), (errno.EIO, "REPOSITORY_UNUSABLE")]
)
def test_a_version_that_cannot_be_opened_just_then_is_not_lost(
    repo: BlockRepository, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    """A table of descriptors that all processes share is full at one moment and not at the next."""
    opened, left = os.open, iter([OSError(number, os.strerror(number))])

    def full_once(path: Any, *args: Any, **more: Any) -> int:
        if path == "manifest.json" and (error := next(left, None)):
            raise error
        return opened(path, *args, **more)

    before = state(repo)
    monkeypatch.setattr(os, "open", full_once)
    with pytest.raises(BlockFlowError, match=code):
        save_echo(repo, "echo1", SPEC, version="2")
    assert state(repo) == before


def test_a_block_in_an_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "blocks").write_text("a file, not a folder")
    with pytest.raises(RepositoryError):
        save_echo(BlockRepository(tmp_path / "blocks"), "echo1", SPEC)


def test_readers_never_see_a_mixture(repo: BlockRepository) -> None:
    failures: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            try:
                repo.verify("echo1")
            except BaseException as e:
                failures.append(e)

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [
        threading.Thread(
            target=lambda k=k: [
                save_echo(repo, "echo1", SPEC, settings={"delay_ms": k * 100 + i})
                for i in range(10)
            ]
        )
        for k in (1, 2)
    ]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert not failures
    repo.verify("echo1")


def state(repo: BlockRepository) -> dict[str, bytes]:
    files = (p for p in repo.root.rglob("*") if p.is_file())
    return {str(p.relative_to(repo.root)): p.read_bytes() for p in files}


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("step", ["place", "put"])
def test_blocks_are_stored_together_or_not_at_all(
    repo: BlockRepository, monkeypatch: pytest.MonkeyPatch, step: str, version: str
) -> None:
    save_echo(repo, "echo2", SPEC, settings={"delay_ms": 3})
    before = state(repo)
    form = repo.manifest("echo1").model_copy(update={"version": version})
    names = ["echo1", "new", "echo2"]
    blocks = [(form.model_copy(update={"name": n}), n.encode()) for n in names]
    if step == "place":
        blocks[-1] = (blocks[-1][0], repo.root / "missing")
    else:
        put, left = folder_module.Pending.put, iter([None, None, OSError(28, "No space left")])

        def fails_at_last(pending: folder_module.Pending) -> None:
            if error := next(left):
                raise error
            put(pending)

        monkeypatch.setattr(folder_module.Pending, "put", fails_at_last)
    with pytest.raises(BlockFlowError) as e:
        repo.save_all(blocks)
    assert e.value.code == ("REPOSITORY_UNUSABLE" if step == "place" else "NO_SPACE")
    assert "echo2" in e.value.where
    assert state(repo) == before and repo.names() == ["echo1", "echo2"]
    monkeypatch.undo()
    blocks[-1] = (blocks[-1][0], b"echo2")
    assert [i.name for i in repo.save_all(blocks)] == names
    assert repo.names() == sorted(names)
    assert repo.versions("echo2") == (["1"] if version == "1" else ["2", "1"])
    for name in names:
        repo.verify(name)
    assert not [f for f in state(repo) if "/." in f], "nothing unfinished is left"


def test_a_version_stored_meanwhile_is_not_replaced(repo: BlockRepository) -> None:
    manifest = repo.manifest("echo1")
    blocks = [(manifest.model_copy(update={"name": n}), b"other") for n in ("fresh", "echo1")]
    before = state(repo)
    with pytest.raises(ExportError, match="version 1 of echo1 is stored already"):
        repo.save_all(blocks, replace_stored=False)
    assert state(repo) == before


def test_nothing_is_stored_through_a_link(repo: BlockRepository, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name, target in (("linked", "elsewhere"), ("dangling", "nowhere")):
        (repo.root / name).symlink_to(tmp_path / target)
        with pytest.raises(RepositoryError, match="is a link") as e:
            save_echo(repo, name, SPEC)
        assert e.value.code == "REPOSITORY_UNUSABLE" and name in e.value.where
    assert not list((tmp_path / "elsewhere").iterdir())
