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
        shape = self._extended_shape(torch.Size(sample_shape))
        return self.centre + (torch.rand(shape) / torch.rand(shape)).log()


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


class Summed(td.Gumbel):
    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value).sum(-1)


@dataclass(frozen=True, repr=False)
class Peaks(Conditional):
    form: Callable[..., td.Distribution] = Summed

    def heads(self, d: int) -> dict[str, int]:
        return {"loc": d, "scale": d}

    def distribution(self, loc: Tensor, scale: Tensor) -> td.Distribution:
        return self.form(loc, scale.exp())


@dataclass(frozen=True, repr=False)
class OwnSum(Peaks):
    def log_prob(self, dist: td.Distribution, value: Tensor, present: Any = None) -> Tensor:
        return dist.log_prob(value)


def vectors(loc: Tensor, scale: Tensor) -> td.Distribution:
    return td.Independent(td.Gumbel(loc, scale), 1)


def twice_summed(loc: Tensor, scale: Tensor) -> td.Distribution:
    return td.Independent(Summed(loc, scale), 1)


def declared(family: Conditional) -> Model:
    return Model({"z": Normal(2), "x | z": family}, {"z | x": Normal()}, seed=0)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (
            Peaks(4),
            r'p has "x \| z": Peaks\(4\): the log_prob of Peaks\'s distribution Summed returns the '
            r"shape \[3\] for 3 rows of 4 entries; it must be \[3, 4\]\. Return one number per",
        ),
        (Peaks(1), r"returns the shape \[3\] for 3 rows of 1 entries; it must be \[3, 1\]"),
        (Peaks(4, form=twice_summed), r"Independent returns the shape \[\] .* must be \[3\]"),
        (
            OwnSum(4, form=td.Gumbel),
            r"OwnSum.log_prob returns the shape \[3, 4\] .* be \[3\]\. Sum",
        ),
    ],
)
def test_a_log_prob_of_another_shape_is_refused(family: Conditional, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        declared(family)


def test_a_distribution_over_vectors_keeps_its_event() -> None:
    one, whole = declared(Peaks(3, form=td.Gumbel)), declared(Peaks(3, form=vectors))
    noise = one.draw_noise(one.plan(), one.prepare(x=X), seed=0)
    torch.testing.assert_close(one.elbo(x=X, noise=noise).value, whole.elbo(x=X, noise=noise).value)


@dataclass(frozen=True, repr=False)
class Pathwise(Own):
    pathwise: ClassVar[bool] = True


def test_a_pathwise_family_needs_rsample() -> None:
    message = (
        r'q has "z \| x": Pathwise.*: Pathwise has pathwise = True, but its distribution Drawn has '
        r"no rsample\(\), so a sample has no gradient\. Add a method rsample\(\)"
    )
    with pytest.raises(ValueError, match=message):
        Model({"z": Normal(2), "x | z": Normal(3)}, {"z | x": Pathwise(form=Drawn)})
