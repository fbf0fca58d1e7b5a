"""The zoo: sizes and names as published, any length, digits that learn."""

import pytest
import torch

from blockflow.repository.sources import build
from blockflow.repository.zoo.catalog import ZOO
from blockflow.repository.zoo.digits import HEAD_CLASSES, DigitsModel, MultiDigits
from blockflow.repository.zoo.transformer import TokenEncoder, TransformerEncoder

# torchvision's own counts for the same architectures
PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "alexnet": 61_100_840,
}
# a sample of torchvision's state dict keys with their dims
KEYS = {
    "resnet18": {"layer2.0.downsample.0.weight": (128, 64, 1, 1), "fc.bias": (1000,)},
    "resnet50": {
        "conv1.weight": (64, 3, 7, 7),
        "layer1.0.conv3.weight": (256, 64, 1, 1),
        "layer4.2.bn3.running_var": (2048,),
    },
    "resnet152": {"layer3.35.conv2.weight": (256, 256, 3, 3)},
    "alexnet": {"features.10.weight": (256, 256, 3, 3), "classifier.1.weight": (4096, 9216)},
}


@pytest.mark.parametrize("name", list(PARAMETERS))
def test_sizes_and_names_are_torchvisions(name: str) -> None:
    with torch.device("meta"):
        model = build(ZOO[name].factory, {}, 0)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    state = model.state_dict()
    for key, dims in KEYS[name].items():
        assert tuple(state[key].shape) == dims


@pytest.mark.parametrize("name", list(ZOO))
def test_the_catalog_names_what_exists(name: str) -> None:
    entry = ZOO[name]
    with torch.device("meta"):
        modules = dict(build(entry.factory, {}, 0).named_modules())
    assert set(entry.cuts) <= set(modules)
    assert set(entry.blocks.values()) <= set(modules)
    assert entry.about and entry.input.dims[0] == "rows"


def test_weights_depend_on_the_seed_alone() -> None:
    factory = ZOO["digits"].factory
    before = torch.random.get_rng_state()
    one, two, other = (build(factory, {}, seed).state_dict() for seed in (1, 1, 2))
    key = "trunk1.0.weight"
    assert torch.equal(one[key], two[key]) and not torch.equal(one[key], other[key])
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("length", [1, 2, 17, 64])
def test_any_length(length: int) -> None:
    sizes = {"layers": 1, "width": 16, "heads": 2, "vocabulary": 32, "max_length": 64}
    tokens = torch.randint(0, 32, (3, length))
    with torch.no_grad():
        assert TransformerEncoder(classes=5, **sizes)(tokens).shape == (3, 5)
        assert TokenEncoder(**sizes)(tokens).shape == (3, length, 16)


def test_separate_models_share_the_trained_parameters() -> None:
    multi = MultiDigits().eval()
    x = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        together = multi(x)
        for task in HEAD_CLASSES:
            torch.testing.assert_close(multi.separate(task)(x), together[task])
    assert multi.separate("digit").trunk1 is multi.trunk1


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ValueError, match="known: digit"):
        DigitsModel("colour")


def test_the_trunk_is_worth_sharing() -> None:
    multi = MultiDigits()
    trunk = sum(p.numel() for m in (multi.trunk1, multi.trunk2) for p in m.parameters())
    heads = sum(p.numel() for p in multi.heads.parameters())
    assert trunk > 2_000_000 and heads < trunk / 20
