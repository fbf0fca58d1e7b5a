"""Splitting: where a model may be cut, why it may not, and that the parts make the whole."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.errors import ExportError
from blockflow.repository.balance import split_evenly
from blockflow.repository.spec_text import parse_spec
from blockflow.repository.split import ancestors, split_model
from blockflow.repository.trace import trace
from blockflow.repository.unfold import unfold

ROWS = (torch.randn(2, 4), torch.randn(5, 4))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x)) + x


class Model(nn.Module):
    """a -> body (b, c with a skip) -> shared parameter -> d"""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.body = nn.Sequential(nn.Linear(4, 4), Residual())
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.d = nn.Linear(4, 3)
        self.unused = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.a(x * self.scale))
        return self.d(self.body(x) * self.scale)


def chain(stages: list, x: Tensor) -> Tensor:
    for stage in stages:
        x = stage(x)
    return x


def refused(model: nn.Module, cuts: list[str], examples: tuple = ROWS) -> ExportError:
    with pytest.raises(ExportError) as e:
        split_model(model.eval(), cuts, examples)
    assert e.value.code == "NOT_SPLITTABLE"
    return e.value


@pytest.mark.parametrize(
    "cuts", [["body"], ["d"], ["body", "d"], ["body.1"], ["body.1", "d"], ["relu", "body.1", "d"]]
)
def test_the_stages_in_a_row_are_the_model(cuts: list[str]) -> None:
    model = Model().eval()
    stages = split_model(model, cuts, ROWS)
    assert len(stages) == len(cuts) + 1
    for rows in (1, 3, 8):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(chain(stages, x.clone()), model(x.clone()))


def test_each_stage_holds_only_its_own_weights() -> None:
    first, second = split_model(Model().eval(), ["d"], ROWS)
    assert {n.split(".")[0] for n, _ in first.named_parameters()} == {"a", "body", "scale"}
    assert {n.split(".")[0] for n, _ in second.named_parameters()} == {"d", "scale"} - {"scale"}


def test_a_skip_connection_across_the_cut() -> None:
    error = refused(Model(), ["body.1.outer"])
    assert len(error.details["crossing"]) == 2
    assert "cross the cut before 'body.1.outer'" in error.message


def test_what_alone_crosses_is_found_for_all_positions_at_once() -> None:
    class Sized(Model):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y.reshape(x.size(0), 3) + y

    for model in (Model(), Sized()):
        traced = trace(model.eval(), ancestors(["body.1.inner"]), ROWS)
        found = traced.sole_crossings()
        assert len(found) == len(traced.nodes) and None in found[1:-1]
        for position, node in enumerate(found):
            crossing = traced.crossing_data(position)
            assert node is (crossing[0] if len(crossing) == 1 else None)


def test_names_that_do_not_exist() -> None:
    assert "no submodule 'layer9'" in refused(Model(), ["layer9"]).message
    assert "no submodule ''" in refused(Model(), [""]).message


def test_a_name_that_another_begins_with() -> None:
    class Tenth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a10, self.a1 = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a1(self.a10(x))

    first, _ = split_model(Tenth().eval(), ["a1"], ROWS)
    assert [name for name, _ in first.named_children()] == ["a10"]


def test_cuts_out_of_order_or_twice() -> None:
    assert "does not run after" in refused(Model(), ["d", "body"]).message
    assert "does not run after" in refused(Model(), ["d", "d"]).message


def test_a_module_that_is_never_called() -> None:
    assert "never calls" in refused(Model(), ["unused"]).message


def test_a_first_block_that_would_be_empty() -> None:
    assert "nothing runs before" in refused(Model(), ["a"]).message
    assert "nothing runs before" in refused(Drops(), ["b"]).message


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.fc(x) + y


class Optional_(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 2.0) -> Tensor:
        if mask is not None:
            x = x * mask
        return self.b(self.a(x) * scale)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x) if x.sum() > 0 else x


class Dict_(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.a(x)
        return {"a": x, "b": self.b(x)}


class ByName(TwoInputs):
    def forward(self, *, x: Tensor) -> Tensor:
        return self.fc(x)


@pytest.mark.parametrize(
    ("model", "why", "helps"),
    [
        (TwoInputs, "forward takes 2 inputs (x, y)", "parts of it (x[:, :8]"),
        (ByName, "takes its input by name alone (x)", "calls it with x=x"),
    ],
)
def test_other_than_one_input(model: type[nn.Module], why: str, helps: str) -> None:
    error = refused(model(), ["fc"])
    assert why in error.message and helps in error.hint


def test_optional_inputs_keep_their_defaults() -> None:
    model = Optional_().eval()
    x = torch.randn(3, 4)
    torch.testing.assert_close(chain(split_model(model, ["b"], ROWS), x), model(x))


def test_control_flow_on_tensors() -> None:
    error = refused(Branching(), ["b"])
    assert "cannot be traced" in error.message and error.hint


class Autocast(nn.Module):
    """``a`` computes in bfloat16, as its caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.a(x)
        return self.b(y.float())


