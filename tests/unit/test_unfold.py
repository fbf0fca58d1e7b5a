"""Models whose forward cannot be traced are cut between their operators."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import pytest
import torch
from torch import Tensor, fx, nn

from blockflow.core.errors import ExportError
from blockflow.core.model import TensorSpec
from blockflow.repository import balance
from blockflow.repository.balance import split_evenly
from blockflow.repository.export import export_model, export_tree
from blockflow.repository.probe import example_input, probe_bindings
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from blockflow.repository.split import cut_before, split_model
from blockflow.repository.traced import Traced
from blockflow.repository.unfold import unfold
from tests import export_rig
from tests.export_rig import SCRIPTED, TRACED
from tests.unfold_rig import (
    EXAMPLES,
    TOKENS,
    WIDTH,
    WORDS,
    Decoder,
    Filled,
    Flat,
    Halves,
    Heads,
    Logits,
    Padded,
    Pair,
    WrittenWithData,
)

repo = export_rig.repo


def way(model: nn.Module, spec: TensorSpec, examples: Sequence[Tensor]) -> partial[Traced]:
    return partial(unfold, model, spec, examples)


def cut(model: nn.Module, *cuts: str) -> list[fx.GraphModule]:
    return split_model(model, cuts, EXAMPLES, way(model, TOKENS, EXAMPLES))


def chain(stages: Sequence[nn.Module], x: Tensor) -> Tensor:
    for stage in stages:
        x = stage(x)
    return x


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(rows))


def same(stages: Sequence[nn.Module], model: nn.Module) -> None:
    for rows, length in ((1, 1), (3, 9), (8, 16), (2, 2)):
        x = tokens(rows, length)
        torch.testing.assert_close(chain(stages, x), model(x))


@cache
def unfolded(decoder: type[Decoder]) -> tuple[nn.Module, Traced]:
    model = Logits(decoder()).eval()
    return model, unfold(model, TOKENS, EXAMPLES)


@pytest.mark.parametrize("decoder", [Decoder, Filled])
@pytest.mark.parametrize(
    "cuts", [("model.layers.2",), ("model.layers.1", "model.layers.2", "head")]
)
@torch.no_grad()
def test_the_stages_in_a_row_are_the_model(decoder: type[Decoder], cuts: tuple[str, ...]) -> None:
    model, traced = unfolded(decoder)
    stages = split_model(model, cuts, EXAMPLES, lambda: traced)
    assert len(stages) == len(cuts) + 1
    same(stages, model)


def test_without_it_the_forward_cannot_be_traced() -> None:
    with pytest.raises(ExportError, match="cannot be traced"):
        split_model(Logits().eval(), ["model.layers.2"], EXAMPLES)


def test_each_stage_holds_only_its_own_weights() -> None:
    model, traced = unfolded(Decoder)
    first, second = split_model(model, ["model.layers.2"], EXAMPLES, lambda: traced)
    names = [{n for n, _ in stage.named_parameters()} for stage in (first, second)]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {n for n, _ in model.named_parameters()}
    assert next(first.parameters()) is next(model.parameters())  # shared, not copied


def test_a_mask_of_the_data_is_a_second_tensor() -> None:
    for decoder in (Padded, WrittenWithData):
        model = Logits(decoder()).eval()
        with pytest.raises(ExportError) as e:
            cut(model, "model.layers.2")
        assert e.value.code == "NOT_SPLITTABLE" and e.value.where == "model.layers.2"
        assert e.value.message.startswith("2 values cross the cut")
        crossing = e.value.details["crossing"]
        assert any("bool[2, 7, 7]" in value for value in crossing)
        assert any("made in model.layers.1" in value for value in crossing)


def test_sizes_that_were_computed_are_computed_again() -> None:
    spec = TensorSpec("float32", ("rows", "length", 4), {"length": (1, 16)})
    examples = [example_input(spec, binding) for binding in probe_bindings(spec)]
    model = Halves().eval()
    stages = split_model(model, ["b"], examples, way(model, spec, examples))
    for rows, length in ((1, 1), (3, 9)):
        x = torch.randn(rows, length, 4)
        torch.testing.assert_close(chain(stages, x), model(x))


class Rotary(nn.Module):
    """Turns by positions without autocast, with a size that each layer uses again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        hidden, angles = self.embed(ids), torch.arange(64.0).cos()[:, None]
        with torch.autocast("cpu", enabled=False):
            last = -hidden.shape[1]
            hidden = hidden * angles[last:]
        for layer in self.layers:
            hidden = layer(hidden) * angles[last:]
        return hidden


