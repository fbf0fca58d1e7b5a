"""Processes that die with tensors in their hands, and shared memory that runs out."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import sockets_rig
from small_disk import on_small_disk

from blockflow.core.errors import RequestError
from blockflow.tensormq.arena import Arena
from blockflow.tensormq.janitor import remove_leavings
from blockflow.tensormq.shm import ShmConsumer, ShmProducer
from blockflow.wire.tensor import TensorDesc, desc_from_wire

MIB = 1024 * 1024
CONSUMER, OWNER = 21, 11
PRELUDE = """
import sys
from pathlib import Path
from blockflow.core.errors import BlockFlowError
from blockflow.tensormq.arena import Arena
from blockflow.tensormq.shm import ShmConsumer, ShmProducer
from blockflow.wire.codec import decode, encode
from blockflow.wire.tensor import desc_from_wire

def say(text):
    print(text, flush=True)
"""


class Child:
    """A real process that runs a script and talks in lines."""

    def __init__(self, script: str, *args: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(script), *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(10) == -signal.SIGKILL

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


run_dir = sockets_rig.run_dir


@pytest.fixture
def children() -> Iterator[list[Child]]:
    made: list[Child] = []
    yield made
    for child in made:
        child.end()


def wire(desc: TensorDesc) -> str:
    from blockflow.wire.codec import encode

    return encode(desc.to_wire()).hex()


def unwire(text: str) -> TensorDesc:
    from blockflow.wire.codec import decode

    return desc_from_wire(decode(bytes.fromhex(text), max_bytes=4096, what="test"), "test")


CONSUMER_SCRIPT = """
consumer = ShmConsumer(Path(sys.argv[1]))
held = []
for line in sys.stdin:
    desc = desc_from_wire(decode(bytes.fromhex(line), max_bytes=4096, what="test"), "test")
    held.append(consumer.open(desc, None))
    say(bytes(held[-1].memory[:4]).decode())
"""

OWNER_SCRIPT = """
producer = ShmProducer(Arena.create(Path(sys.argv[1]), 11, 1 << 20, slots=4))
for text in (b"one!", b"two!"):
    buffer = producer.reserve("uint8", (4,))
    buffer.memory[:] = text
    say(encode(producer.publish(buffer, [21])[0].desc.to_wire()).hex())
sys.stdin.read()
"""


def test_a_killed_consumer_gives_back_what_it_held(run_dir: Path, children: list[Child]) -> None:
    producer = ShmProducer(Arena.create(run_dir, OWNER, MIB, slots=2))
    children.append(Child(CONSUMER_SCRIPT, run_dir))
    for text in (b"one!", b"two!"):
        buffer = producer.reserve("uint8", (4,))
        assert buffer is not None
        buffer.memory[:] = text
        (payload,) = producer.publish(buffer, [CONSUMER])
        children[0].tell(wire(payload.desc))
        assert children[0].line() == text.decode()
    assert producer.reserve("uint8", (4,)) is None
    children[0].kill()
    assert producer.sweep() == 0, "the dead released nothing"
    assert producer.reserve("uint8", (4,)) is None, "and no time-out gives its slots away"
    assert producer.peer_gone(CONSUMER) == 2
    assert producer.outstanding() == 0
    assert producer.reserve("uint8", (4,)) is not None
    producer.close()


def test_a_killed_owner_leaves_what_is_held_readable(run_dir: Path, children: list[Child]) -> None:
    children.append(Child(OWNER_SCRIPT, run_dir))
    first, second = unwire(children[0].line()), unwire(children[0].line())
    consumer = ShmConsumer(run_dir)
    held = consumer.open(first, None)
    children[0].kill()
    assert bytes(held.memory) == b"one!"
    assert bytes(consumer.open(second, None).memory) == b"two!", "still mapped"
    remove_leavings(run_dir, OWNER)
    consumer.peer_gone(OWNER)
    assert bytes(held.memory) == b"one!", "the view keeps the mapping"
    held.release()
    for late in (consumer, ShmConsumer(run_dir)):
        with pytest.raises(RequestError) as info:
            late.open(second, None)
        assert info.value.code == "WORKER_LOST"


def test_nothing_is_left_when_owner_and_consumer_are_killed(
    run_dir: Path, children: list[Child]
) -> None:
    children += [Child(OWNER_SCRIPT, run_dir), Child(CONSUMER_SCRIPT, run_dir)]
    children[1].tell(children[0].line())
    assert children[1].line() == "one!"
    for child in children:
        child.kill()
    assert sorted(os.listdir(run_dir)) == [f"arena-{OWNER}", "lock", f"marks-{OWNER}"]
    remove_leavings(run_dir, OWNER)
    assert os.listdir(run_dir) == ["lock"]


FILL_SCRIPT = """
run_dir = Path(sys.argv[1])
try:
    producer = ShmProducer(Arena.create(run_dir, 11, 64 << 20, slots=64, warm_bytes=1))
