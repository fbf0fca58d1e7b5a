"""What no program of this project may do, read from syntax trees; names are followed through
imports, aliases and ``getattr``.

It finds what is written by habit or by mistake. Whoever wants to hide something can: block code and
this code are trusted alike.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import PurePosixPath

# Whatever turns bytes into code or objects, unpacks archives into files, or fetches from the
# network. (A zip archive is read by engine/program.py: records by name, none is ever extracted.)
MODULES = frozenset(
    "pickle _pickle cPickle cloudpickle dill joblib marshal shelve copyreg code codeop runpy imp "
    "tarfile zipimport zipapp urllib.request urllib3 requests ftplib smtplib telnetlib pty "
    "xmlrpc multiprocessing.connection multiprocessing.managers multiprocessing.reduction "
    "torch.hub torch.package yaml".split()
)
MEMBERS = frozenset(
    "recv_pyobj send_pyobj read_pickle to_pickle unpack_archive extract extractall urlopen "
    "urlretrieve load_state_dict_from_url load_url download_url_to_file".split()
)
NAMES = frozenset(
    "builtins.eval builtins.exec builtins.compile builtins.__import__ os.system os.popen "
    "posix.system subprocess.getoutput subprocess.getstatusoutput asyncio.create_subprocess_shell "
    "asyncio.subprocess.create_subprocess_shell".split()
)
BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
IMPORTERS = frozenset({"importlib.import_module", "importlib.__import__", "builtins.__import__"})
UNPICKLERS = frozenset({"torch.load", "torch.serialization.load"})
"""They may be called, with ``weights_only=True``."""

ROOTS = frozenset({"asyncio", "builtins", "importlib", "os", "subprocess", "sys", "torch"})
"""Names that stand for these modules also where they come as arguments."""

FLAGS = ("shell", "allow_pickle")
SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "csh", "tcsh", "fish", "busybox"})
STARTERS = ("subprocess.", "asyncio.create_subprocess", "os.exec", "os.spawn", "os.posix_spawn")


def banned(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, what) of everything that is not allowed."""
    nodes = walked(tree)
    aliases = aliases_of(nodes)
    out: list[tuple[int, str]] = []
    called = {id(n.func) for n in nodes if isinstance(n, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            out += [(node.lineno, what) for what in _bad_import(node)]
        elif isinstance(node, ast.Assert):
            out.append((node.lineno, "asserts: a check that python -O leaves out"))
        elif isinstance(node, ast.Call):
            out += [(node.lineno, what) for what in _bad_call(node, aliases)]
        if isinstance(node, EXPRESSIONS):
            name = dotted(node, aliases)
            if name is not None and _bad_name(name):
                out.append((node.lineno, f"uses {name}"))
            elif name in UNPICKLERS and id(node) not in called:
                out.append((node.lineno, f"hands {name} on: nobody sees how it is called"))
            elif isinstance(node, ast.Attribute) and node.attr in MEMBERS:
                out.append((node.lineno, f"uses .{node.attr}"))
    return out


EXPRESSIONS = (ast.Attribute, ast.Name, ast.Call, ast.Subscript)
MARKS = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
"""Nodes that say how another one is meant, and hold nothing: every third of a tree."""


def walked(tree: ast.AST) -> list[ast.AST]:
    """``ast.walk`` without the marks, in a third of its time: the whole project is looked at."""
    out = [tree]
    for node in out:  # which grows meanwhile
        for field in node._fields:
            value = getattr(node, field, None)
            if value.__class__ is list:
                out += [v for v in value if isinstance(v, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, MARKS):
                out.append(value)
    return out


def aliases_of(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """What the names of a module stand for: imports, and plain assignments of dotted names."""
    out: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for a in node.names:
                first = a.name.partition(".")[0]
                out[a.asname or first] = a.name if a.asname else first
        elif isinstance(node, ast.ImportFrom) and not node.level:
            out |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
            name = dotted(node.value, out)
            for target in node.targets:
                if name is not None and isinstance(target, ast.Name) and target.id not in out:
                    out[target.id] = name
    return out


def dotted(node: ast.AST, aliases: Mapping[str, str]) -> str | None:
    """The full name of what an expression stands for; None when it is no imported name."""
    # By far the most are these two; to try the patterns one by one takes several times as long.
    if isinstance(node, ast.Name):
        name = node.id
        if name == "__builtins__":
            return "builtins"
        if name in BUILTINS:
            return aliases.get(name, f"builtins.{name}")
        return aliases.get(name, name if name in ROOTS else None)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, aliases)
        return f"{base}.{node.attr}" if base is not None else None
    match node:
        case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(attr)), *_]):
            pass
        case ast.Call(func=func, args=[ast.Constant(value=str(module)), *_]):
            return module if dotted(func, aliases) in IMPORTERS else None
        case ast.Subscript(value=value, slice=ast.Constant(value=str(attr))):
            base = dotted(value, aliases)
            return attr if base == "sys.modules" else f"{base}.{attr}" if base else None
        case _:
            return None
    base = dotted(value, aliases)
    return f"{base}.{attr}" if base is not None else None


@cache
def _bad_name(name: str) -> bool:
    base, _, member = name.rpartition(".")
    return name in NAMES or _in_modules(name) or (member in MEMBERS and base != "")


def _in_modules(name: str) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:n]) in MODULES for n in range(1, len(parts) + 1))


def _bad_import(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    base = f"{node.module}." if isinstance(node, ast.ImportFrom) and not node.level else ""
    for a in node.names:
        name = base + a.name
        if _bad_name(name):
            yield f"imports {name}"
        elif a.name == "*":
            yield f"imports {name}: nobody sees what"


def _bad_call(node: ast.Call, aliases: Mapping[str, str]) -> Iterator[str]:
    name = dotted(node.func, aliases) or ""
    keywords = {k.arg: k.value for k in node.keywords}
    for k in node.keywords:
        if k.arg is None and isinstance(k.value, ast.Dict):
            keywords |= {
                key.value: value
                for key, value in zip(k.value.keys, k.value.values, strict=True)
                if isinstance(key, ast.Constant)
            }
    for flag in FLAGS:
        value = keywords.get(flag)
        if value is not None and not (isinstance(value, ast.Constant) and value.value is False):
            yield f"passes {flag}="
    only = keywords.get("weights_only")
    if name in UNPICKLERS and not (isinstance(only, ast.Constant) and only.value is True):
        yield f"{name} without weights_only=True"
    if name.startswith(STARTERS):
        words = [w for a in (*node.args, *keywords.values()) for w in ast.walk(a)]
        texts = [w.value for w in words if isinstance(w, ast.Constant) and isinstance(w.value, str)]
        if any(PurePosixPath(t.partition(" ")[0]).name in SHELLS for t in texts):
            yield f"{name} runs a shell"
