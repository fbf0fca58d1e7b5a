"""A batch as large as it is by default: what is short in there alone shows in the export."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockflow.core.limits import DEFAULT_MAX_ROWS
from blockflow.core.model import TensorSpec
from blockflow.repository import company, verify
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from tests import export_rig
from tests.export_rig import SCRIPTED, TRACED, refused

repo = export_rig.repo

SPEC = TensorSpec("float32", ("rows", 16))


class Experts(nn.Module):
    """Each row goes to one of four, and all get their turn."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 8) for _ in range(4))

    def kept(self, chosen: Tensor) -> Tensor:
        return torch.ones_like(chosen)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        every = torch.stack([expert(x) for expert in self.experts], 1)
        own = every.gather(1, chosen.view(-1, 1, 1).expand(-1, 1, 8)).squeeze(1)
        return own * (weight * self.kept(chosen)).unsqueeze(-1)


class Capacity(Experts):
    """An expert has twelve places in a batch."""

    def kept(self, chosen: Tensor) -> Tensor:
        one_hot = F.one_hot(chosen, 4)
        place = (one_hot.cumsum(0) * one_hot).sum(-1)
        return (place <= 12).float()


class Dispatched(nn.Module):
    """Rows are brought to their experts by a product with zeros and ones; there are places for all
    of them, so each gets what it would get alone: but for those beside NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.weight = nn.Parameter(torch.randn(4, 16, 8) / 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = F.one_hot(self.gate(x).argmax(-1), 4).to(x.dtype)
        places = chosen.unsqueeze(2) * torch.eye(x.shape[0]).unsqueeze(1)
        brought = torch.einsum("rep,rd->epd", places, x) @ self.weight
        return torch.einsum("rep,epf->rf", places, brought)


class OfMany(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 32:
            return x - x.mean(0)
        return x


@pytest.mark.parametrize("seed", range(3))
def test_places_that_are_short_in_a_whole_batch(repo: BlockRepository, seed: int) -> None:
    torch.manual_seed(seed)
    error = refused(Capacity().eval(), repo, spec=SPEC, format=TRACED)
    assert error.code == "EXPORT_MISMATCH"
    assert "depends on the rows beside it" in error.message
    assert f"of {DEFAULT_MAX_ROWS} differs" in error.message
    assert "the same row among 8" in error.message and "given out in turn" in error.hint
    experts = LoadedModel(Experts().eval(), "test", SPEC)
    export_model(experts, repo, prefix="all", format="pt2" if not seed else TRACED)


def test_a_row_of_nan_among_others(repo: BlockRepository) -> None:
    error = refused(Dispatched().eval(), repo, spec=SPEC, format=TRACED)
    assert error.code == "EXPORT_MISMATCH" and error.where
    assert "beside a row of NaN" in error.message and "torch.where" in error.hint


def test_a_branch_that_a_whole_batch_takes(repo: BlockRepository) -> None:
    assert "rows beside it" in refused(OfMany().eval(), repo, format=SCRIPTED).message


def test_large_rows_make_up_a_smaller_batch(
    repo: BlockRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    step = verify._step

    def counted(job: verify.Job, run: verify.Runner, name: str, x: Tensor) -> Tensor:
        seen.append(len(x))
        return step(job, run, name, x)

    monkeypatch.setattr(verify, "_step", counted)
    for most_bytes, rows in ((2**23, 32), (20 * 64, 20), (64, 8)):
        monkeypatch.setattr(company, "_MOST_BYTES", most_bytes)
        seen.clear()
        export_model(LoadedModel(nn.ReLU().eval(), "test", SPEC), repo, prefix=f"of{rows}")
        assert max(seen) == rows
