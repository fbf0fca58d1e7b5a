"""The dims of a block's output, whatever the input's ranges, are found by running."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from blockflow.core.dims import Dim, size_of
from blockflow.core.errors import ExportError
from blockflow.core.model import ROWS, TensorSpec
from blockflow.repository.causes import GUARD, cause
from blockflow.repository.export import export_model
from blockflow.repository.formulas import output_dims
from blockflow.repository.probe import example_input, infer_spec, probe_bindings
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from blockflow.repository.split import split_model
from tests.export_rig import refused


class Does(nn.Module):
    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        return self.what(x)


def spec(**ranges: tuple[int, int]) -> TensorSpec:
    return TensorSpec("float32", ("rows", *ranges), {n: r for n, r in ranges.items() if r[1]})


FREE = (0, 0)
"""A dim without a range."""


@pytest.mark.parametrize(
    "given",
    [
        spec(a=(1, 4), b=(1, 4)),
        spec(a=(1, 2), b=(1, 2), c=(1, 2), d=(1, 2)),
        spec(a=(2, 5), b=(2, 5)),
        spec(a=(2, 5)),
        spec(a=(100, 900), b=(100, 900)),
        spec(a=(100, 900), b=(100, 900), c=(100, 900)),
        spec(a=(900, 901), b=(900, 901), c=(900, 901)),
        spec(a=FREE, b=FREE, c=FREE, d=FREE, e=FREE),
        spec(a=(3, 3), b=(1, 4)),
    ],
)
def test_every_order_of_the_dims_is_told_from_every_other(given: TensorSpec) -> None:
    bindings = probe_bindings(given)
    moving = [n for n in (ROWS, *given.dynamic) if given.ranges.get(n, (1, 2))[0] !=
              given.ranges.get(n, (1, 2))[1]]  # fmt: skip
    for one, other in combinations(moving, 2):
        assert [b[one] for b in bindings] != [b[other] for b in bindings]
    for one, other in combinations(moving[1:], 2):  # an image's tokens are so many in each
        assert len({b[one] * b[other] for b in bindings}) > 1
        assert len({b[one] + b[other] for b in bindings}) > 1
    for binding in bindings:
        given.bind("float32", given.resolve(binding))
    dims: tuple[Dim, ...] = (ROWS, *reversed(moving[1:]))
    tensors = [torch.empty([b[str(d)] for d in dims]) for b in bindings]
    assert infer_spec("y", given, bindings, tensors, tuple).dims == dims


def test_the_contract_of_two_dims_with_one_range(tmp_path: Path) -> None:
    repository = BlockRepository(tmp_path)
    for name, what, dims in (
        ("same", lambda x: x * 2, ("rows", "a", "b")),
        ("turned", lambda x: x.transpose(1, 2) * 2, ("rows", "b", "a")),
    ):
        for low in (1, 2):
            given = spec(a=(low, 4), b=(low, 4))
            loaded = LoadedModel(Does(what).eval(), "test", given)
            export_model(loaded, repository, names=(f"{name}{low}",))
            assert repository.info(f"{name}{low}").contract.output.dims == dims


def test_a_dim_of_one_or_two_is_dynamic() -> None:
    assert probe_bindings(spec(a=(1, 2)))[0]["a"] == 2  # 1 would be taken for a constant


@pytest.mark.parametrize(
    ("what", "odd"),
    [
        (lambda x: x.to_sparse(), "sparse_coo"),
        (lambda x: x.to("meta"), "meta"),
        (lambda x: torch.nested.nested_tensor([x[0]]), "nested"),
    ],
)
def test_tensors_that_cannot_travel(tmp_path: Path, what: Any, odd: str) -> None:
    assert odd in refused(Does(what), BlockRepository(tmp_path)).message


def test_a_size_that_only_looks_like_a_dim_is_found_by_the_verification(tmp_path: Path) -> None:
    def three_at_least(x: Tensor) -> Tensor:  # a's own size in the probing runs, and another below
        return torch.cat([x, x[:, : max(0, 3 - x.shape[1])]], 1)

    loaded = LoadedModel(Does(three_at_least).eval(), "test", spec(a=(1, 64)))
    with pytest.raises(ExportError) as e:
        export_model(loaded, BlockRepository(tmp_path), names=("m",), format="torchscript-traced")
    assert e.value.code == "EXPORT_MISMATCH"
    assert BlockRepository(tmp_path).names() == []


@pytest.mark.parametrize("format_", ["pt2", "torchscript-traced"])
@pytest.mark.parametrize(
    ("what", "ranges", "dims"),
    [
        (lambda x: x[:, : x.shape[1] // 2] * 2, {"a": (2, 64)}, ("a // 2",)),
        (lambda x: x.unfold(1, 5, 4).sum(2), {"a": (16, 600)}, ("(a - 5) // 4 + 1",)),
        (lambda x: x[:, ::32] * 2, {"a": (33, 200)}, ("(a + 31) // 32",)),
        # as an upsampling does to what a stride has left: all odd ones come back, and no even one
        (lambda x: torch.cat(2 * [x[:, ::2]], 1)[:, 1:], {"a": (3, 33)}, ("(a + 1) // 2 * 2 - 1",)),
        (lambda x: pad(x, (0, -x.shape[1] % 8)) * 2, {"a": (7, 33)}, ("a + -a % 8",)),
        (lambda x: torch.cat([x, x], 1), {"a": (1, 9)}, ("2 * a",)),
        (lambda x: x.flatten(1) * 2, {"a": (2, 9), "b": (2, 12)}, ("a * b",)),
        (lambda x: torch.cat([x.sum(2), x.sum(1)], 1), {"a": (2, 9), "b": (3, 12)}, ("a + b",)),
    ],
)
def test_dims_that_follow_from_the_input_are_formulas(
    tmp_path: Path,
    what: Callable[[Tensor], Tensor],
    ranges: dict[str, tuple[int, int]],
    dims: tuple[str, ...],
    format_: str,
) -> None:
    repository = BlockRepository(tmp_path)
    export_model(LoadedModel(Does(what).eval(), "m", spec(**ranges)), repository, format=format_,
                 prefix="m")  # fmt: skip
    contract = repository.info("m").contract
    for draw in range(20):
        sizes = {n: lo + draw * (hi - lo) // 19 for n, (lo, hi) in ranges.items()}
        x = torch.ones(2, *sizes.values())
        promised = contract.output_dims(contract.input.bind("float32", x.shape))
        assert tuple(what(x).shape) == promised
    assert [size_of(d, sizes) for d in dims] == list(promised[1:])
    assert contract.output.row_bytes() == 4 * size_of(dims[0], {n: hi for n, (_, hi) in
                                                                ranges.items()})  # fmt: skip


@pytest.mark.parametrize(("factor", "dims"), [(1.5, ("3 * a // 2", "3 * b // 2")), (0.7, None)])
def test_an_interpolation_by_a_factor(factor: float, dims: tuple[str, ...] | None) -> None:
    scales = Does(lambda x: interpolate(x[:, None], scale_factor=factor)[:, 0])
    given = spec(a=(2, 30), b=(2, 30))
    made = partial(output_dims, scales, given, torch.ones(2, 7, 11), "m")
    if dims is None:
        with pytest.raises(ExportError, match=r"input's: .*0\.7.*a.* is no formula"):
            made()
        return
    assert tuple(made()[1:]) == dims
    for a, b in ((2, 29), (9, 30)):
        promised = [size_of(d, {"a": a, "b": b}) for d in dims]
        assert [*scales(torch.ones(1, a, b)).shape[1:]] == promised


class ByItsOddSize(nn.Module):
    """What it divides by is the dim that crosses for odd lengths, and one less for even ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        size = (x.shape[1] + 1) // 2 * 2 - 1
        return self.second(self.first(x) * 2) / size


