"""What the template imports so that a worker finds it.

Every worker needs the base. What loads its blocks is imported when the repository has a block for
it, or a launch names it: torch.export costs as much as torch itself (two to three seconds), and who
loads nothing with it need not wait for it. A name that another release of a package does not have
is skipped, and a test compares these lists with what a load really imports.
"""

from __future__ import annotations

import gc
import importlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from blockflow.core.engines import TORCH_EXPORT

BASE_MODULES: tuple[str, ...] = (
    "numpy",
    "zmq",
    # What a Dispatcher imports by itself, late: it is replaced though the environment has gone.
    "zmq.utils.garbage",
    "encodings.ascii",
    "encodings.idna",
    "msgpack",
    "psutil",
    "torch",
    "blockflow.engine.registry",
    "blockflow.engine.echo",
    "blockflow.engine.exported",
    "blockflow.engine.torchscript",
    "blockflow.worker.main",
    "blockflow.worker.rehearsal",
    "blockflow.dispatcher.main",
)

LOADER_MODULES: Mapping[str, tuple[str, ...]] = {
    # What torch.export.load and the first run of what it has loaded import lazily, too.
    TORCH_EXPORT: (
        "torch.export",
        "torch.export._trace",
        "torch.export._unlift",
        "torch.export.pt2_archive._package",
        "torch.utils.serialization.config",
        "torch._export.serde.serialize",
        "torch._export.db.logging",
        "torch._export.passes.add_runtime_assertions_for_constraints_pass",
        "torch._functorch.aot_autograd",
        "torch._functorch.partitioners",
        "torch._functorch._activation_checkpointing.ac_logging_utils",
        "torch._dynamo.precompile_context",
        "torch._inductor.sizevars",
        "torch.fx.experimental.validator",
        "networkx",
        "sympy.combinatorics.tensor_can",
        "sympy.tensor.tensor",
    ),
    "onnxruntime": ("blockflow.engine.onnx_runtime",),
    "openvino": ("blockflow.engine.open_vino",),
}
"""What blocks are loaded with (engines, and what an engine may need beside itself) -> modules. What
is not named here is imported by each worker itself."""

REHEARSAL = "blockflow.worker.rehearsal:rehearse"
"""What the template may do once on behalf of its workers; takes ``{"repository": folder}``."""

_NEVER = 1 << 20


def modules_of(loaders: Iterable[str]) -> tuple[str, ...]:
    """What workers with these loaders import beside :data:`BASE_MODULES`."""
    return tuple(m for e in sorted(set(loaders)) for m in LOADER_MODULES.get(e, ()))


class Imports:
    """What templates, one after the other, are told to import. Pure.

    Args:
        first: what the first one imports at its start.
    """

    TRIES = 2
    """Modules that so many templates have died on are left to the workers."""

    def __init__(self, first: Iterable[str]) -> None:
        self.done = list(first)
        """What the next template imports at its start: its predecessors have survived that."""
        self._begun: Counter[str] = Counter()
        self._serial = 0
        self._now: list[str] = []

    @property
    def under_way(self) -> bool:
        return bool(self._now)

    def begin(self, serial: int, modules: Iterable[str]) -> list[str]:
        """Which of ``modules`` the template is to import now, as order ``serial``."""
        self._now = [m for m in modules if m not in self.done and self._begun[m] < self.TRIES]
        self._begun.update(self._now)
        self._serial = serial
        return self._now

    def end(self, serial: int) -> None:
        """It says that it is done with order ``serial``."""
        if serial == self._serial:  # else it was an answer to a launcher that has died
            self.done += self._now
            self._now = []

    def died(self) -> list[str]:
        """It has died: on these, perhaps."""
        suspects, self._now = self._now, []
        return suspects


@contextmanager
def few_collections() -> Iterator[None]:
    """For much that is made and stays, as by imports: what is old is not looked at again meanwhile.

    That would take a twentieth of torch's import. What is young is collected as ever: its holes
    would lie everywhere in the pages that the template's children share, and these write there.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def preload(modules: Iterable[str]) -> None:
    """Import what workers will need. A missing one is left to the worker that needs it."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
