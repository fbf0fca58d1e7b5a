"""Sharing of weights: a module computes the same on memory that others have, or stays as it was."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, fx, nn

from blockflow.engine import sharing
from blockflow.engine.sharing import share


class Store:
    """In this process; ``spoil`` changes what the first one has put there."""

    def __init__(self) -> None:
        self.memory: dict[str, bytearray] = {}
        self.asked: list[tuple[str, int]] = []

    def hold(
        self, key: str, nbytes: int, pieces: Sequence[tuple[int, memoryview]]
    ) -> bytearray | None:
        self.asked.append((key, nbytes))
        if key not in self.memory:
            self.memory[key] = bytearray(nbytes)
            for offset, piece in pieces:
                self.memory[key][offset : offset + len(piece)] = piece
        return self.memory[key]


class Full(Store):
    def hold(
        self, key: str, nbytes: int, pieces: Sequence[tuple[int, memoryview]]
    ) -> bytearray | None:
        return None


class Mixed(nn.Module):
    """Tensors of several dtypes, layouts and sizes; two share memory, one is a part of another."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        whole = torch.randn(6, 8)
        for name, tensor in {
            "weight": whole,
            "tied": whole.view(6, 8),
            "row": whole[3],
            "turned": torch.randn(8, 4).t(),
            "conv": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            "odd": torch.arange(3, dtype=torch.int8),
            "lower": torch.randn(5).to(torch.bfloat16),
            "scale": torch.tensor(2.5, dtype=torch.float64),
            "nothing": torch.empty(0),
            "nan": torch.tensor([float("nan"), -0.0]),
        }.items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.t() @ self.tied + self.row  # type: ignore[operator]
        z = (self.turned @ y.t()).t()  # type: ignore[operator]
        return (
            z * self.scale
            + self.odd.sum()
            + self.lower.float().sum()
            + self.conv.sum()
            + self.nan[1]
            + self.nothing.sum()
        )  # type: ignore[operator, union-attr, index]


class Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # nothing is computed while tracing


def traced(seed: int = 0) -> fx.GraphModule:
    module = Mixed(seed)
    return fx.GraphModule(module, Tracer().trace(module))


def bits(tensor: Tensor) -> Tensor:
    """NaN is not equal to itself, and 0 is to -0: bytes are told apart."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "LEAST_BYTES", 1)


def lies_in(tensor: Tensor, memory: bytearray) -> bool:
    begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    return begin <= tensor.data_ptr() < begin + len(memory)


def test_everything_is_the_same_but_where_it_lies() -> None:
    x = torch.randn(3, 8)
    plain, module, store = traced(), traced(), Store()
    nbytes = share(module, store, "key")
    assert store.asked == [("key", nbytes)] and nbytes == len(store.memory["key"])
    assert torch.equal(module(x), plain(x))
    was, now = dict(plain.named_buffers()), dict(module.named_buffers(remove_duplicate=False))
    for name, tensor in was.items():
        other = now[name]
        assert (other.dtype, other.shape, other.stride()) == (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        )
        assert torch.equal(bits(other), bits(tensor))
        assert lies_in(other, store.memory["key"]) == bool(tensor.numel()), name
    assert now["tied"].data_ptr() == now["weight"].data_ptr()
    assert now["row"].data_ptr() == now["weight"][3].data_ptr()


def test_each_is_there_once_and_aligned() -> None:
    module, store = traced(), Store()
    share(module, store, "key")
    assert len(store.memory["key"]) == sum(-(-n // 64) * 64 for n in (192, 128, 384, 3, 10, 8, 8))
    for name, tensor in module.named_buffers():
        if tensor.numel() and name != "row":
            assert tensor.data_ptr() % 16 == 0


def test_the_second_one_lies_with_the_first() -> None:
    first, second, store = traced(), traced(), Store()
    assert share(first, store, "key") == share(second, store, "key") > 0
    pairs = zip(first.named_buffers(), second.named_buffers(), strict=True)
    for (name, one), (_, other) in pairs:
        assert not one.numel() or lies_in(one, store.memory["key"])
        assert one.data_ptr() == other.data_ptr(), name


@pytest.mark.parametrize("at", [0, -60])
def test_what_differs_in_one_byte_is_not_taken(at: int, caplog: pytest.LogCaptureFixture) -> None:
    store, module, x = Store(), traced(), torch.randn(2, 8)
    share(traced(), store, "key")
    used = [i for i, b in enumerate(store.memory["key"]) if b]
    store.memory["key"][used[at]] ^= 1
    before = {name: t.data_ptr() for name, t in module.named_buffers()}
    assert share(module, store, "key") == 0
    assert {name: t.data_ptr() for name, t in module.named_buffers()} == before
    assert torch.equal(module(x), traced()(x))
    assert "private" in caplog.text and "key" in caplog.text


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 19])
def test_every_byte_is_compared(count: int) -> None:
    one = torch.arange(count, dtype=torch.uint8)
    assert sharing._same(one, one.clone())
    for i in range(count):
        other = one.clone()
        other[i] += 1
        assert not sharing._same(one, other) and not sharing._same(other, one)


def test_another_models_weights_are_not_taken() -> None:
    store, other = Store(), traced(1)
    share(traced(0), store, "key")
    assert share(other, store, "key") == 0
    assert not lies_in(other.weight, store.memory["key"])


def test_without_memory_nothing_changes() -> None:
    module = traced()
    assert share(module, Full(), "key") == 0
    assert torch.equal(module(torch.ones(1, 8)), traced()(torch.ones(1, 8)))


def test_little_is_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    nbytes = share(traced(), store, "a")
    monkeypatch.setattr(sharing, "LEAST_BYTES", nbytes)
    assert share(traced(), store, "b") == nbytes
    monkeypatch.setattr(sharing, "LEAST_BYTES", nbytes + 1)
    assert share(traced(), store, "c") == 0
    assert [key for key, _ in store.asked] == ["a", "b"]


def test_a_module_without_a_graph_stays_as_it_is() -> None:
    store = Store()
    assert share(Mixed(), store, "key") == 0 and not store.asked


def test_one_without_weights_asks_for_nothing() -> None:
    store = Store()
    assert share(fx.symbolic_trace(nn.ReLU()), store, "key") == 0 and not store.asked