def test_a_size_that_some_lengths_have_crosses_no_cut_as_the_dim() -> None:
    model, given = ByItsOddSize().eval(), spec(a=(3, 33))
    examples = [example_input(given, b) for b in probe_bindings(given)]
    stages = split_model(model, ["second"], examples)
    for length in (8, 9):
        x = torch.ones(2, length)
        assert torch.equal(stages[1](stages[0](x)), model(x))


def test_a_branch_on_a_size_is_no_formula(tmp_path: Path) -> None:
    def branches(x: Tensor) -> Tensor:
        return x[:, : 1 if x.shape[1] < 20 else 5] * 2

    with pytest.raises(ExportError, match="cannot be derived") as e:
        export_model(
            LoadedModel(Does(branches).eval(), "m", spec(a=(1, 64))), BlockRepository(tmp_path),
            prefix="m",
        )  # fmt: skip
    assert e.value.code == "NOT_SPLITTABLE" and e.value.hint


def test_a_pad_to_a_multiple_that_the_range_begins_with() -> None:
    """Where nothing is to be padded, torch fixes the size."""
    eights = nn.Conv1d(1, 4, 8, 8)

    def patches(x: Tensor) -> Tensor:
        return eights(pad(x, (0, -(-x.shape[1] // 8) * 8 - x.shape[1])).unsqueeze(1))

    given = spec(a=(8, 40))
    x = example_input(given, probe_bindings(given)[0])
    *_, dim = output_dims(Does(patches).eval(), given, x, "m")
    assert [size_of(dim, {"a": a}) for a in (8, 9, 16)] == [1, 2, 2]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


def test_a_dim_of_torchs_own_is_no_range_to_give() -> None:
    told = f"{GUARD}\nSuggested fixes:\n  _a = Dim('_a', min=3, max=4)\n  a = 4*_a\n"
    assert cause(ValueError(told), spec(a=(9, 16))).endswith("narrow --range")


class Steps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            y = torch.tanh(y * 2 + x[:, step])
        return y


def test_what_helps_with_sizes_that_the_exporter_refuses(tmp_path: Path) -> None:
    repo = BlockRepository(tmp_path)

    def model(module: nn.Module, *dims: Dim, longest: int) -> LoadedModel:
        given = TensorSpec("float32", ("rows", *dims), {"length": (1, longest)})
        return LoadedModel(module.eval().requires_grad_(False), "m", given)

    cuts = Does(lambda x: x * 2 if x.shape[1] > 32 else x)
    with pytest.raises(ExportError, match="guard") as e:
        export_model(model(cuts, "length", longest=40), repo, prefix="cuts")
    assert e.value.hint.endswith("narrow --range; it takes --range length=1..32")
    export_model(model(cuts, "length", longest=32), repo, prefix="cuts")
    four, places = TensorSpec("float32", ("rows", 4)), torch.randn(10, 4)
    far = LoadedModel(Does(lambda x: torch.cdist(x, places)), "m", four)
    with pytest.raises(ExportError, match="guard") as e:
        export_model(far, repo, prefix="far")
    assert "compute_mode" in e.value.hint and e.value.hint.endswith("--range rows=1..25")
    assert "TORCH_LOGS" not in e.value.message and "Suggested" not in e.value.message
    few = replace(far, input=replace(four, ranges={ROWS: (1, 25)}))
    export_model(few, repo, prefix="few")
    assert repo.info("few").contract.output.ranges == {ROWS: (1, 25)}
    recurrent = model(Recurrent(), "length", 4, longest=40)
    with pytest.raises(ExportError, match="constant") as e:
        export_model(recurrent, repo, prefix="gru")
    assert "torchscript-traced" in e.value.hint
    export_model(recurrent, repo, prefix="gru", format="torchscript-traced")
    steps = model(Steps(), "length", 4, longest=40)
    for format_ in ("pt2", "torchscript-traced"):
        with pytest.raises(ExportError) as e:
            export_model(steps, repo, prefix="steps", format=format_)
        assert "torchscript-scripted" in e.value.hint
    export_model(steps, repo, prefix="steps", format="torchscript-scripted")


@pytest.mark.parametrize(
    ("what", "message", "hint"),
    [
        (torch.fft.fft, "dtype complex64 cannot travel", "view_as_real"),
        (lambda x: x.to(torch.float8_e5m2), "dtype float8_e5m2 cannot travel", "float32"),
        (lambda x: x[:, :0], "dim 1 has no elements", "output dims"),
        (lambda x: None, "the model returns None", "let its forward return a tensor"),
        (lambda x: float(x.sum()), "the model returns a float", "item()"),
        (lambda x: x.numpy(), "the model returns a ndarray", "numpy()"),
        (lambda x: (x, {"b": x}), "the model returns a tuple", "--block"),
    ],
)
def test_an_output_that_cannot_travel_is_told_what_could(
    tmp_path: Path, what: Callable[[Tensor], Tensor], message: str, hint: str
) -> None:
    model = LoadedModel(Does(what), "m", TensorSpec("float32", ("rows", 4)))
    with pytest.raises(ExportError, match=message) as e:
        export_model(model, BlockRepository(tmp_path), prefix="b")
    assert hint in e.value.hint


def test_one_number_for_all_rows_is_called_so() -> None:
    taken = spec(a=(2, 5))
    bindings = probe_bindings(taken)
    with pytest.raises(ExportError, match="a single number comes out"):
        infer_spec("h", taken, bindings, [torch.tensor(1.0) for _ in bindings], tuple)
