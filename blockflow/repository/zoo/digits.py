"""The digits model: one trunk in two stages, three heads (scikit-learn's 8x8 digits).

Three tasks on one input -- which digit, its parity, and whether it is 5 or more -- show what
sharing a trunk saves: the trunk holds nearly all the parameters and the compute.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

HEAD_CLASSES: Mapping[str, int] = {"digit": 10, "parity": 2, "high": 2}
"""The tasks' heads and their numbers of classes."""


def _stage(inp: int, out: int) -> list[nn.Module]:
    conv = nn.Conv2d(inp, out, 3, padding=1, bias=False)
    return [conv, nn.BatchNorm2d(out), nn.ReLU(inplace=True)]


def trunk1() -> nn.Sequential:
    """float32[rows, 1, 8, 8] (pixels 0..1) -> float32[rows, 192, 4, 4]."""
    return nn.Sequential(*_stage(1, 64), *_stage(64, 192), nn.MaxPool2d(2))


def trunk2() -> nn.Sequential:
    """float32[rows, 192, 4, 4] -> float32[rows, 512]."""
    return nn.Sequential(
        *_stage(192, 320),
        nn.MaxPool2d(2),
        *_stage(320, 512),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(1),
    )


def head(classes: int) -> nn.Sequential:
    """float32[rows, 512] -> logits float32[rows, classes]."""
    return nn.Sequential(nn.Linear(512, 32), nn.ReLU(inplace=True), nn.Linear(32, classes))


class DigitsModel(nn.Module):
    """float32[rows, 1, 8, 8] -> logits of one head: the separate model of one task."""

    def __init__(self, task: str = "digit") -> None:
        super().__init__()
        if task not in HEAD_CLASSES:
            raise ValueError(f"unknown task {task!r}; known: {', '.join(HEAD_CLASSES)}")
        self.trunk1 = trunk1()
        self.trunk2 = trunk2()
        self.head = head(HEAD_CLASSES[task])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk2(self.trunk1(x)))


class MultiDigits(nn.Module):
    """The trunk once with all heads: what is trained, and cut into the shared blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk1 = trunk1()
        self.trunk2 = trunk2()
        self.heads = nn.ModuleDict({name: head(n) for name, n in HEAD_CLASSES.items()})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.trunk2(self.trunk1(x))
        return {name: branch(features) for name, branch in self.heads.items()}

    def separate(self, task: str) -> DigitsModel:
        """The monolith of one task, sharing these very parameters."""
        model = DigitsModel(task)
        model.trunk1, model.trunk2 = self.trunk1, self.trunk2
        model.head = self.heads[task]  # type: ignore[assignment]
        return model.train(self.training)