def test_what_is_computed_without_autocast_is_followed() -> None:
    model = Rotary().eval()
    operators = unfold(model, TOKENS, EXAMPLES)
    same(cut_before(operators, ["layers.1"]), model)


@pytest.fixture
def even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of the model takes one second: what is measured differs from run to run."""

    def seconds(traced: Traced, _timed: Tensor) -> list[float]:
        return [float(traced.computes(node)) for node in traced.nodes]

    monkeypatch.setattr(balance, "_measure", seconds)


@pytest.mark.usefixtures("even")
@torch.no_grad()
def test_even_parts_lie_between_the_layers() -> None:
    model = Logits(Decoder(6)).eval()
    x = tokens(1, 7)
    stages = split_evenly(model, 3, EXAMPLES, x, way(model, TOKENS, EXAMPLES))
    same(stages, model)
    for stage in stages:  # as calls, all layers are one piece, which is in one stage
        assert any("layers" in name for name, _ in stage.named_parameters())


@pytest.mark.usefixtures("even")
def test_no_part_ends_where_rows_are_no_dim(repo: BlockRepository) -> None:
    spec = TensorSpec("float32", ("rows", "length", 4), {"length": (1, 16)})
    examples = [example_input(spec, binding) for binding in probe_bindings(spec)]
    model = Flat().eval()
    stages = split_evenly(model, 4, examples, examples[0], way(model, spec, examples))
    x = torch.randn(3, 9, 4)
    for stage in stages:
        x = stage(x)
        assert x.shape[:2] == (3, 9)
    with pytest.raises(ExportError, match="the model has 3 legal ones"):
        split_evenly(model, 5, examples, examples[0], way(model, spec, examples))
    # after the last dim that is the rows; between b and its reshape nothing else would do
    first, _ = split_model(model, ["b"], examples, way(model, spec, examples))
    assert first(torch.randn(3, 9, 4)).shape == (3, 9, 4)


@pytest.mark.usefixtures("even")
def test_parts_of_calls_stay_where_operators_gain_nothing() -> None:
    """A submodule that stays whole is long, but no part can be shorter than it."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Sequential(nn.Linear(256, 256))

        def forward(self, x: Tensor) -> Tensor:
            return self.only(x if x.ndim == 2 else x[0])

    spec = TensorSpec("float32", ("rows", 256))
    examples = [example_input(spec, binding) for binding in probe_bindings(spec)]
    model = nn.Sequential(nn.Linear(256, 256), Whole()).eval()
    first, second = split_evenly(
        model, 2, examples, torch.randn(1, 256), way(model, spec, examples)
    )
    assert [n.op for n in second.graph.nodes] == ["placeholder", "call_module", "output"]
    assert chain([first, second], torch.randn(3, 256)).shape == (3, 256)


