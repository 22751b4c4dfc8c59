"""Densities, draws and expectations of the families, from their textbook formulas.

A family maps raw numbers ([…, heads]) to densities of values ([…, d]). Expectations under a
Gaussian are sums over Gauss–Hermite nodes. They are exact here, because the log-densities are
quadratic. Expectations under finite families are sums over all values.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

LOG_TWO_PI = math.log(2 * math.pi)
ROOT = math.log(math.e - 1)  # softplus(ROOT) is 1
COUNTS = 120  # sums over counts stop here


def softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros((), dtype=x.dtype))


def sigmoid(x: Tensor) -> Tensor:
    return torch.exp(-softplus(-x))


def log_normalised(x: Tensor) -> Tensor:
    return x - torch.logsumexp(x, -1, keepdim=True)


def masked_sum(each: Tensor, present: Tensor | None) -> Tensor:
    return (each if present is None else each * present.to(each.dtype)).sum(-1)


def gauss_hermite(d: int, count: int) -> tuple[Tensor, Tensor]:
    """Return nodes [count^d, d] and weights of E over N(0, I)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    grid = np.array(list(itertools.product(nodes, repeat=d))).reshape(-1, d)
    product = np.array(
        [math.prod(each) for each in itertools.product(weights / weights.sum(), repeat=d)]
    )
    return torch.from_numpy(grid), torch.from_numpy(product)


class Family:
    """The family of an entry: ``parts`` splits raw numbers and learned vectors into parameters."""

    noise: str | None = None
    values: Tensor | None = None

    def __init__(self, d: int, options: Any) -> None:
        self.d, self.options = d, options

    def heads(self) -> dict[str, int]:
        raise NotImplementedError

    def standard(self) -> Tensor:
        """Return the raw numbers of a root that is not learned."""
        return torch.zeros(sum(self.heads().values()), dtype=torch.float64)

    def split(self, raw: Tensor) -> list[Tensor]:
        return list(raw.split(list(self.heads().values()), -1))

    def density(self, raw: Tensor, vectors: dict[str, Tensor]) -> Any:
        raise NotImplementedError


