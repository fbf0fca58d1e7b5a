"""Models and weights files as people have them: wrapped, scripted, unfinished, of another kind."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from blockflow.core.errors import ExportError
from blockflow.core.model import TensorSpec
from blockflow.repository.artifact import read_artifact
from blockflow.repository.export import export_model, export_tree
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel, load_model
from blockflow.repository.weights import load_weights
from tests.unit.test_export import refused

ROW = TensorSpec("float32", ("rows", 4))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def scripted() -> nn.Module:
    made: nn.Module = torch.jit.script(plain())
    return made


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3))


def wrapped() -> nn.Module:
    compiled: Any = torch.compile(nn.DataParallel(plain()))
    return compiled


def refuses_to_compile(*_: Any) -> Any:
    raise RuntimeError("it was compiled")


def compiled_inside() -> nn.Module:
    model: Any = plain()
    model[0] = torch.compile(model[0], backend=refuses_to_compile)
    model.compile(backend=refuses_to_compile)
    return nn.Sequential(model)


def nested(levels: int) -> nn.Module:
    made: nn.Module = nn.Identity()
    for _ in range(levels):
        made = nn.Sequential(made)
    return made


def made_here(name: str, **options: Any) -> LoadedModel:
    return load_model(f"{__name__}:{name}", input_spec=ROW, **options)


@pytest.mark.parametrize(("levels", "code"), [(2000, "FACTORY_FAILED"), (500, "EXPORT_FAILED")])
def test_a_model_that_is_nested_too_deeply(tmp_path: Path, levels: int, code: str) -> None:
    """Two thousand levels are too many to look at, and five hundred to run."""
    model, repo = LoadedModel(nested(levels), "m", ROW), BlockRepository(tmp_path)
    error = refused(code, lambda: export_model(model, repo, prefix="m"))
    assert "side by side into one nn.Sequential" in error.hint
    if code == "FACTORY_FAILED":
        with pytest.raises(ExportError, match="nested more deeply") as e:
            made_here("nested", arguments={"levels": levels})
        assert e.value.code == code


def test_a_model_whose_sizes_are_not_known_yet(tmp_path: Path) -> None:
    torch.save(plain().state_dict(), tmp_path / "w.pt")
    for options in ({}, {"weights": tmp_path / "w.pt"}):
        error = refused("FACTORY_FAILED", lambda o=options: made_here("lazy", **o))
        assert "0.weight, 0.bias get their sizes" in error.message and "once" in error.hint


@pytest.mark.parametrize("module", [lazy(), plain().to("meta")])
def test_a_model_in_memory_that_is_not_finished(tmp_path: Path, module: nn.Module) -> None:
    given, repository = LoadedModel(module.eval(), "m", ROW), BlockRepository(tmp_path)
    for export in (partial(export_model, names=["m"]), partial(export_tree, blocks={"a": "0"})):
        error = refused("FACTORY_FAILED", partial(export, given, repository))
        assert "not finished" in error.message


def test_a_scripted_model_is_stored_scripted(tmp_path: Path) -> None:
    repository, model = BlockRepository(tmp_path), made_here("scripted")
    export_model(model, repository, names=["s"], format="torchscript-scripted")
    x = torch.randn(3, 4)
    with repository.artifact("s") as path, torch.no_grad():
        torch.testing.assert_close(read_artifact(path, "torchscript-scripted")(x), model.module(x))
    error = refused("EXPORT_FAILED", lambda: export_model(model, repository, names=["p"]))
    assert "torchscript-scripted" in error.hint and len(error.message) < 300
    part = replace(model, module=nn.Sequential(nn.Linear(4, 4), scripted()).eval())
    error = refused("EXPORT_FAILED", lambda: export_model(part, repository, names=["p"]))
    assert error.hint.startswith("1 is scripted, which torch.export does not follow")


def test_a_traced_model_that_was_loaded_from_a_file(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.trace(plain(), torch.randn(2, 4)), str(tmp_path / "m.pt"))
    model = LoadedModel(torch.jit.load(str(tmp_path / "m.pt")).eval(), "file", ROW)
    export_model(model, BlockRepository(tmp_path), names=["f"], format="torchscript-scripted")
    error = refused(
        "EXPORT_FAILED", lambda: export_model(model, BlockRepository(tmp_path), prefix="p")
    )
    assert "ScriptModule" in error.message


def test_wrappers_are_taken_off() -> None:
    assert type(made_here("wrapped").module) is nn.Sequential


def test_nothing_is_compiled_for_an_export() -> None:
    x = torch.randn(3, 4)
    made = made_here("compiled_inside", seed=3).module(x)
    assert torch.equal(made, made_here("plain", seed=3).module(x))


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
)
def test_weights_of_a_wrapped_model_are_taken(tmp_path: Path, prefix: str) -> None:
    source, target = plain(), plain()
    torch.save({prefix + k: t for k, t in source.state_dict().items()}, tmp_path / "w.pt")
    load_weights(target, tmp_path / "w.pt")
    assert torch.equal(source[0].weight, target[0].weight)


def test_weights_without_the_counters_of_normalisation(tmp_path: Path) -> None:
    """As in torchvision's first checkpoints (IMAGENET1K_V1); torch takes such, too."""
    source, target = (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)) for _ in range(2))
    state = {k: t for k, t in source.state_dict().items() if "num_batches" not in k}
    save_file(state, tmp_path / "w.safetensors")
    load_weights(target, tmp_path / "w.safetensors")
    assert torch.equal(source[0].weight, target[0].weight)
    del state["1.running_mean"]  # on which results do depend
    save_file(state, tmp_path / "w.safetensors")
    error = refused("WEIGHTS_INVALID", lambda: load_weights(target, tmp_path / "w.safetensors"))
    assert "1 missing: 1.running_mean" in error.message


