"""check_family: right distributions pass every check, and each wrong member is named."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributions as td
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import constraints

from aevb import Conditional, Model, Normal, check_family, register_kl
from aevb.declare.families import FAMILIES
from aevb.runtime.checked_files import DataWarning


def two(first: float, second: float) -> Tensor:
    return torch.tensor([first, second], dtype=torch.float32)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"Mixture"}))
def test_families_of_the_library_pass(name: str) -> None:
    report = check_family(FAMILIES[name]())
    assert report.ok, report
    members = {finding.member for finding in report.findings if finding.ok}
    assert {"log_prob", "mean", "variance"} <= members


@pytest.mark.parametrize(
    "dist",
    [
        td.Normal(two(0, 100), two(1, 0.01)),
        td.Gamma(two(0.5, 30), two(1, 3)),
        td.Beta(two(0.5, 2), two(0.5, 5)),
        td.StudentT(two(2.5, 5), two(0, 1), two(1, 3)),
        td.LogNormal(two(0, 1), two(1, 0.3)),
        td.Uniform(two(0, 1), two(1, 3)),
        td.Cauchy(two(0, 1), two(1, 5)),
        td.Weibull(two(1, 2), two(0.7, 3)),
        td.InverseGamma(two(3, 5), two(1, 2)),
        td.Pareto(two(1, 2), two(3, 5)),
        td.Poisson(two(0.2, 40)),
        td.NegativeBinomial(two(0.5, 3), logits=two(1, 0)),
        td.Binomial(torch.tensor(10), logits=two(0, 1)),
        td.Categorical(logits=torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])),
        td.MultivariateNormal(torch.zeros(2, 3), torch.eye(3)),
        td.MixtureSameFamily(
            td.Categorical(logits=torch.zeros(2, 2)),
            td.Normal(
                torch.tensor([[0.0, 5.0], [-5.0, 5.0]]), torch.tensor([[1.0, 0.1], [0.05, 2]])
            ),
        ),
    ],
    ids=lambda dist: type(dist).__name__,
)
def test_distributions_of_torch_pass(dist: td.Distribution) -> None:
    report = check_family(dist)
    assert report.ok, report
    assert "log_prob" in {finding.member for finding in report.findings if finding.ok}


class Inflated(td.Distribution):
    """A Poisson, or 0 with the probability of a gate."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.nonnegative_integer

    def __init__(self, gate: Tensor, rate: Tensor) -> None:
        self.gate, self.rate = gate, rate
        super().__init__(rate.shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        count = td.Poisson(self.rate, validate_args=False).log_prob(value)
        count = count + F.logsigmoid(-self.gate)
        return torch.where(value == 0, torch.logaddexp(count, F.logsigmoid(self.gate)), count)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        rate = self.rate.expand(self._extended_shape(torch.Size(sample_shape)))
        return torch.poisson(rate) * (torch.rand_like(rate) > self.gate.sigmoid())

    @property
    def mean(self) -> Tensor:
        return self.gate.neg().sigmoid() * self.rate


class WrongConstant(Inflated):
    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value) + 1


class WrongMean(Inflated):
    @property
    def mean(self) -> Tensor:
        return self.rate


class WrongDraws(Inflated):
    def sample(self, sample_shape: Any = ()) -> Tensor:
        return torch.poisson(self.rate.expand(self._extended_shape(torch.Size(sample_shape))))


class AmountOrZero(Inflated):
    """A log-normal amount, or 0: a point mass beside a density."""

    support = constraints.nonnegative

    def log_prob(self, value: Tensor) -> Tensor:
        amount = td.LogNormal(self.rate, 1.0, validate_args=False).log_prob(value.clamp_min(1e-300))
        return torch.where(value == 0, F.logsigmoid(self.gate), amount + F.logsigmoid(-self.gate))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        rate = self.rate.expand(self._extended_shape(torch.Size(sample_shape)))
        return (rate + torch.randn_like(rate)).exp() * (torch.rand_like(rate) > self.gate.sigmoid())


@dataclass(frozen=True, repr=False)
class Counts(Conditional):
    form: Callable[..., td.Distribution] = Inflated
    support = constraints.nonnegative_integer

    def heads(self, d: int) -> dict[str, int]:
        return {"gate": d, "log_rate": d}

    def distribution(self, gate: Tensor, log_rate: Tensor) -> td.Distribution:
        return self.form(gate, log_rate.exp())


class Wide(td.Normal):
    def rsample(self, sample_shape: Any = ()) -> Tensor:
        return self.loc + 2 * (super().rsample(sample_shape) - self.loc)