except BlockFlowError as exc:
    say(f"create {exc.code}")
    sys.exit(0)
kept = []
while True:
    try:
        buffer = producer.reserve("uint8", (200_000,))
    except BlockFlowError as exc:
        say(f"reserve {exc.code}")
        break
    if buffer is None:
        say("full")
        break
    buffer.memory[:] = b"x" * 200_000
    kept.append(buffer)
say(f"held {len(kept)}")
try:
    producer.reserve("uint8", (32 << 20,))
except BlockFlowError as exc:
    say(f"large {exc.code}")
say(f"intact {all(bytes(b.memory) == b'x' * 200_000 for b in kept)}")
for buffer in kept:
    producer.discard(buffer)
say(f"again {producer.reserve('uint8', (200_000,)) is not None}")
producer.close()
say(f"left {len([p for p in run_dir.iterdir() if p.name.startswith(('arena', 'marks'))])}")
"""


def run_filling(argv: Sequence[str]) -> list[str]:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.split("\n")[:-1]


def test_a_full_tmpfs_is_a_typed_error_and_never_a_signal(tmp_path: Path) -> None:
    """1 MiB of tmpfs in a mount namespace of its own; the arena would like 64."""
    mount = tmp_path / "shm"
    mount.mkdir()
    base = on_small_disk(mount, "size=1m")
    lines = run_filling([*base, sys.executable, "-c", PRELUDE + FILL_SCRIPT, str(mount)])
    # What is held lies in committed memory: releases will help, so reserve says "not now".
    assert lines[0] == "full"
    assert lines[1] in ("held 4", "held 5")
    assert lines[2:] == ["large NO_SPACE", "intact True", "again True", "left 0"]


@pytest.mark.parametrize("limit_kib", [4, 1024])
def test_a_file_size_limit_is_a_typed_error(run_dir: Path, limit_kib: int) -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_kib * 1024,) * 2)

    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + FILL_SCRIPT, str(run_dir)],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lower,
    )
    assert (done.returncode, done.stdout) == (0, "create NO_SPACE\n"), done.stderr
    assert os.listdir(run_dir) == ["lock"]


def test_a_tensor_that_no_release_can_help_is_no_space(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted failure for machines without mount namespaces: fallocate says ENOSPC."""
    producer = ShmProducer(Arena.create(run_dir, OWNER, 8 * MIB, slots=4, warm_bytes=MIB))
    real = os.posix_fallocate

    def full(fd: int, offset: int, length: int) -> None:
        if offset + length > 2 * MIB:
            raise OSError(28, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Exception, match="NO_SPACE"):
        producer.reserve("uint8", (4 * MIB,))
    assert producer.outstanding() == 0
    held = [producer.reserve("uint8", (MIB // 2,)) for _ in range(2)]
    assert None not in held
    assert producer.reserve("uint8", (MIB,)) is None
    with pytest.raises(Exception, match="NO_SPACE"):
        producer.reserve("uint8", (4 * MIB,))
    assert producer.outstanding() == 2
    monkeypatch.undo()
    assert producer.reserve("uint8", (4 * MIB,)) is not None, "space was found: it grows again"
    producer.close()
