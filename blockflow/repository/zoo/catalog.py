"""The zoo's models by name: factory, input contract and where one would cut them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from blockflow.core.model import Padding, TensorSpec

_IMAGE = TensorSpec("float32", ("rows", 3, 224, 224))
_DIGIT = TensorSpec("float32", ("rows", 1, 8, 8))
_TOKENS = TensorSpec("int64", ("rows", "length"), {"length": (1, 512)})
_ZOO = "blockflow.repository.zoo"


@dataclass(frozen=True, slots=True)
class ZooModel:
    """A model that can be exported by name alone.

    Attributes:
        factory: ``module:function``; its keyword arguments are the model's sizes.
        input: the input contract.
        cuts: submodules before which a cut makes sense (the CLI's ``--split default``).
        blocks: for models with several outputs: block name -> submodule (``--block default``).
        int_below: random integer inputs stay below it (a vocabulary's size).
        padding: how its input may be padded.
        about: one line for lists.
    """

    factory: str
    input: TensorSpec
    about: str
    cuts: tuple[str, ...] = ()
    blocks: Mapping[str, str] = field(default_factory=dict)
    int_below: int = 2
    padding: Padding | None = None


def _resnet(name: str) -> ZooModel:
    return ZooModel(
        f"{_ZOO}.resnet:{name}",
        _IMAGE,
        f"{name.replace('resnet', 'ResNet-')} v1.5 image classifier",
        cuts=("layer2", "layer3", "layer4"),
    )


ZOO: Mapping[str, ZooModel] = {
    "resnet18": _resnet("resnet18"),
    "resnet50": _resnet("resnet50"),
    "resnet152": _resnet("resnet152"),
    "alexnet": ZooModel(
        f"{_ZOO}.alexnet:alexnet", _IMAGE, "AlexNet image classifier", cuts=("classifier",)
    ),
    "transformer": ZooModel(
        f"{_ZOO}.transformer:TransformerEncoder",
        _TOKENS,
        "small transformer encoder, variable length, to class logits",
        cuts=("layers", "head"),
        int_below=4096,
        padding=Padding("length"),
    ),
    "transformer-tokens": ZooModel(
        f"{_ZOO}.transformer:TokenEncoder",
        _TOKENS,
        "small transformer encoder, variable length, to one vector per token",
        cuts=("layers", "norm"),
        int_below=4096,
        padding=Padding("length"),
    ),
    "digits": ZooModel(
        f"{_ZOO}.digits:DigitsModel",
        _DIGIT,
        "8x8 digits, one task (argument task: digit, parity, high)",
        cuts=("trunk2", "head"),
    ),
    "digits-multi": ZooModel(
        f"{_ZOO}.digits:MultiDigits",
        _DIGIT,
        "8x8 digits, one trunk in two blocks and three heads",
        blocks={
            "trunk1": "trunk1",
            "trunk2": "trunk2",
            "head_digit": "heads.digit",
            "head_parity": "heads.parity",
            "head_high": "heads.high",
        },
    ),
}
