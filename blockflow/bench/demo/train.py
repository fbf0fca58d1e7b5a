"""Training of the demo's model: one trunk, three heads, their losses added up."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from blockflow.bench.demo.data import TASKS, Digits, labels
from blockflow.repository.zoo.digits import MultiDigits

THREADS = 1
"""Two are quicker on idle cores, but spinning OpenMP threads are far slower on busy ones."""

BATCH = 64
PEAK_RATE = 4e-3
WEIGHT_DECAY = 1e-2


def train(
    data: Digits, *, epochs: int, seed: int, progress: Callable[[float], None]
) -> MultiDigits:
    """Train from scratch; the same seed gives the same model on the same machine.

    Args:
        data: images and digits; the held-out part is not touched.
        epochs: passes over the training images.
        seed: of initialisation and order.
        progress: told the fraction done (0..1) after every step.

    Returns:
        the model in eval mode.
    """
    # fork_rng: the caller's generator is left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        before = torch.get_num_threads()
        torch.set_num_threads(THREADS)
        try:
            return _train(data, epochs, progress)
        finally:
            torch.set_num_threads(before)


def _train(data: Digits, epochs: int, progress: Callable[[float], None]) -> MultiDigits:
    images = torch.from_numpy(data.train_images)
    targets = {task: torch.from_numpy(labels(task, data.train_digits)) for task in TASKS}
    model = MultiDigits()
    optimiser = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=WEIGHT_DECAY)
    steps = epochs * -(-len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, PEAK_RATE, total_steps=steps)
    done = 0
    for _ in range(epochs):
        model.train()
        for batch in torch.randperm(len(images)).split(BATCH):
            outputs = model(images[batch])
            loss = _loss(outputs, {task: t[batch] for task, t in targets.items()})
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            done += 1
            progress(done / steps)
    return model.eval()


def _loss(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    losses = [
        nn.functional.cross_entropy(outputs[task], target) for task, target in targets.items()
    ]
    return torch.stack(losses).sum()
