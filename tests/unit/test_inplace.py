"""Which graphs may write into their input: none that does is missed, no served model accused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Dict, List, Optional  # noqa: UP035  # TorchScript reads these

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.inplace import _arguments, _written, exported_may_write, script_may_write
from blockflow.core.model import TensorSpec
from blockflow.repository.artifact import export_program
from blockflow.repository.probe import example_input, probe_bindings
from blockflow.repository.sources import LoadedModel, load_model
from blockflow.repository.zoo.resnet import Bottleneck, ResNet


def high(x: Tensor) -> bool:
    return bool((x > 5).any())


class Directly(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if high(x):
            x.mul_(0.5)
        return x * 2


class ByAView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.view(-1)
        if high(x):
            y.mul_(0.5)
        return x * 2


class BySchemasThatDoNotTell(nn.Module):
    """einsum returns its input here; torch's alias analysis takes it for new memory."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("ij->ij", x)
        if high(x):
            y.mul_(0.5)
        return y


class ByAnIndex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if high(x):
            x[:, 0] = 1.0
        return x * 2


class AsTheOutput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if high(x):
            torch.mul(x, 0.5, out=x)
        return x * 2


class InAList(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        kept: List[Tensor] = []  # noqa: UP006
        kept.append(x)
        if high(x):
            kept[0].mul_(0.5)
        return x * 2


class InADict(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        kept: Dict[str, Tensor] = {"a": x}  # noqa: UP006
        if high(x):
            kept["a"].mul_(0.5)
        return x * 2


class InTheNextRound(nn.Module):
    """What is written in the first round is the block's own."""

    def forward(self, x: Tensor) -> Tensor:
        y = z = x * 1
        for _ in range(3):
            y.mul_(0.5)
            z = z + y
            y = x
        return z


class WithoutARound(nn.Module):
    """What a round would make is the block's own."""

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for _ in range(int(x.min())):
            y = y + 1
        return y.mul_(0.5)


class ByAMethod(nn.Module):
    def raised(self, x: Tensor) -> Tensor:
        return x.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.raised(x) if high(x) else x * 2


class IfThereIsOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Optional[Tensor] = None  # noqa: UP045
        if high(x):
            y = x
        if y is not None:
            y.mul_(0.5)
        return x * 2


class InItsState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        if high(x):
            self.kept.mul_(0.5)
        return x * 2


class AsStatistics(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.batch_norm(x * 1, None, None, x[0], x[0], True, 0.1, 1e-5, False)


class OwnOnly(nn.Module):
    """A residual block, and everything else that only looks like a write into the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm(self.layer(x)))
        y += x
        left, right = torch.chunk(self.relu(y), 2, 1)
        sizes = [x.shape[0]]
        sizes.append(2)
        zeros = torch.zeros(sizes)
        for _ in range(2):
            zeros[:, 0] = 1.0
        return left.add_(right) + zeros


class Cloned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, x.clone()])
        if high(x):
            x.mul_(0.5)
        return x * 2


WRITE = [
    Directly,
    ByAView,
    BySchemasThatDoNotTell,
    ByAnIndex,
    AsTheOutput,
    InAList,
    InADict,
    InTheNextRound,
    WithoutARound,
    ByAMethod,
    IfThereIsOne,
    InItsState,
    AsStatistics,
]


@pytest.mark.parametrize("block", WRITE)
def test_a_script_that_may_write_is_found(block: type[nn.Module]) -> None:
    made = torch.jit.script(block().eval())
    assert script_may_write(made.inlined_graph)
    assert script_may_write(torch.jit.freeze(made).graph)


@pytest.mark.parametrize("block", [OwnOnly, Cloned])
def test_a_script_that_writes_what_is_its_own_is_not_accused(block: type[nn.Module]) -> None:
    made = torch.jit.script(block().eval())
    assert not script_may_write(made.inlined_graph)
    assert not script_may_write(torch.jit.freeze(made).graph)


def exported(block: nn.Module) -> torch.fx.GraphModule:
    with torch.no_grad():
        program = torch.export.export(block.eval(), (torch.ones(2, 4),), strict=False)
    return program.module(check_guards=False)


class Branches(nn.Module):
    """torch.cond, one of whose branches writes what it is given, or a product of it."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        def some(x: Tensor) -> Tensor:
            x.mul_(0.5)
            return x + 1

        return torch.cond((x > 5).any(), some, lambda x: x * 2, (x.clone() if self.own else x,))


class Loops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            x.mul_(0.5)
            return i + 1, x + 1

        start = torch.zeros((), dtype=torch.int64)
        return torch.while_loop(lambda i, x: i < 3, body, (start, x))[1]


class Chooses(nn.Module):
    """A branch that writes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond((x > 5).any(), lambda x: x + 1, lambda x: x * 2, (x,))


@torch.library.custom_op("blockflow_test::halve_high", mutates_args=("x",))
def halve_high(x: Tensor) -> None:
    if high(x):
        x.mul_(0.5)


class Foreign(nn.Module):
    """An operator of somebody's own, whose schema says that it writes."""

    def forward(self, x: Tensor) -> Tensor:
        torch.ops.blockflow_test.halve_high(x)
        return x * 2


class Plainly(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.relu_(x.view(-1))
        return x + 1


@pytest.mark.parametrize("block", [Branches(False), Loops(), Foreign(), Plainly(), AsStatistics()])
def test_a_program_that_may_write_is_found(block: nn.Module) -> None:
    assert exported_may_write(exported(block))


@pytest.mark.parametrize("block", [Branches(True), Chooses(), OwnOnly()])
def test_a_program_that_writes_what_is_its_own_is_not_accused(block: nn.Module) -> None:
    assert not exported_may_write(exported(block))


class Shifts(nn.Module):
    """As decoders do it with their tokens: what is written is of the input's sizes alone."""

    def forward(self, x: Tensor) -> Tensor:
        moved = x.new_zeros(x.shape)
        moved[:, 1:] = x[:, :-1]
        return moved


def test_sizes_of_the_input_are_not_its_memory() -> None:
    spec = TensorSpec("float32", ("rows", 4))
    program = export_program(Shifts().eval(), spec, torch.ones(2, 4))
    assert not exported_may_write(program.graph_module, "x")


def bottlenecks() -> LoadedModel:
    """Every kind of step that the deeper ResNets have: in a stage of theirs only the first block
    has a way around, and further ones are as the second."""
    spec = TensorSpec("float32", ("rows", 3, 32, 32))
    return LoadedModel(ResNet(Bottleneck, (2, 1, 1, 1), 10, 8).eval(), "bottlenecks", spec)


def zoo(name: str, **sizes: int) -> LoadedModel:
    return load_model(name, seed=0, arguments=sizes)


@pytest.mark.parametrize(
    "model",
    [
        bottlenecks,
        partial(zoo, "digits"),
        partial(zoo, "transformer", layers=1),
        partial(zoo, "transformer-tokens", layers=1),
    ],
    ids=["resnet", "digits", "transformer", "transformer-tokens"],
)
def test_models_as_they_are_served_are_not_accused(model: Callable[[], LoadedModel]) -> None:
    """They write intermediate results in place: a copy of their input would be for nothing."""
    loaded = model()
    x = example_input(loaded.input, probe_bindings(loaded.input)[0], int_below=loaded.int_below)
    with torch.no_grad():
        traced = torch.jit.trace(loaded.module, x, check_trace=False)  # as they are exported
        for made in (torch.jit.script(loaded.module), traced):
            assert not script_may_write(made.inlined_graph)
            assert not script_may_write(torch.jit.freeze(made).graph)
        program = torch.export.export(loaded.module, (x,), strict=False)
        (source,) = program.graph_signature.user_inputs
        assert not exported_may_write(program.graph_module, str(source))
        assert not exported_may_write(program.module(check_guards=False))


def test_the_arguments_of_a_schema_are_told_apart() -> None:
    """Also where they have commas and brackets of their own."""
    own = "Tensor(a!) self, int[2] stride=[1, 1], *, Dict(str, Tensor)? more=None, Tensor[](b!) out"
    for schema in (f"aten::f({own}) -> (Tensor(a!), Tensor)", f"aten::f.x({own}) -> ()"):
        assert _arguments(schema) == [
            "Tensor(a!) self",
            "int[2] stride=[1, 1]",
            "*",
            "Dict(str, Tensor)? more=None",
            "Tensor[](b!) out",
        ]
    values = ["self", "stride", "more", "out"]
    assert _written("aten::f", f"aten::f({own}) -> ()", values) == ["self", "out"]
    assert _written("aten::g", "aten::g(str text='!', ...) -> ()", values) == []