def test_what_computes_under_autocast_stays_so() -> None:
    model = Autocast().eval().requires_grad_(False)
    assert "torch.autocast" in refused(model, ["b"]).message
    operators = partial(unfold, model, parse_spec("float32[rows,4]"), ROWS)
    stages = split_model(model, ["b"], ROWS, operators)
    assert torch.equal(chain(stages, ROWS[1]), model(ROWS[1]))


def test_several_outputs() -> None:
    error = refused(Dict_(), ["b"])
    assert "returns a dict" in error.message and "--block" in error.hint


class Sizes(nn.Module):
    """Rows and length are read at the start and used behind the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows, length = x.size(0), x.shape[1]
        x = self.a(x)
        return self.b(x).view(rows, length * 2, 2)


def test_sizes_that_cross_a_cut_are_read_anew() -> None:
    model = Sizes().eval()
    for as_many in (7, 2):  # as the rows: one example does not tell the two apart
        stages = split_model(model, ["b"], (torch.randn(2, as_many, 4), torch.randn(5, 13, 4)))
        for rows, length in ((1, 1), (3, 9)):
            x = torch.randn(rows, length, 4)
            torch.testing.assert_close(chain(stages, x), model(x))


class Lost(nn.Module):
    """The length is summed away before the cut, and needed after it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        return self.b(self.a(x).sum(1)) / length


def test_a_size_that_is_lost_before_the_cut() -> None:
    error = refused(Lost(), ["b"], (torch.randn(2, 7, 4), torch.randn(5, 13, 4)))
    assert "7 of an input [2, 7, 4], where [2, 4] crosses" in error.message


@pytest.mark.parametrize("before", [True, False])
def test_hooks_of_the_whole_model_are_left_to_torch_export(before: bool) -> None:
    model = Model().eval()
    if before:
        model.register_forward_pre_hook(lambda _, given: (given[0] + 1,))
    else:
        model.register_forward_hook(lambda _, given, result: result * 2)
    error = refused(model, ["d"], ROWS)
    assert "hooks" in error.message
    stages = split_model(
        model, ["d"], ROWS, lambda: unfold(model, parse_spec("float32[rows,4]"), ROWS)
    )
    x = torch.randn(3, 4)
    torch.testing.assert_close(chain(stages, x.clone()), model(x.clone()))


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_even_parts_make_the_model(parts: int) -> None:
    model = Model().eval()
    stages = split_evenly(model, parts, ROWS, torch.randn(1, 4))
    assert len(stages) == parts
    x = torch.randn(3, 4)
    torch.testing.assert_close(chain(stages, x.clone()), model(x.clone()))


def test_what_cannot_be_traced_inside_keeps_nothing_else_closed() -> None:
    def layers() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x if x.sum() > 0 else -x)

    model = nn.Sequential(layers(), Branches()).eval()
    examples = (torch.randn(2, 64), torch.randn(5, 64))
    x = torch.randn(1, 64)
    stages = split_evenly(model, 4, examples, x)
    assert len(stages) == 4
    torch.testing.assert_close(chain(stages, x), model(x))
    with pytest.raises(ExportError, match="the model has 4 legal ones"):
        split_evenly(model, 6, examples, x)


class Masks(nn.Module):
    """Between two calls it looks at what the first gave: two tensors stand before the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(x))
        there = (y > 0).float()
        y = self.b(y) * there
        return self.c(y + y.mean(1, keepdim=True))


def test_what_a_forward_does_between_two_calls_lies_behind_the_cut_if_it_must() -> None:
    model = Masks().eval()
    x = torch.randn(3, 4)
    for cuts in (["b"], ["c"], ["b", "c"]):
        torch.testing.assert_close(chain(split_model(model, cuts, ROWS), x), model(x))
    first, _ = split_model(model, ["b"], ROWS)
    assert (first(x) >= 0).all()  # as late as it can be: behind the relu
    _, last = split_model(model, ["c"], ROWS)
    assert [n.op for n in last.graph.nodes] == ["placeholder", "call_module", "output"]
    torch.testing.assert_close(chain(split_evenly(model, 3, ROWS, x), x), model(x))


class Drops(nn.Module):
    """Of what runs first nothing is used: what crosses is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.a(x)
        return self.b(x)


class Pairs(nn.Module):
    """A pair crosses behind the second."""

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, -x

    class One(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0] + pair[1]

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), self.Two(), self.One()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


class Spectrum(nn.Module):
    """What the second gives is complex."""

    class Fft(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft(x)

    class Abs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.abs()

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Sequential(nn.Linear(4, 4), self.Fft(), self.Abs(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.all(x)


@pytest.mark.parametrize(("model", "places"), [(Model, 4), (Drops, 0), (Pairs, 1), (Spectrum, 2)])
def test_more_parts_than_places(model: type[nn.Module], places: int) -> None:
    with pytest.raises(ExportError, match=f"the model has {places} legal ones") as e:
        split_evenly(model().eval(), 20, ROWS, torch.randn(1, 4))
    assert ("export it whole" in e.value.hint) is (places == 0)
    with pytest.raises(ExportError, match="at least one"):
        split_evenly(Model().eval(), 0, ROWS, torch.randn(1, 4))
