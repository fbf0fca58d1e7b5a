"""Train the digits model on scikit-learn's 1797 digits: half a minute on two cores.

1437 pictures train all three heads at once, 360 are held out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from blockflow.core.errors import SystemError_
from blockflow.repository.zoo.digits import MultiDigits

TRAINED_ON = 1437


@dataclass(frozen=True, slots=True)
class DigitsData:
    """Pictures float32[n, 1, 8, 8] in 0..1 and each task's labels int64[n]."""

    images: Tensor
    labels: Mapping[str, Tensor]

    def part(self, index: Tensor) -> DigitsData:
        return DigitsData(self.images[index], {k: v[index] for k, v in self.labels.items()})


def load_digits_data(seed: int = 0) -> tuple[DigitsData, DigitsData]:
    """(training, held out), shuffled by ``seed``.

    Raises:
        SystemError_: MISSING_EXTRA without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as e:
        raise SystemError_(
            "MISSING_EXTRA",
            "the digits come with scikit-learn",
            hint="install the extra: blockflow[demo]",
        ) from e
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    digit = torch.tensor(bunch.target, dtype=torch.int64)
    data = DigitsData(
        images, {"digit": digit, "parity": digit % 2, "high": (digit >= 5).to(torch.int64)}
    )
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return data.part(order[:TRAINED_ON]), data.part(order[TRAINED_ON:])


def train_digits(
    *,
    epochs: int = 4,
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda _what, _fraction: None,
) -> tuple[MultiDigits, dict[str, float]]:
    """Train a fresh model; returns it in eval mode with each task's held-out accuracy (0..1)."""
    train, held_out = load_digits_data(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MultiDigits()
    steps_per_epoch = -(-len(train.images) // 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2e-3, total_steps=epochs * steps_per_epoch
    )
    for epoch in range(epochs):
        progress(f"training epoch {epoch + 1} of {epochs}", epoch / epochs)
        model.train()
        for index in torch.randperm(len(train.images), generator=generator).split(64):
            batch = train.part(index)
            logits = model(batch.images)
            loss = torch.stack(
                [functional.cross_entropy(logits[k], y) for k, y in batch.labels.items()]
            ).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    progress("trained", 1.0)
    return model.eval(), accuracies(model, held_out)


def accuracies(model: MultiDigits, data: DigitsData) -> dict[str, float]:
    """Each task's share of right answers."""
    model.eval()
    with torch.inference_mode():
        logits = model(data.images)
    return {k: float((logits[k].argmax(1) == y).float().mean()) for k, y in data.labels.items()}