def elsewhere() -> nn.Module:
    os.chdir("/")
    return plain()


def test_a_factory_that_goes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are meant from where the command was given: of the weights, of the repository."""
    monkeypatch.chdir(tmp_path)
    torch.save(plain().state_dict(), "w.pt")
    model = made_here("elsewhere", weights=Path("w.pt"))
    export_model(model, BlockRepository("blocks"), prefix="b")
    assert BlockRepository(tmp_path / "blocks").names() == ["b"]


def test_a_name_of_the_models_own_is_no_wrapper(tmp_path: Path) -> None:
    source, target = nn.ModuleDict({"module": plain()}), nn.ModuleDict({"module": plain()})
    torch.save(source.state_dict(), tmp_path / "w.pt")
    load_weights(target, tmp_path / "w.pt")
    assert torch.equal(source["module"][0].weight, target["module"][0].weight)


class KeepsMore(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [
        (nn.Linear, lambda t: t.to_sparse(), "is sparse_coo: to_dense()"),
        (nn.Linear, lambda t: t.to("meta"), "no values"),
        (nn.Linear, lambda t: t.to(torch.complex64), "2 complex for a real tensor: weight, bias"),
        (KeepsMore, lambda t: t, "_extra_state"),
        (nn.Linear, lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "quantized"),
        (nn.Linear, lambda t: t.double() * 1e300, "dtype holds: weight, bias"),
    ],
)
def test_weights_of_another_kind(
    tmp_path: Path, model: type[nn.Module], change: Any, words: str
) -> None:
    torch.save({k: change(t) for k, t in nn.Linear(4, 3).state_dict().items()}, tmp_path / "w.pt")
    error = refused("WEIGHTS_INVALID", lambda: load_weights(model(4, 3), tmp_path / "w.pt"))
    assert words in error.message


class Holds(nn.Module):
    def __init__(self, held: Tensor) -> None:
        super().__init__()
        self.register_buffer("held", held)


@pytest.mark.parametrize(
    ("saved", "dtype", "fits"),
    [
        (torch.tensor([2**63 + 5], dtype=torch.uint64), torch.int64, False),
        (torch.tensor([-3]), torch.uint64, False),
        (torch.tensor([3]), torch.uint64, True),
        (torch.tensor([100_000]), torch.float16, False),
        (torch.tensor([float("inf"), -65_504.0]), torch.float16, True),
        (torch.full((2, 2), -1e9).triu(1), torch.float16, True),  # a mask
    ],
)
def test_numbers_that_the_models_dtype_does_not_hold(
    tmp_path: Path, saved: Tensor, dtype: torch.dtype, fits: bool
) -> None:
    torch.save({"held": saved}, tmp_path / "w.pt")
    model = Holds(torch.zeros(saved.shape, dtype=dtype))
    if fits:
        assert load_weights(model, tmp_path / "w.pt")
    else:
        error = refused("WEIGHTS_INVALID", lambda: load_weights(model, tmp_path / "w.pt"))
        assert "holds: held" in error.message


@pytest.mark.parametrize("counters", [True, False])
@pytest.mark.parametrize(
    "make", [plain, lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))]
)
def test_a_prefix_that_all_names_have_is_told(
    tmp_path: Path, make: Callable[[], nn.Module], counters: bool
) -> None:
    state = {f"net.{k}": t for k, t in make().state_dict().items() if counters or "num_" not in k}
    torch.save(state, tmp_path / "w.pt")
    error = refused("WEIGHTS_INVALID", lambda: load_weights(make(), tmp_path / "w.pt"))
    assert "begins with 'net.'" in error.hint


class TakesAny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, *xs: Tensor) -> Tensor:
        return self.b(self.a(xs[0]))


@pytest.mark.parametrize("options", [{}, {"cuts": ["b"]}, {"parts": 2}])
def test_a_forward_of_any_number_of_inputs(tmp_path: Path, options: dict[str, Any]) -> None:
    model = LoadedModel(TakesAny().eval(), "any", ROW)
    repository = BlockRepository(tmp_path)
    error = refused(
        "NOT_SPLITTABLE", lambda: export_model(model, repository, prefix="m", **options)
    )
    assert "any number of inputs (*xs)" in error.message and "wrap" in error.hint
    export_tree(model, repository, blocks={"a": "a", "b": "b"})
    export_model(model, repository, prefix="traced", format="torchscript-traced")


class Drawn(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + torch.randn_like(weight)


def parametrized() -> nn.Module:
    norms, old = nn.utils.parametrizations, (nn.utils.weight_norm, nn.utils.spectral_norm)
    new = (norms.weight_norm, norms.spectral_norm, norms.orthogonal)
    return nn.Sequential(*(norm(nn.Linear(4, 4)) for norm in (*new, *old)))


def compiled_norm() -> nn.Module:
    return nn.Sequential(torch.compile(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))))


def drawn() -> nn.Module:
    layer = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(layer, "weight", Drawn())
    return layer


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weights_that_are_made_of_others_are_made_once() -> None:
    model, x = made_here("parametrized").module, torch.randn(2, 4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        before = parametrized().eval()
    assert torch.allclose(model(x), before(x))
    for layer in model:
        assert dict(layer.named_parameters()).keys() == {"weight", "bias"}
        assert not layer._forward_pre_hooks
    layer = made_here("drawn").module
    assert not torch.equal(layer(x), layer(x)), "the export refuses it, and is to see it"
    wrapper = made_here("compiled_norm").module[0]
    assert type(wrapper._orig_mod) is nn.Linear and wrapper(x).shape == (2, 4)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Failing(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        if self.training:
            return weight
        raise ValueError("no such weight")


class Apart(nn.Module):
    """Whose layers make their weights of a parameter that others have as well."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third, table = (nn.Linear(4, 4) for _ in range(4))
        second.weight = first.weight
        self.listed = [first.weight]
        table.register_buffer("shift", torch.ones(4))
        third.register_buffer("shift", table.shift)
        for layer, name in ((first, "weight"), (third, "weight"), (third, "shift")):
            nn.utils.parametrize.register_parametrization(layer, name, Doubled())
        self.layers = nn.ModuleList([first, second, third, third, copy.deepcopy(third), table])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x @ self.listed[0] + self.layers[2].shift - self.layers[5].shift


