"""ResNet-18, -50 and -152 (He et al. 2015, "v1.5": the stride sits in the 3x3 convolution).

Modules and parameters carry torchvision's names (``conv1``, ``bn1``, ``layer1`` .. ``layer4``,
``fc``), so that torchvision's checkpoints load unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def _conv3x3(inp: int, out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inp, out, 3, stride=stride, padding=1, bias=False)


def _conv1x1(inp: int, out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inp, out, 1, stride=stride, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a skip connection (ResNet-18)."""

    expansion = 1

    def __init__(self, inp: int, planes: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = _conv3x3(inp, planes, stride)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv3x3(planes, planes)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        return self.relu(out + identity)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a skip connection (ResNet-50 and deeper)."""

    expansion = 4

    def __init__(self, inp: int, planes: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = _conv1x1(inp, planes)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = _conv3x3(planes, planes, stride)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = _conv1x1(planes, planes * self.expansion)
        self.bn3 = nn.BatchNorm2d(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        return self.relu(out + identity)


class ResNet(nn.Module):
    """float32[rows, 3, height, width] -> logits float32[rows, classes]."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        layers: Sequence[int],
        classes: int = 1000,
        width: int = 64,
    ) -> None:
        super().__init__()
        self._inp = width
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = self._layer(block, width, layers[0], 1)
        self.layer2 = self._layer(block, width * 2, layers[1], 2)
        self.layer3 = self._layer(block, width * 4, layers[2], 2)
        self.layer4 = self._layer(block, width * 8, layers[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(width * 8 * block.expansion, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def _layer(
        self, block: type[BasicBlock] | type[Bottleneck], planes: int, count: int, stride: int
    ) -> nn.Sequential:
        out = planes * block.expansion
        downsample: nn.Module | None = None
        if stride != 1 or self._inp != out:
            downsample = nn.Sequential(_conv1x1(self._inp, out, stride), nn.BatchNorm2d(out))
        blocks: list[nn.Module] = [block(self._inp, planes, stride, downsample)]
        self._inp = out
        blocks += [block(out, planes, 1, None) for _ in range(1, count)]
        return nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet18(classes: int = 1000, width: int = 64) -> ResNet:
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, width)


def resnet50(classes: int = 1000, width: int = 64) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, width)


def resnet152(classes: int = 1000, width: int = 64) -> ResNet:
    return ResNet(Bottleneck, (3, 8, 36, 3), classes, width)
