"""What inputs a block takes, remembered."""

from __future__ import annotations

import pytest

from blockflow.core import fits
from blockflow.core.errors import RequestError
from blockflow.core.fits import Fits
from blockflow.core.model import Contract, TensorSpec

CONTRACT = Contract(TensorSpec("float32", ("rows", 2)), TensorSpec("float32", ("rows", 3)))


class Float32:
    """As torch writes its dtypes."""

    def __str__(self) -> str:
        return "torch.float32"


def test_an_input_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[int, ...]] = []
    bind = TensorSpec.bind

    def noted(spec: TensorSpec, dtype: str, dims: tuple[int, ...], *, where: str) -> dict[str, int]:
        checked.append(dims)
        return bind(spec, dtype, dims, where=where)

    monkeypatch.setattr(TensorSpec, "bind", noted)
    known = Fits(CONTRACT, "b")
    dtype = Float32()
    for _ in range(3):
        assert known.output_dims(dtype, (4, 2)) == (4, 3)
    assert known.output_dims("float32", (4, 2)) == (4, 3)
    assert checked == [(4, 2), (4, 2)]


def test_what_does_not_fit_is_refused_every_time_and_names_the_block() -> None:
    known = Fits(CONTRACT, "b")
    known.output_dims("float32", (4, 2))
    for _ in range(2):
        for dtype, dims, code in (
            ("int64", (4, 2), "CONTRACT_MISMATCH"),
            ("float32", (4, 3), "CONTRACT_MISMATCH"),
            ("float32", (0, 2), "EMPTY_INPUT"),
        ):
            with pytest.raises(RequestError, match="got") as caught:
                known.output_dims(dtype, dims)
            assert (caught.value.code, caught.value.where) == (code, "b")


def test_shapes_without_end_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "_SHAPES_KEPT", 2)
    known = Fits(CONTRACT, "b")
    for n in range(1, 6):
        assert known.output_dims("float32", (n, 2)) == (n, 3)
        assert len(known._known) <= 2
