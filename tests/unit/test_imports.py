"""The import rule and the bans, read from the syntax trees of all modules.

The rings, from the inside out; a room imports from inner rings only, never from its own ring:

    core <- wire, batching, tuning <- tensormq, engine, repository, launch
         <- worker, dispatcher, control, client <- bench, monitor <- cli
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator

import pytest
from bans import banned
from module_facts import PACKAGE, Import, Module, imports_of, modules, programs, top

RINGS: tuple[frozenset[str], ...] = (
    frozenset({"core"}),
    frozenset({"wire", "batching", "tuning"}),
    frozenset({"tensormq", "engine", "repository", "launch"}),
    frozenset({"worker", "dispatcher", "control", "client"}),
    frozenset({"bench", "monitor"}),
    # The commands are the composition root: they alone may name every room.
    frozenset({"cli"}),
)
RING_OF = {room: i for i, ring in enumerate(RINGS) for room in ring}
PURE_ROOMS = RINGS[0] | RINGS[1]

# What would let a pure room see the world: sockets, threads, processes, clocks, chance, files.
IMPURE = frozenset(
    "asyncio concurrent ctypes datetime fcntl http io mmap multiprocessing os pathlib queue random "
    "sched secrets select selectors shutil signal socket socketserver ssl subprocess sys tempfile "
    "threading time urllib uuid weakref".split()
)
PURE_THIRD_PARTY = frozenset({"msgpack", "numpy", "pydantic"})

TORCH_ROOMS = frozenset({"tensormq", "engine", "repository", "launch", "worker", "bench"})
TORCH_LAZY_ROOMS = frozenset({"client"})
"""Rooms that may import torch inside a function only: their import must stay quick and small."""

CLIENT_THIRD_PARTY = frozenset({"zmq", "msgpack", "numpy"})

MAX_LINES = 400


def ring_violations(room: str, imports: Iterable[Import]) -> list[tuple[int, str]]:
    out = []
    for imp in imports:
        parts = imp.module.split(".")
        if parts[0] != "blockflow" or len(parts) < 2 or parts[1] not in RING_OF:
            continue
        target = parts[1]
        if target != room and RING_OF[target] >= RING_OF[room]:
            out.append((imp.line, f"{room} imports {imp.module}"))
    return out


def purity_violations(imports: Iterable[Import]) -> list[tuple[int, str]]:
    out = []
    for imp in imports:
        name = top(imp.module)
        foreign = name not in sys.stdlib_module_names and name != "blockflow"
        if name in IMPURE or (foreign and name not in PURE_THIRD_PARTY):
            out.append((imp.line, f"pure code imports {imp.module}"))
        if imp.module.startswith("numpy.random"):
            out.append((imp.line, "pure code imports numpy.random"))
    return out


def report(findings: list[str]) -> None:
    assert not findings, "\n" + "\n".join(findings)


def test_every_folder_is_a_room_of_the_rule() -> None:
    rooms = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert rooms - set(RING_OF) == set()


def test_rooms_import_from_inner_rings_only() -> None:
    report(
        [
            f"{m.at(line)}: {what}"
            for m in modules()
            if m.room
            for line, what in ring_violations(m.room, m.imports)
        ]
    )


def test_pure_rooms_see_no_sockets_threads_clocks_chance_or_torch() -> None:
    report(
        [
            f"{m.at(line)}: {what}"
            for m in modules()
            if m.room in PURE_ROOMS
            for line, what in purity_violations(m.imports)
        ]
    )


def test_torch_is_imported_only_where_tensors_are_computed_or_mapped() -> None:
    findings = []
    for m in modules():
        for imp in m.imports:
            if top(imp.module) != "torch" or m.room in TORCH_ROOMS:
                continue
            if m.room in TORCH_LAZY_ROOMS and imp.lazy:
                continue
            findings.append(f"{m.at(imp.line)}: {m.room or 'blockflow'} imports {imp.module}")
    report(findings)


def run_by(room: str) -> Iterator[tuple[Module, Import]]:
    """What importing a room, or a module, runs: the imports of all modules of the package that this
    comes to, each with the module in which it stands."""
    by_name = {m.name: m for m in modules()}
    todo = [n for n in by_name if n == room or n.startswith(f"{room}.")]
    assert todo
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        module = by_name[name]
        for imp in module.imports:
            if imp.lazy:
                continue
            yield module, imp
            if top(imp.module) == "blockflow":
                parts = imp.module.split(".")
                prefixes = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
                todo.extend(p for p in prefixes if p in by_name)


def test_the_client_loads_pyzmq_msgpack_and_numpy_alone() -> None:
    allowed = CLIENT_THIRD_PARTY | sys.stdlib_module_names | {"blockflow"}
    report(
        [
            f"{module.at(imp.line)}: imports {imp.module}"
            for module, imp in run_by("blockflow.client")
            if top(imp.module) not in allowed
        ]
    )


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_commands_that_compute_nothing_themselves_load_no_torch(command: str) -> None:
    report(
        [
            f"{module.at(imp.line)}: imports {imp.module}"
            for module, imp in run_by(f"blockflow.cli.{command}")
            if top(imp.module) == "torch"
        ]
    )


def test_nothing_unpickles_evaluates_or_runs_a_shell() -> None:
    report([f"{m.at(line)}: {what}" for m in programs() for line, what in m.bans])


def test_modules_stay_small() -> None:
    sizes = {m: len(m.path.read_text(encoding="utf-8").splitlines()) for m in modules()}
    report(
        [f"{m.at(1)}: {n} lines, at most {MAX_LINES}" for m, n in sizes.items() if n > MAX_LINES]
    )


# Each detector has a planted failure that it must flag.


UNLAWFUL = [
    ("core", "import blockflow.wire.codec"),
    ("core", "from blockflow import tensormq"),
    ("wire", "from blockflow.batching.policy import Policy"),
    ("repository", "from blockflow.engine.base import Engine"),
    ("worker", "def f():\n    from blockflow.dispatcher import main"),
    ("monitor", "from blockflow.cli import main"),
    ("bench", "from blockflow.monitor import rest"),
]


def test_a_planted_ring_violation_is_found() -> None:
    report(
        [
            f"{room}: {source}"
            for room, source in UNLAWFUL
            if not ring_violations(room, imports_of(ast.parse(source)))
        ]
    )


LAWFUL = [
    ("wire", "from blockflow.core import limits"),
    ("cli", "from blockflow.monitor.view import rows"),
    ("control", "from blockflow.control.store import Store"),
    ("core", "if TYPE_CHECKING:\n    from blockflow.wire import codec"),
]


def test_lawful_imports_pass() -> None:
    report(
        [
            f"{room}: {source}"
            for room, source in LAWFUL
            if ring_violations(room, imports_of(ast.parse(source)))
        ]
    )


def test_relative_imports_are_resolved() -> None:
    tree = ast.parse("from ..wire import codec")
    found = list(imports_of(tree, "blockflow.core.model"))
    assert [i.module for i in found] == ["blockflow.wire.codec"]


UNFIT_FOR_PURE_CODE = [
    "import time",
    "from random import choice",
    "import zmq",
    "import torch.nn",
    "import os",
]


def test_planted_impurity_is_found() -> None:
    report(
        [
            source
            for source in UNFIT_FOR_PURE_CODE
            if not purity_violations(imports_of(ast.parse(source)))
        ]
    )


BANNED = [
    "import pickle",
    "def f():\n    from cloudpickle import dumps",
    "sock.recv_pyobj()",
    "sock.send_pyobj(x)",
    "eval('1')",
    "exec(code)",
    "compile(text, 'x', 'exec')",
    "import marshal",
    "from shelve import open",
    "from urllib.request import urlopen",
    "from urllib import request",
    "import urllib3.util",
    "def f():\n    import requests",
    "import tarfile",
    "archive.extractall(folder)",
    "shutil.unpack_archive(path)",
    "torch.hub.load_state_dict_from_url(url)",
    "from torch import hub",
    "from multiprocessing.connection import Client",
    "assert token",
    "run(cmd, shell=True)",
    "run(cmd, shell=flag)",
    "os.system('ls')",
    "torch.load(path)",
    "torch.load(path, weights_only=False)",
    "np.load(path, allow_pickle=True)",
    # by another name
    "import torch\ntorch.load(path)",
    "from torch import load\nload(path)",
    "import torch as t\nt.load(path, weights_only=False)",
    "import torch\ntorch.serialization.load(path)",
    "from torch.serialization import load as read\nread(path)",
    "import torch\nread = torch.load",
    "import torch\ndef f(read=torch.load): ...",
    "from os import system\nsystem('ls')",
    "import os as o\no.popen('ls')",
    "import os\nrun = os.system",
    "import os\ngetattr(os, 'system')('ls')",
    "import builtins\nbuiltins.eval('1')",
    "from builtins import exec as go\ngo('1')",
    "__builtins__.eval('1')",
    "__builtins__['eval']('1')",
    "run = eval",
    "list(map(eval, lines))",
    "import importlib\nimportlib.import_module('pickle').loads(data)",
    "from importlib import import_module as load\nload('torch.hub')",
    "import importlib\nimportlib.import_module('os').system('ls')",
    "import sys\nsys.modules['pickle'].loads(data)",
    "__import__('pickle')",
    "from shutil import unpack_archive as open_it\nopen_it(path)",
    "from os import *",
    "import subprocess\nsubprocess.run(['sh', '-c', command])",
    "import subprocess as s\ns.Popen(('/bin/bash', '-c', command))",
    "from subprocess import check_output\ncheck_output(args=['/usr/bin/env', 'sh', command])",
    "import subprocess\nsubprocess.run(command, **{'shell': True})",
    "import subprocess\nsubprocess.getoutput(command)",
    "import asyncio\nasyncio.create_subprocess_shell(command)",
    "import asyncio\nasyncio.create_subprocess_exec('bash', '-c', command)",
    "import os\nos.execvp('sh', ['sh', '-c', command])",
]


def test_a_planted_ban_is_found() -> None:
    report([source for source in BANNED if not banned(ast.parse(source))])


NOT_BANNED = [
    "model.eval()",
    "torch.load(path, weights_only=True)",
    "run(cmd, shell=False)",
    "from urllib.parse import urlsplit",
    "torch.compile(model)",
    "re.compile(text)",
    "import torch\ntorch.load(path, weights_only=True)",
    "from torch import load\nload(path, weights_only=True)",
    "import json\njson.load(file)",
    "import subprocess\nsubprocess.run(['make', '-s', 'finish'])",
    "import importlib\nimportlib.import_module(name)",
    "import importlib\nimportlib.import_module('json')",
    "import re\npattern = re.compile",
]


def test_what_is_not_banned_passes() -> None:
    report([source for source in NOT_BANNED if banned(ast.parse(source))])
