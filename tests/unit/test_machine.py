"""repository/machine: what the fingerprint depends on, and what it does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from blockflow.repository import machine


def test_facts_and_fingerprint() -> None:
    facts = machine.describe()
    assert set(facts) == {"cpu", "isa", "cores", *machine.ENGINE_PACKAGES}
    assert facts["cores"] >= 1
    assert facts["torch"].startswith("2.")
    assert machine.fingerprint() == machine.digest_of(facts)
    assert len(machine.fingerprint()) == 12
    int(machine.fingerprint(), 16)


@pytest.mark.parametrize(
    ("name", "value"),
    [("cpu", "another"), ("isa", "avx512f"), ("cores", 1000), ("torch", "1.0"), ("openvino", "x")],
)
def test_each_fact_counts(name: str, value: object) -> None:
    facts = machine.describe()
    assert machine.digest_of({**facts, name: value}) != machine.digest_of(facts)


def test_pinning_does_not_change_the_machine() -> None:
    before, facts = os.sched_getaffinity(0), machine.describe()
    try:
        os.sched_setaffinity(0, {min(before)})
        assert machine.describe() == facts
    finally:
        os.sched_setaffinity(0, before)


X86 = """processor\t: 0
model name\t: Some CPU @ 2 GHz
flags\t\t: fpu vme smep avx avx2 avx512_bf16 amx_tile fma sse4_2 f16c ibrs

processor\t: 1
model name\t: Other
flags\t\t: avx
"""
ARM = """processor\t: 0
Features\t: fp asimd bf16 i8mm sve crc32
CPU implementer\t: 0x41
CPU part\t: 0xd4f
"""


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    return tmp_path / "cpuinfo"


def test_of_the_flags_only_instruction_sets_count(cpuinfo: Path) -> None:
    cpuinfo.write_text(X86)
    assert machine.cpu_model() == "Some CPU @ 2 GHz"
    assert machine.describe()["isa"] == "amx_tile avx avx2 avx512_bf16 f16c fma sse4_2"


def test_arm_has_other_words(cpuinfo: Path) -> None:
    cpuinfo.write_text(ARM)
    assert machine.cpu_model().endswith("0x41 0xd4f")
    assert machine.describe()["isa"] == "asimd bf16 fp i8mm sve"


def test_a_kernel_that_tells_nothing(cpuinfo: Path) -> None:
    assert not cpuinfo.exists()
    assert machine.cpu_model()
    assert machine.describe()["isa"] == ""
    assert machine.version_of("no-such-package") == ""
