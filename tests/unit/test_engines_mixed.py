"""What becomes of a graph whose weights were lowered: as little as possible."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from blockflow.engine.lean import lean
from blockflow.engine.mixed import fit, widened

aten = torch.ops.aten
LOW = torch.bfloat16


class Says(nn.Module):
    """A model of one function, with a layer to use."""

    def __init__(self, function: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer, x)


def graph(function: Callable[[nn.Linear, Tensor], Tensor]) -> fx.GraphModule:
    torch.manual_seed(0)
    program = torch.export.export(Says(function).eval(), (torch.randn(3, 8),))
    made = lean(program.module(check_guards=False))
    assert isinstance(made, fx.GraphModule)
    return made._apply(lambda t: t.to(LOW) if t.is_floating_point() else t)


def targets(module: fx.GraphModule) -> list[object]:
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


@torch.no_grad()
def fitted(module: fx.GraphModule) -> int:
    changed = fit(module, torch.randn(3, 8).to(LOW), LOW)
    module(torch.randn(3, 8).to(LOW))
    return changed


@pytest.mark.parametrize(
    "function",
    [
        lambda layer, x: layer(x).relu_() + x,
        lambda layer, x: layer(x).float().softmax(-1) * x,  # this promotes
        lambda layer, x: functional.layer_norm(layer(x), (8,), layer.bias).float().square(),
        lambda layer, x: (x > 0).float() @ torch.arange(8.0),  # one dtype, whatever it is
    ],
)
def test_a_graph_that_computes_is_left_alone(
    function: Callable[[nn.Linear, Tensor], Tensor],
) -> None:
    module = graph(function)
    before, nodes, code = copy.deepcopy(module), list(module.graph.nodes), module.code
    assert fitted(module) == 0
    assert list(module.graph.nodes) == nodes and module.code == code
    assert torch.equal(module(torch.ones(3, 8, dtype=LOW)), before(torch.ones(3, 8, dtype=LOW)))


def test_a_value_is_converted_once_for_all_who_need_it() -> None:
    module = graph(lambda layer, x: layer(y := x.float().square()) + layer(y) + layer(y) + y)
    assert fitted(module) == 3
    assert targets(module).count(aten._to_copy.default) == 1
    y = module(torch.ones(1, 8, dtype=LOW))
    assert y.dtype == torch.float32  # the last sum promotes, as it would without


def test_but_not_what_was_written_since() -> None:
    def function(layer: nn.Linear, x: Tensor) -> Tensor:
        y = x.float() * 1
        first = layer(y)
        y.mul_(2)
        return first + layer(y)

    module = graph(function)
    assert fitted(module) == 2
    assert targets(module).count(aten._to_copy.default) == 2
    torch.manual_seed(0)
    wanted, x = Says(function), torch.randn(3, 8)
    torch.testing.assert_close(module(x.to(LOW)).float(), wanted(x), rtol=0.05, atol=0.05)


def test_what_is_written_keeps_its_dtype() -> None:
    def function(layer: nn.Linear, x: Tensor) -> Tensor:
        whole = torch.zeros(3, 8)
        whole.index_copy_(1, torch.arange(8), layer(x))
        return whole

    module = graph(function)
    assert fitted(module) == 1
    assert module(torch.ones(3, 8, dtype=LOW)).dtype == torch.float32


def test_a_mask_of_the_least_number_masks_all_without_nan() -> None:
    def function(layer: nn.Linear, x: Tensor) -> Tensor:
        mask = torch.full((3, 3), torch.finfo(torch.float32).min)
        q = (layer(x) * torch.arange(8.0))[None, None]
        return functional.scaled_dot_product_attention(q, q, layer(x)[None, None], attn_mask=mask)

    module = graph(function)
    assert fitted(module) == 1
    assert module(torch.randn(3, 8).to(LOW)).isfinite().all()


def test_what_no_conversion_helps_is_raised() -> None:
    module = graph(lambda layer, x: torch.special.zeta(layer(x).abs() + 2, x.abs() + 1))
    code = module.code
    with pytest.raises(NotImplementedError, match="zeta"):
        fitted(module)
    assert module.code == code


class Rotary(nn.Module):
    """Two stored tensors that go into float32, one that also goes elsewhere, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        for name in ("speed", "also", "both"):
            self.register_buffer(name, torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.both  # torch.export makes of later uses some of what it was converted to
        angles = self.speed[None, :].expand(3, 8).float() * torch.arange(8.0)
        exact = self.also.to(torch.float32) + self.both.float()
        return self.layer(x * angles.cos() + exact)


def test_what_is_converted_to_float32_only_is_not_rounded_before() -> None:
    model = Rotary().eval()
    program = torch.export.export(model, (torch.randn(3, 8),))
    module = lean(program.module(check_guards=False))
    assert isinstance(module, fx.GraphModule)
    exact = widened(module)
    found = [t for _, t in module.named_buffers() if id(t) in exact]
    assert len(found) == len(exact) == 2
    for name in ("speed", "also"):
        assert any(torch.equal(t, getattr(model, name)) for t in found)
