"""Fits: the dims of a block's output for the inputs that it is given. Pure."""

from __future__ import annotations

from collections.abc import Hashable

from blockflow.core.model import Contract

_SHAPES_KEPT = 1024


class Fits:
    """A contract that remembers: the same few shapes come again and again, each to be checked
    between two forwards.

    Args:
        contract: of the block.
        where: names the block in errors.
    """

    __slots__ = ("_contract", "_known", "_where")

    def __init__(self, contract: Contract, where: str) -> None:
        self._contract = contract
        self._where = where
        self._known: dict[tuple[Hashable, tuple[int, ...]], tuple[int, ...]] = {}

    def output_dims(self, dtype: Hashable, dims: tuple[int, ...]) -> tuple[int, ...]:
        """Dims of the output for an input.

        Args:
            dtype: of the input: its name, or torch's object, whose text has the name.
            dims: of the input.

        Raises:
            RequestError: CONTRACT_MISMATCH or EMPTY_INPUT: the block does not take this input.
        """
        key = dtype, dims
        found = self._known.get(key)
        if found is None:
            name = str(dtype).removeprefix("torch.")
            contract = self._contract
            found = contract.output_dims(contract.input.bind(name, dims, where=self._where))
            if len(self._known) >= _SHAPES_KEPT:
                self._known.clear()
            self._known[key] = found
        return found