def test_of_two_refusals_the_users_own_names_are_told() -> None:
    """Where neither way leads to a cut."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.c(self.b(y)) + y

    class Values(Skips):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) if x.sum() > 0 else x

    spec = TensorSpec("float32", ("rows", 4))
    examples = [example_input(spec, binding) for binding in probe_bindings(spec)]
    for model, reason in (
        (Skips(), "values cross the cut before 'c': a, b"),
        (Values(), r"cannot be traced.* nor exported: .*data-dependent"),
    ):
        with pytest.raises(ExportError, match=reason):
            split_model(model.eval(), ["c"], examples, way(model, spec, examples))
    with pytest.raises(ExportError, match=r"cannot be traced.* nor exported: "):
        split_evenly(Values().eval(), 2, examples, examples[0], way(Values(), spec, examples))


@pytest.mark.usefixtures("even")
def test_a_size_of_the_input_that_is_asked_for_late_hinders_no_parts() -> None:
    class AsLarge(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).expand(x.shape)

    spec = TensorSpec("float32", ("rows", 4))
    examples = [example_input(spec, binding) for binding in probe_bindings(spec)]
    model = AsLarge(nn.Linear(4, 8), nn.Linear(8, 4)).eval()
    with pytest.raises(ExportError, match="the model has 0 legal ones"):
        split_evenly(model, 2, examples, examples[0])
    stages = split_evenly(model, 2, examples, examples[0], way(model, spec, examples))
    x = torch.randn(3, 4)
    assert stages[0](x).shape == (3, 8)
    assert torch.equal(chain(stages, x), model(x))


def test_why_there_are_no_more_parts() -> None:
    class Values(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x) if x.sum() > 0 else x

    spec = TensorSpec("float32", ("rows", 4))
    examples = [example_input(spec, binding) for binding in probe_bindings(spec)]
    model = nn.Sequential(nn.Linear(4, 4), Values()).eval()
    with pytest.raises(ExportError, match=r"has 1 legal ones: .* nor exported: .*data-dependent"):
        split_evenly(model, 3, examples, examples[0], way(model, spec, examples))


def test_a_model_of_several_results_is_not_unfolded() -> None:
    with pytest.raises(ExportError, match="nor does it return one tensor"):
        unfold(Pair().eval(), TOKENS, EXAMPLES)


def loaded(layers: int = 3) -> LoadedModel:
    return LoadedModel(Logits(Decoder(layers)).eval(), "decoder", TOKENS, int_below=WORDS)


def test_such_blocks_are_exported_and_stored(repo: BlockRepository) -> None:
    report = export_model(
        loaded(), repo, prefix="decoder", cuts=["model.layers.1", "model.layers.2"]
    )
    assert report.paths == (("decoder-1", "decoder-2", "decoder-3"),)
    assert max(report.max_error.values()) == 0
    middle = repo.info("decoder-2").contract
    assert middle.input.dims == middle.output.dims == ("rows", "length", WIDTH)
    assert middle.input.ranges == {"length": (1, 16)}
    parts = export_model(loaded(1), repo, prefix="even", parts=2)
    assert all(block.parameters for block in parts.blocks)


NAMED = {"trunk": "trunk", "tag": "tag", "word": "word"}


def heads(layers: int) -> LoadedModel:
    return LoadedModel(Heads(layers).eval(), "heads", TOKENS, int_below=WORDS)


def test_a_trunk_with_heads_is_cut_as_well(repo: BlockRepository) -> None:
    cuts = ["trunk.decoder.layers.1", "word.1"]
    report = export_tree(heads(2), repo, blocks=NAMED, cuts=cuts)
    trunk = ("trunk-1", "trunk-2")
    assert set(report.paths) == {(*trunk, "tag"), (*trunk, "word-1", "word-2")}
    assert not report.partial
    parts = {block.name: block.part for block in report.blocks}
    assert parts["trunk-1"] == "trunk..trunk.decoder.layers.1"
    assert parts["trunk-2"] == "trunk.decoder.layers.1..end" and parts["tag"] == "tag"
    chains = {name: repo.manifest(name).chain for name in repo.names()}
    assert {name: chain.position for name, chain in chains.items() if chain} == {
        "trunk-1": 1,
        "trunk-2": 2,
        "tag": 3,
        "word-1": 3,
        "word-2": 4,
    }
    assert {chain.of for chain in chains.values() if chain} == {4}


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        (["trunk"], "'trunk' lies in none of the blocks"),
        (["tags.0"], "'tags.0' lies in none of the blocks"),
        (["word.7"], "no submodule '7'"),
        (["word.1", "word.1"], "does not run after"),
        (["word.0"], "nothing runs before"),
    ],
)
def test_cuts_beside_named_blocks_lie_inside_of_them(
    repo: BlockRepository, cuts: list[str], words: str
) -> None:
    with pytest.raises(ExportError, match=words):
        export_tree(heads(1), repo, blocks=NAMED, cuts=cuts)
    assert repo.names() == []


def test_a_block_named_like_a_part_of_another(repo: BlockRepository) -> None:
    with pytest.raises(ExportError, match="names are not unique"):
        export_tree(heads(1), repo, blocks={**NAMED, "word-1": "tag"}, cuts=["word.1"])


@pytest.mark.parametrize("format_", [SCRIPTED, TRACED])
def test_torchscript_would_keep_the_sizes_of_one_example(
    repo: BlockRepository, format_: str
) -> None:
    with pytest.raises(ExportError, match="cannot be traced") as e:
        export_model(loaded(), repo, prefix="decoder", cuts=["model.layers.1"], format=format_)
    assert "pt2" in e.value.hint