class Detached(td.Normal):
    def rsample(self, sample_shape: Any = ()) -> Tensor:
        return self.loc.detach() + super().rsample(sample_shape) - self.loc


class WrongEntropy(td.Normal):
    def entropy(self) -> Tensor:
        return super().entropy() + 0.1


@dataclass(frozen=True, repr=False)
class Own(Conditional):
    form: Callable[..., td.Distribution] = td.Normal
    pathwise: ClassVar[bool] = True
    has_entropy: ClassVar[bool] = True

    def heads(self, d: int) -> dict[str, int]:
        return {"loc": d, "scale": d}

    def distribution(self, loc: Tensor, scale: Tensor) -> td.Distribution:
        return self.form(loc, F.softplus(scale))


@dataclass(frozen=True, repr=False)
class WrongKL(Own):
    pass


@register_kl(WrongKL, WrongKL)
def _zero(q: Any, p: Any) -> Tensor:
    return torch.zeros_like(q.loc).sum(-1)


@dataclass(frozen=True, repr=False)
class Vectors(Own):
    shift: float = 0.0
    pathwise: ClassVar[bool] = False
    has_entropy: ClassVar[bool] = False

    def distribution(self, loc: Tensor, scale: Tensor) -> td.Distribution:
        return td.Independent(td.Normal(loc, F.softplus(scale)), 1)

    def log_prob(self, dist: td.Distribution, value: Tensor, present: Any = None) -> Tensor:
        return dist.log_prob(value) + self.shift


RIGHT = [Counts(), Counts(form=AmountOrZero), Own(), Vectors(3)]
WRONG = [
    (Counts(form=WrongConstant), "log_prob", r"exp\(log_prob\) sums to 2.718, not 1, at gate = "),
    (Counts(form=WrongMean), "mean", "is 1.489, but log_prob has the mean 0.3778"),
    (Counts(form=WrongDraws), "sample", "draws do not follow log_prob .* but log_prob has"),
    (Own(form=Wide), "rsample", "draws do not follow log_prob"),
    (Own(form=Detached), "gradient of rsample", "by loc is 0, but log_prob gives 0.57"),
    (Own(form=WrongEntropy), "entropy", "is 0.5617, but log_prob gives 0.4617"),
    (WrongKL(), "KL(WrongKL ‖ WrongKL)", "is 0, but log_prob gives 1.337"),
    (Vectors(3, shift=1.0), "log_prob", r"exp\(log_prob\) integrates to 2\.\d+ ± 0\.\d+, not 1"),
]


def declared(family: Conditional) -> Model:
    return Model({"z": Normal(1), "x | z": family}, {"z | x": Normal()}, seed=0)


@pytest.mark.parametrize("family", RIGHT, ids=repr)
def test_right_families_of_the_user_pass(family: Conditional) -> None:
    report = check_family(family, size=3)
    assert report.ok, report
    assert {"log_prob"} <= {finding.member for finding in report.findings if finding.ok}
    Model({"z": Normal(1), "x | z": type(family)(3)}, {"z | x": Normal()})


@pytest.mark.parametrize(
    ("family", "member", "text"), WRONG, ids=[f"{one!r}-{member}" for one, member, _ in WRONG]
)
def test_a_wrong_member_is_named(family: Conditional, member: str, text: str) -> None:
    report = check_family(family)
    assert member in {finding.member for finding in report.failed}, report
    sized = type(family)(
        **{name: getattr(family, name) for name in vars(family) if name != "size"}, size=3
    )
    with pytest.warns(DataWarning, match=rf'p has "x \| z": .* contradict each other.*{text}'):
        declared(sized)


def test_one_warning_for_a_family_in_p_and_q() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Model({"z": WrongKL(2), "x | z": Normal(3)}, {"z | x": WrongKL()})
    assert [one.category for one in found] == [DataWarning]


def test_the_check_leaves_the_random_numbers_of_torch_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    check_family(Own(2))
    assert torch.equal(torch.rand(2), expected)


def test_the_report_prints_what_was_checked() -> None:
    lines = repr(check_family(Counts(form=WrongConstant))).splitlines()
    assert lines[0].endswith(": 1 of 3 fail")
    assert lines[1].split()[:2] == ["log_prob", "WRONG"]
    assert lines[-1].split(maxsplit=2)[2] == "not checked: the distribution has none"


def test_arguments_with_other_names_than_the_heads_are_named():
    class Misnamed(Normal):
        def distribution(self, mean, sd):
            return td.Normal(mean, F.softplus(sd))

    found = check_family(Misnamed())
    assert [one.member for one in found.failed] == ["distribution"]
    assert "the arguments of distribution have the names of heads" in found.failed[0].text
