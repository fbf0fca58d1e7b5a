"""The promise that most tests of padding are about, and the tensors that it is made for."""

from __future__ import annotations

from blockflow.core.model import Padding, TensorSpec

VECTORS = TensorSpec("float32", ("rows", "length", 2), {"length": (1, 16)})
LENGTH = Padding("length")