class Distribution:
    """A distribution with log_prob and, if they exist, draw, expect, entropy and moments.

    ``expect`` is the expectation of a function of the value.
    """

    def log_prob(self, value: Tensor, present: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def draw(self, noise: Tensor) -> Tensor:
        raise NotImplementedError

    def expect(self, function: Any) -> Tensor:
        raise NotImplementedError

    def entropy(self) -> Tensor:
        return -self.expect(self.log_prob)

    def kl(self, other: Distribution) -> Tensor:
        return self.expect(lambda value: self.log_prob(value) - other.log_prob(value))


class Gaussian(Distribution):
    """N(loc, L Lᵀ)."""

    def __init__(self, loc: Tensor, factor: Tensor) -> None:
        self.loc, self.factor = loc, factor

    def log_prob(self, value: Tensor, present: Tensor | None = None) -> Tensor:
        gap, rows = value - self.loc, self.factor
        if present is not None:
            index = present.nonzero().flatten()
            gap, rows = gap[..., index], rows[..., index, :]
            if not len(index):
                return torch.zeros(
                    torch.broadcast_shapes(value.shape[:-1], self.loc.shape[:-1]), dtype=value.dtype
                )
        # The root of L Lᵀ for the known entries. L Lᵀ itself is not computed, because its condition
        # number is the square of the root's.
        root = torch.linalg.qr(rows.mT).R.mT
        gap = gap.unsqueeze(-1)
        lead = torch.broadcast_shapes(gap.shape[:-2], root.shape[:-2])
        white = torch.linalg.solve_triangular(
            root.expand(*lead, *root.shape[-2:]), gap.expand(*lead, *gap.shape[-2:]), upper=False
        )
        log_det = root.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
        return -0.5 * (white.square().sum((-2, -1)) + root.shape[-1] * LOG_TWO_PI) - log_det

    def draw(self, noise: Tensor) -> Tensor:
        return self.loc + (self.factor @ noise.unsqueeze(-1)).squeeze(-1)

    def expect(self, function: Any) -> Tensor:
        nodes, weights = gauss_hermite(self.loc.shape[-1], 3)
        return sum(
            weight * function(self.draw(node)) for node, weight in zip(nodes, weights, strict=True)
        )

    def moments(self) -> tuple[Tensor, Tensor]:
        return self.loc, (self.factor @ self.factor.mT).diagonal(dim1=-2, dim2=-1)


class Independent(Gaussian):
    """N(loc, diag scale²)."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc, self.scale = loc, scale

    def log_prob(self, value: Tensor, present: Tensor | None = None) -> Tensor:
        return masked_sum(
            -0.5 * ((value - self.loc) / self.scale) ** 2
            - torch.log(self.scale)
            - 0.5 * LOG_TWO_PI,
            present,
        )

    def draw(self, noise: Tensor) -> Tensor:
        return self.loc + self.scale * noise

    def moments(self) -> tuple[Tensor, Tensor]:
        return self.loc, self.scale**2 + 0 * self.loc


class NormalFamily(Family):
    noise = "normal"

    def heads(self) -> dict[str, int]:
        return (
            {"loc": self.d, "scale": self.d}
            if self.options.get("scale", "network") == "network"
            else {"loc": self.d}
        )

    def standard(self) -> Tensor:
        raw = super().standard()
        raw[self.d :] = ROOT
        return raw

    def scales(self, parts: list[Tensor], vectors: dict[str, Tensor]) -> Tensor:
        scale = self.options.get("scale", "network")
        if scale == "network":
            return softplus(parts[1])
        return (
            softplus(vectors["scale"])
            if scale == "learned"
            else torch.full((self.d,), float(scale), dtype=torch.float64)
        )

    def density(self, raw: Tensor, vectors: dict[str, Tensor]) -> Gaussian:
        parts = self.split(raw)
        return Independent(parts[0], self.scales(parts, vectors))


class MultivariateNormalFamily(Family):
    noise = "normal"

    def heads(self) -> dict[str, int]:
        own = (
            {"tril": self.d * (self.d + 1) // 2}
            if self.options.get("covariance", "network") == "network"
            else {}
        )
        return {"loc": self.d} | own

    def standard(self) -> Tensor:
        raw, position = super().standard(), self.d
        for row in range(self.d if len(self.heads()) > 1 else 0):
            raw[position + row] = ROOT
            position += row + 1
        return raw

    def density(self, raw: Tensor, vectors: dict[str, Tensor]) -> Gaussian:
        parts = self.split(raw)
        entries = parts[1] if len(parts) > 1 else vectors["tril"]
        rows, position = [], 0
        for row in range(self.d):
            own = list(entries[..., position : position + row + 1].unbind(-1))
            own[-1] = softplus(own[-1])
            rows.append(torch.stack(own + [torch.zeros_like(own[0])] * (self.d - row - 1), -1))
            position += row + 1
        return Gaussian(parts[0], torch.stack(rows, -2))


class MixtureOf(Distribution):
    def __init__(self, log_weights: Tensor, parts: list[Gaussian]) -> None:
        self.log_weights, self.parts = log_weights, parts

    def log_prob(self, value: Tensor, present: Tensor | None = None) -> Tensor:
        each = [
            part.log_prob(value, present) + self.log_weights[..., k]
            for k, part in enumerate(self.parts)
        ]
        return torch.logsumexp(torch.stack(torch.broadcast_tensors(*each)), 0)

    def moments(self) -> tuple[Tensor, Tensor]:
        weights = self.log_weights.exp()
        means, variances = zip(*(part.moments() for part in self.parts), strict=True)
        mean = sum(weights[..., k : k + 1] * means[k] for k in range(len(means)))
        second = sum(
            weights[..., k : k + 1] * (variances[k] + means[k] ** 2) for k in range(len(means))
        )
        return mean, second - mean**2


class MixtureFamily(Family):
    noise = "normal"

    @property
    def components(self) -> int:
        return self.options.get("components", 2)

    def heads(self) -> dict[str, int]:
        return {
            "weight": self.components,
            "loc": self.components * self.d,
            "scale": self.components * self.d,
        }

    def standard(self) -> Tensor:
        k, d = self.components, self.d
        loc = [-1 + 2 * i / (k - 1) if k > 1 else -1.0 for i in range(k) for _ in range(d)]
        return torch.tensor([0.0] * k + loc + [ROOT] * (k * d), dtype=torch.float64)

    def density(self, raw: Tensor, vectors: dict[str, Tensor]) -> MixtureOf:
        weight, loc, scale = self.split(raw)
        parts = []
        for k in range(self.components):
            own = slice(k * self.d, (k + 1) * self.d)
            parts.append(Independent(loc[..., own], softplus(scale[..., own])))
        return MixtureOf(log_normalised(weight), parts)


class Finite(Distribution):
    """Probabilities of a list of values.

    ``entries`` is log p of each entry being 1, and of being 0 if that counts.
    """

    def __init__(
        self, values: Tensor, log_one: Tensor, log_zero: Tensor | None, logits: Tensor
    ) -> None:
        self.values, self.log_one, self.log_zero, self.logits = values, log_one, log_zero, logits

    def log_prob(self, value: Tensor, present: Tensor | None = None) -> Tensor:
        if self.log_zero is None:
            return (
                (value * self.log_one).sum(-1)
                if present is None or bool(present.all())
                else torch.zeros_like((value * self.log_one).sum(-1))
            )
        return masked_sum(value * self.log_one + (1 - value) * self.log_zero, present)

    def expect(self, function: Any) -> Tensor:
        return sum(self.log_prob(value).exp() * function(value) for value in self.values)

    def draw(self, noise: Tensor) -> Tensor:
        moved = self.logits + noise
        if self.log_zero is not None:
            return (moved > 0).to(moved.dtype)
        return torch.nn.functional.one_hot(moved.argmax(-1), moved.shape[-1]).to(moved.dtype)

    def relax(self, noise: Tensor, temperature: float) -> Tensor:
        """Return the coordinate of the relaxed density: log ỹ, or logit ỹ."""
        moved = (self.logits + noise) / temperature
        return log_normalised(moved) if self.log_zero is None else moved

    def soft(self, coordinate: Tensor) -> Tensor:
        return coordinate.exp() if self.log_zero is None else sigmoid(coordinate)

    def relaxed_log_prob(self, coordinate: Tensor, temperature: float) -> Tensor:
        a = self.logits - temperature * coordinate
        if self.log_zero is None:
            c = a.shape[-1]
            return (
                math.lgamma(c)
                + (c - 1) * math.log(temperature)
                + a.sum(-1)
                - c * torch.logsumexp(a, -1)
            )
        return (math.log(temperature) + a - 2 * softplus(a)).sum(-1)


class OneHotFamily(Family):
    noise = "gumbel"

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        return torch.eye(self.d, dtype=torch.float64)

    def heads(self) -> dict[str, int]:
        return {"logits": self.d}

    def density(self, raw: Tensor, vectors: dict[str, Tensor]) -> Finite:
        return Finite(self.values, log_normalised(raw), None, log_normalised(raw))


class BernoulliFamily(Family):
    noise = "logistic"

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        return torch.tensor(list(itertools.product([0.0, 1.0], repeat=self.d)), dtype=torch.float64)

    def heads(self) -> dict[str, int]:
        return {"logits": self.d}

    def density(self, raw: Tensor, vectors: dict[str, Tensor]) -> Finite:
        return Finite(self.values, -softplus(-raw), -softplus(raw), raw)


class LaplaceDistribution(Distribution):
    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc, self.scale = loc, scale

    def log_prob(self, value: Tensor, present: Tensor | None = None) -> Tensor:
        return masked_sum(
            -torch.log(2 * self.scale) - (value - self.loc).abs() / self.scale, present
        )

    def draw(self, noise: Tensor) -> Tensor:
        return self.loc + self.scale * noise

    def entropy(self) -> Tensor:
        return (1 + torch.log(2 * self.scale) + 0 * self.loc).sum(-1)

    def kl(self, other: Distribution) -> Tensor:
        gap = (self.loc - other.loc).abs()  # type: ignore[attr-defined]
        mean_gap = gap + self.scale * torch.exp(-gap / self.scale)  # E|v − loc'|
        return (torch.log(other.scale / self.scale) + mean_gap / other.scale - 1).sum(-1)  # type: ignore[attr-defined]

    def moments(self) -> tuple[Tensor, Tensor]:
        return self.loc, 2 * self.scale**2 + 0 * self.loc


class LaplaceFamily(NormalFamily):
    noise = "laplace"

    def density(self, raw: Tensor, vectors: dict[str, Tensor]) -> Any:
        parts = self.split(raw)
        return LaplaceDistribution(parts[0], self.scales(parts, vectors))


class StudentDistribution(Distribution):
    def __init__(self, loc: Tensor, scale: Tensor, df: float) -> None:
        self.loc, self.scale, self.df = loc, scale, df

    def log_prob(self, value: Tensor, present: Tensor | None = None) -> Tensor:
        v = self.df
        constant = math.lgamma((v + 1) / 2) - math.lgamma(v / 2) - 0.5 * math.log(v * math.pi)
        each = (
            constant
            - torch.log(self.scale)
            - (v + 1) / 2 * torch.log1p(((value - self.loc) / self.scale) ** 2 / v)
        )
        return masked_sum(each, present)

    def draw(self, noise: Tensor) -> Tensor:
        return self.loc + self.scale * noise

    def entropy(self) -> Tensor:
        v = self.df
        digamma = lambda x: float(torch.digamma(torch.tensor(x, dtype=torch.float64)))  # noqa: E731
        log_beta = math.lgamma(v / 2) + math.lgamma(0.5) - math.lgamma((v + 1) / 2)
        constant = (
            (v + 1) / 2 * (digamma((v + 1) / 2) - digamma(v / 2)) + 0.5 * math.log(v) + log_beta
        )
        return (constant + torch.log(self.scale) + 0 * self.loc).sum(-1)


class StudentTFamily(NormalFamily):
    @property
    def noise(self) -> str:  # type: ignore[override]
        return "student"

    def density(self, raw: Tensor, vectors: dict[str, Tensor]) -> Any:
        parts = self.split(raw)
        return StudentDistribution(
            parts[0], self.scales(parts, vectors), self.options.get("df", 4.0)
        )


class PoissonDistribution(Distribution):
    def __init__(self, log_rate: Tensor) -> None:
        self.log_rate = log_rate

    def log_prob(self, value: Tensor, present: Tensor | None = None) -> Tensor:
        return masked_sum(
            value * self.log_rate - torch.exp(self.log_rate) - torch.lgamma(value + 1), present
        )

    def moments(self) -> tuple[Tensor, Tensor]:
        return self.log_rate.exp(), self.log_rate.exp()

    def kl(self, other: Distribution) -> Tensor:
        rate, gap = self.log_rate.exp(), self.log_rate - other.log_rate  # type: ignore[attr-defined]
        return (rate * gap - rate + other.log_rate.exp()).sum(-1)  # type: ignore[attr-defined]


class PoissonFamily(Family):
    def heads(self) -> dict[str, int]:
        return {"log_rate": self.d}

    def density(self, raw: Tensor, vectors: dict[str, Tensor]) -> Any:
        return PoissonDistribution(raw)


class NegativeBinomialDistribution(Distribution):
    def __init__(self, mean: Tensor, r: Tensor) -> None:
        self.mean, self.r = mean, r

    def log_prob(self, value: Tensor, present: Tensor | None = None) -> Tensor:
        r, m = self.r, self.mean
        each = (
            torch.lgamma(value + r)
            - torch.lgamma(value + 1)
            - torch.lgamma(r)
            + r * torch.log(r / (r + m))
            + value * torch.log(m / (r + m))
        )
        return masked_sum(each, present)


class NegativeBinomialFamily(Family):
    def heads(self) -> dict[str, int]:
        return {"log_mean": self.d} | (
            {"dispersion": self.d} if self.options.get("dispersion", "learned") == "network" else {}
        )

    def standard(self) -> Tensor:
        raw = super().standard()
        raw[self.d :] = ROOT
        return raw

    def density(self, raw: Tensor, vectors: dict[str, Tensor]) -> Any:
        parts, setting = self.split(raw), self.options.get("dispersion", "learned")
        r = (
            softplus(parts[1])
            if setting == "network"
            else softplus(vectors["dispersion"])
            if setting == "learned"
            else torch.tensor(float(setting))
        )
        return NegativeBinomialDistribution(parts[0].exp(), r.double())


class BetaDistribution(Distribution):
    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b

    def log_prob(self, value: Tensor, present: Tensor | None = None) -> Tensor:
        a, b = self.a, self.b
        each = (
            (a - 1) * torch.log(value)
            + (b - 1) * torch.log1p(-value)
            + torch.lgamma(a + b)
            - torch.lgamma(a)
            - torch.lgamma(b)
        )
        return masked_sum(each, present)


class BetaFamily(Family):
    def heads(self) -> dict[str, int]:
        return {"concentration1": self.d, "concentration0": self.d}

    def standard(self) -> Tensor:
        return torch.full((2 * self.d,), ROOT, dtype=torch.float64)

    def density(self, raw: Tensor, vectors: dict[str, Tensor]) -> Any:
        a, b = self.split(raw)
        return BetaDistribution(softplus(a), softplus(b))


class ContinuousBernoulliDistribution(Distribution):
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def log_prob(self, value: Tensor, present: Tensor | None = None) -> Tensor:
        each = (
            value * self.logits
            - softplus(self.logits)
            + torch.log(self.logits / torch.tanh(self.logits / 2))
        )
        return masked_sum(each, present)

    def draw(self, noise: Tensor) -> Tensor:
        """Draw by the quantile function: F(x) = (e^{ηx} − 1)/(e^η − 1)."""
        return torch.log1p(noise * torch.expm1(self.logits)) / self.logits


class ContinuousBernoulliFamily(Family):
    noise = "uniform"

    def heads(self) -> dict[str, int]:
        return {"logits": self.d}

    def density(self, raw: Tensor, vectors: dict[str, Tensor]) -> Any:
        return ContinuousBernoulliDistribution(raw)


FAMILIES: dict[str, type[Family]] = {
    "Normal": NormalFamily,
    "MultivariateNormal": MultivariateNormalFamily,
    "Mixture": MixtureFamily,
    "OneHot": OneHotFamily,
    "Bernoulli": BernoulliFamily,
    "Laplace": LaplaceFamily,
    "StudentT": StudentTFamily,
    "Poisson": PoissonFamily,
    "NegativeBinomial": NegativeBinomialFamily,
    "Beta": BetaFamily,
    "ContinuousBernoulli": ContinuousBernoulliFamily,
}