def failing() -> nn.Module:
    layer = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(layer, "weight", Failing())
    return layer


def test_a_parameter_of_which_a_weight_was_made_stays_as_it_was(tmp_path: Path) -> None:
    model, x = made_here("Apart").module, torch.randn(2, 4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert torch.equal(model(x), Apart().eval()(x))
    layers = [*model.layers]
    assert {type(m) for m in layers} == {nn.Linear}
    assert [len([*m.buffers()]) for m in layers] == [0, 0, 1, 1, 1, 1]
    with pytest.raises(ExportError, match="no such weight"):
        export_model(made_here("failing"), BlockRepository(tmp_path), prefix="failing")


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return plain()


def exported() -> nn.Module:
    """Whose modes cannot be changed, and whose training flag says nothing."""
    dims = {0: torch.export.Dim("batch", min=1, max=1 << 20)}
    made = torch.export.export(plain().eval(), (torch.ones(2, 4),), dynamic_shapes=(dims,))
    return made.module()


def for_two_rows() -> nn.Module:
    return torch.export.export(plain().eval(), (torch.ones(2, 4),)).module()


def test_a_model_without_values() -> None:
    error = refused("FACTORY_FAILED", lambda: made_here("on_meta"))
    assert "0.weight" in error.message and "meta" in error.message and "to_empty" in error.hint


def test_a_model_that_was_exported_before(tmp_path: Path) -> None:
    repository, model = BlockRepository(tmp_path), made_here("exported")
    export_model(model, repository, names=["m"])
    x = torch.ones(3, 4)
    with repository.artifact("m") as path:
        assert torch.allclose(read_artifact(path, "pt2")(x), model.module(x))
    error = refused(
        "EXPORT_FAILED",
        lambda: export_model(made_here("for_two_rows"), repository, names=["n"]),
    )
    assert "eval" not in error.hint and "any number of rows" in error.hint


@pytest.mark.parametrize("version", ["", "a/b", "1\n", "-1", "x" * 65])
def test_what_is_no_version_is_refused_at_once(tmp_path: Path, version: str) -> None:
    model, repository = made_here("plain"), BlockRepository(tmp_path)
    for call in (
        lambda: export_model(model, repository, names=["m"], version=version),
        lambda: export_tree(model, repository, blocks={"m": "0"}, version=version),
    ):
        error = refused("EXPORT_FAILED", call)
        assert "is not a version" in error.message
    assert repository.names() == []


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_that_no_generator_takes_is_told_as_such(seed: int) -> None:
    assert "is no seed" in refused("EXPORT_FAILED", lambda: load_model("digits", seed=seed)).message
    assert load_model("digits", seed=seed // 2).seed == seed // 2
