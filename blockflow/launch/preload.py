"""What the template imports so that a worker finds it: names only, nothing is imported here.

Beside the obvious, these are modules that ``torch.export.load`` and the first run of a loaded
program import lazily; they cost a fresh process about two seconds. A name that another release of a
package does not have is skipped by the template, and a test compares this list with what a load
really imports.
"""

from __future__ import annotations

WORKER_MODULES: tuple[str, ...] = (
    "numpy",
    "zmq",
    "msgpack",
    "psutil",
    "torch",
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
    "blockflow.engine.registry",
    "blockflow.engine.echo",
    "blockflow.engine.exported",
    "blockflow.engine.program",
    "blockflow.engine.torchscript",
    "blockflow.engine.onnx_runtime",
    "blockflow.engine.open_vino",
    "blockflow.worker.main",
    "blockflow.worker.rehearsal",
    "blockflow.dispatcher.main",
)

REHEARSAL = "blockflow.worker.rehearsal:rehearse"
"""What the template may do once on behalf of its workers; takes ``{"repository": folder}``."""
