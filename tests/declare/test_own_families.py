"""Families of the user whose torch distribution leaves members out: errors name what is missing."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributions as td
from torch import Tensor

from aevb import Conditional, Model, Normal, fit, predictive_check
from aevb.declare.missing_members import MissingMemberError


class Density(td.Distribution):
    """A Laplace density, without anything else."""

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, centre: Tensor) -> None:
        self.centre = centre
        super().__init__(centre.shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        return -(value - self.centre).abs() - 0.6931472


class Drawn(Density):
    def sample(self, sample_shape: Any = ()) -> Tensor:
        return self.centre.expand(self._extended_shape(torch.Size(sample_shape))).clone()


class WithMean(Drawn):
    @property
    def mean(self) -> Tensor:
        return self.centre


@dataclass(frozen=True, repr=False)
class Own(Conditional):
    form: type = Density

    def heads(self, d: int) -> dict[str, int]:
        return {"centre": d}

    def distribution(self, centre: Tensor) -> td.Distribution:
        return self.form(centre)


X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
HOLES = torch.where(X > 1, torch.nan, X)
CALLS: dict[str, Callable[[Model, Path], Any]] = {
    "sample": lambda model, _: model.sample(2, seed=0),
    "reconstruct": lambda model, _: model.reconstruct(x=X, seed=0),
    "impute": lambda model, _: model.impute(x=HOLES, seed=0),
    "export": lambda model, at: model.export("torch", what="decoder", out=at / "decoder.pt2"),
    "check": lambda model, _: predictive_check(model, {"x": X}, seed=0),
}


@pytest.mark.parametrize(
    ("form", "call", "member"),
    [
        (Density, "sample", "sample"),
        (Density, "reconstruct", "mean"),
        (Density, "impute", "mean"),
        (Density, "export", "sample"),
        (Density, "check", "sample"),
        (Drawn, "reconstruct", "mean"),
        (Drawn, "export", "mean"),
        (WithMean, "impute", "expand"),
        (WithMean, "export", "variance"),
    ],
)
def test_a_missing_member_is_named(form: type, call: str, member: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model({"z": Normal(2), "x | z": Own(3, form=form)}, {"z | x": Normal()}, missing="mask")
    fit(model, {"x": HOLES}, steps=2, seed=0, progress=False)
    message = rf"p\(x\|z\) has the family Own: its distribution {form.__name__} has no {member}, "
    with pytest.raises(MissingMemberError, match=message):
        CALLS[call](model, tmp_path)
    assert model.log_evidence(x=X, seed=0, samples=9).value.shape == (20,)
