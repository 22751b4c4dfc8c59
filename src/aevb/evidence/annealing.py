"""Annealed importance sampling (AIS) with Hamiltonian Monte Carlo, and bidirectional Monte Carlo.

Chains start at f₀ and pass through f_β ∝ f₀^(1−β) p(x, z)^β, with β from 0 to 1, by transitions
that leave each f_β invariant. The weight of a chain, Π f_{β_j}(z_j) / f_{β_{j−1}}(z_j), has the
mean p(x) for any such transitions. Better transitions and more temperatures reduce its variance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aevb.compiled_step.gradients import weights_fixed
from aevb.estimate.ancestral import fixed_values, sample
from aevb.estimate.batch import prepare
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.keys import mask_of
from aevb.evidence.density import STARTS, Path, replayed, temperatures, why_not_from_posterior
from aevb.evidence.memory_limit import narrow, pieces, room
from aevb.evidence.methods import advised, why_not_annealed
from aevb.evidence.result import Evidence, count
from aevb.evidence.sampling import LEAST, Memory
from aevb.evidence.weights import Weights
from aevb.runtime.seeding import generator

CHAINS = 16
# Target acceptance rate, adaptation rate of the step size, and relative jitter of the step size.
TARGET, RATE, JITTER = 0.75, 0.3, 0.2
COARSE = 4  # the preliminary run has this many times fewer temperatures
KEPT = 0.2  # share of the temperatures that keeps the sigmoid schedule


@dataclass(frozen=True)
class AIS:
    """Settings of annealed importance sampling (AIS).

    Arguments:
        temperatures: The number of steps from the start to p(x, z).
        leapfrog: The number of leapfrog steps per Hamiltonian transition.
        start: The initial distribution: "posterior" for q(z|x), "prior" for p(z), or None for q
            where that is possible.

    >>> import torch
    >>> from aevb import zoo
    >>> model, method = zoo.fa(x=3, z=2), AIS(temperatures=20, leapfrog=2)
    >>> model.log_evidence(x=torch.zeros(4, 3), method=method, samples=4, seed=0).value.shape
    torch.Size([4])
    >>> method.begin(model)
    'posterior'
    """

    temperatures: int = 1000
    leapfrog: int = 5
    start: str | None = None

    def __post_init__(self) -> None:
        for name in ("temperatures", "leapfrog"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"AIS: {name} is a positive whole number, got {value!r}.")
        if self.start is not None and self.start not in STARTS:
            raise ValueError(f'AIS: start is "posterior" or "prior", got {self.start!r}.')

    def begin(self, model: DeclaredModel) -> str:
        """Return the initial distribution for a model; raise ValueError if AIS does not apply.

        Arguments:
            model: The model.
        """
        if reason := why_not_annealed(model):
            raise ValueError(
                f'method="ais" moves latents by gradients, but {reason}. Use '
                f'method="{advised(model)}".'
            )
        reason = why_not_from_posterior(model)
        if self.start == "posterior" and reason:
            raise ValueError(f'AIS(start="posterior"): {reason}. Use start="prior".')
        return self.start or ("prior" if reason else "posterior")


def annealed(
    model: DeclaredModel,
    batch: Mapping[str, Tensor],
    settings: AIS,
    *,
    chains: int = CHAINS,
    seed: int | None = None,
    memory: Memory = None,
) -> Evidence:
    """Estimate log p(x) by log 1/C Σ w over C chains per example."""
    start = _checked(model, batch, settings, chains)
    found, accepted = [], []
    with model._evaluating(seed), weights_fixed():
        for rows in _blocks(model, batch, start, chains, memory):
            log_weights, acceptance = _forward(Path(model, rows, start), settings, chains)
            found.append(_weights(log_weights))
            accepted.append(acceptance)
    return _evidence(model, found, accepted, settings, chains, start)


def _forward(path: Path, settings: AIS, chains: int) -> tuple[Tensor, Tensor]:
    """Run forward chains on one block of rows; the memory is freed before the next block."""
    return Moves(path, settings, chains).forward(path.draw(chains))


def _both_ways(
    path: Path, truth: Mapping[str, Tensor], settings: AIS, chains: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Run forward chains, and backward chains from the simulated latents, on one block of rows."""
    moves = Moves(path, settings, chains)
    exact = path.coordinates({name: truth[name].unsqueeze(0) for name in path.latents}).expand(
        chains, -1, -1
    )
    return moves.forward(path.draw(chains)), moves.backward(exact)


def _checked(model: DeclaredModel, batch: Mapping[str, Tensor], settings: AIS, chains: int) -> str:
    if isinstance(chains, bool) or not isinstance(chains, int) or chains < LEAST:
        raise ValueError(
            f'samples is the number of chains that method="ais" runs per example, at least '
            f"{LEAST}. Got {chains!r}."
        )
    start, graph = settings.begin(model), model.graph
    if not any(
        name not in batch or mask_of(name) in batch
        for name in graph.latents
        if not graph.rule("p", name).spec.finite
    ):
        raise ValueError(
            'method="ais" has nothing to move: every continuous latent is known. '
            'method="importance" sums the others exactly.'
        )
    return start


def _blocks(
    model: DeclaredModel, batch: Mapping[str, Tensor], start: str, chains: int, memory: Memory
) -> list[dict[str, Tensor]]:
    """Split the rows into blocks whose gradients fit into the memory limit."""
    n, _ = model._extent(batch)
    few = narrow(batch, 0, min(n, 2))

    def run(rows: int, c: int) -> object:
        path = Path(model, narrow(few, 0, rows), start)
        u = path.draw(c)
        # A transition holds the old and the new position, and the momentum.
        return u, u.clone(), u.clone(), path.gradient(u, u.new_full((rows,), 0.5))

    rows, _ = pieces(run, n, chains, room(memory, model.parameters(), batch), smallest=chains)
    return [narrow(batch, i, min(rows, n - i)) for i in range(0, n, rows)]


def _weights(log_weights: Tensor) -> Weights:
    weights = Weights(log_weights.shape[1], len(log_weights), log_weights.device, tail=False)
    weights.add(log_weights)
    return weights


def _evidence(
    model: DeclaredModel,
    found: Sequence[Weights],
    accepted: Sequence[Tensor],
    settings: AIS,
    chains: int,
    start: str,
) -> Evidence:
    value, stderr, ess = (
        torch.cat([getattr(weights, name) for weights in found])
        for name in ("value", "stderr", "ess")
    )
    acceptance, n, notes = torch.cat(list(accepted)), len(value), []
    enough = max(1.5, chains / 4)
    few = (ess < enough) & value.isfinite()
    if bad := int(few.sum()):
        notes.append(
            f"{count(bad, n)} have an effective sample size below {enough:g} of {chains} chains, "
            f"so that the value may be too low: raise the temperatures, "
            f"AIS(temperatures={4 * settings.temperatures}), or samples (chains)."
        )
    if stuck := int(((acceptance < 0.2) & value.isfinite()).sum()):
        notes.append(
            f"{count(stuck, n)} accept fewer than 20 % of the Hamiltonian moves: raise leapfrog, "
            f"or check p for very steep densities."
        )
    if lost := int((~value.isfinite()).sum()):
        notes.append(
            f"{count(lost, n)} have no finite evidence: p or q gives NaN or zero probability there."
        )
    dtype = model._parameter().dtype
    diagnostics: dict[str, Tensor | float | int] = {
        "chains": chains,
        "temperatures": settings.temperatures,
        "leapfrog": settings.leapfrog,
    }
    return Evidence(
        value.to(dtype),
        stderr.to(dtype),
        f"ais from {start}",
        diagnostics | {"ess": ess, "acceptance": acceptance},
        tuple(notes),
    )


class Moves:
    """Hamiltonian Monte Carlo transitions along an annealing path.

    A preliminary run finds temperatures and step sizes for each example, which are then frozen. It
    passes through every COARSE-th temperature of the sigmoid schedule. At each one it finds the
    step size with the target acceptance rate and the standard deviation of log f₁ − log f₀. In
    equilibrium, the variance of a log-weight is Σ (Δβ)² Var, which is least if every step has the
    same share of ∫ sd dβ. Most of the temperatures are placed so. A share of the sigmoid schedule
    remains, because the standard deviation is itself only estimated.
    """

    def __init__(self, path: Path, settings: AIS, chains: int) -> None:
        self.path, self.leapfrog = path, settings.leapfrog
        self.free, self.scale, self.gradient = path.free(), path.scale(), replayed(path, chains)
        coarse = temperatures(max(2, settings.temperatures // COARSE)).to(self.free)
        steps, spreads = self._preliminary(path.draw(chains), coarse)
        self.betas = _equal_shares(coarse, spreads, settings.temperatures)  # [J + 1, N]
        where = torch.searchsorted(coarse[1:-1].contiguous(), self.betas)
        self.steps = steps.gather(0, where)

    def _preliminary(self, u: Tensor, betas: Tensor) -> tuple[Tensor, Tensor]:
        """Return step sizes and standard deviations of log f₁ − log f₀, [J, N].

        There is one row per temperature, without the last.
        """
        size = self.free.sum(-1).clamp_min(1.0)
        step, steps, spreads = size**-0.25, [], []
        start, end = self.path(u)
        for j in range(len(betas) - 1):
            spreads.append((end - start).std(0))
            steps.append(step)
            u, start, end, accept = self.move(u, betas[j + 1].expand(self.path.n), step)
            step = step * torch.exp(RATE * (accept.mean(0) - TARGET))
        return torch.stack(steps), torch.stack(spreads)

    def move(self, u: Tensor, beta: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One Hamiltonian transition that leaves f_β invariant.

        Returns (u, log f₀, log f₁, acceptance probability); the last three are [C, N].
        """
        start, end, slope = self.gradient(u, beta)
        drawing: Any = {"dtype": u.dtype, "device": u.device, "generator": generator(u.device)}
        momentum = torch.randn(u.shape, **drawing) * self.free
        # The step sizes are jittered, so that no trajectory is periodic.
        unequal = 1 + JITTER * (2 * torch.rand(len(u), 1, 1, **drawing) - 1)
        stride = step.unsqueeze(-1) * unequal * self.scale
        old = torch.lerp(start, end, beta) - momentum.square().sum(-1) / 2
        place, new_start, new_end = u, start, end
        for _ in range(self.leapfrog):
            momentum = torch.addcmul(momentum, stride, slope, value=0.5)
            place = torch.addcmul(place, stride, momentum)
            new_start, new_end, slope = self.gradient(place, beta)
            momentum = torch.addcmul(momentum, stride, slope, value=0.5)
        new = torch.lerp(new_start, new_end, beta) - momentum.square().sum(-1) / 2
        accept = (new - old).exp().clamp_max(1.0).nan_to_num(0.0)
        taken = torch.rand(accept.shape, **drawing) < accept
        return (
            torch.where(taken.unsqueeze(-1), place, u),
            torch.where(taken, new_start, start),
            torch.where(taken, new_end, end),
            accept,
        )

    def forward(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Run chains from u ~ f₀ to f₁.

        Returns log-weights [C, N] with E[w] = p(x), and the mean acceptance rate, [N].
        """
        start, end = self.path(u)
        total, accepted = torch.zeros_like(start, dtype=torch.float64), torch.zeros_like(start[0])
        last = len(self.betas) - 1
        for j in range(1, last + 1):
            total += (self.betas[j] - self.betas[j - 1]) * (end - start).double()
            if j < last:  # at β = 1 the weight is complete
                u, start, end, accept = self.move(u, self.betas[j], self.steps[j])
                accepted += accept.mean(0)
        return total, accepted / (last - 1)

    def backward(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Run chains from u ~ p(z|x) back to f₀, with the same transitions in reverse order.

        Returns log-weights with E[1/w] = 1/p(x), and the mean acceptance rate.
        """
        start, end = self.path(u)
        total, accepted = torch.zeros_like(start, dtype=torch.float64), torch.zeros_like(start[0])
        last = len(self.betas) - 1
        for j in range(last, 0, -1):
            if j < last:
                u, start, end, accept = self.move(u, self.betas[j], self.steps[j])
                accepted += accept.mean(0)
            total += (self.betas[j] - self.betas[j - 1]) * (end - start).double()
        return total, accepted / (last - 1)


def _equal_shares(betas: Tensor, spreads: Tensor, count: int) -> Tensor:
    """Place temperatures, [count + 1, N], with equal shares of ∫ sd dβ.

    A share KEPT follows the sigmoid schedule.
    """
    lengths = spreads.nan_to_num(0.0, 0.0, 0.0) * betas.diff().unsqueeze(-1)
    lengths = lengths / lengths.sum(0).clamp_min(torch.finfo(betas.dtype).tiny)
    lengths = (1 - KEPT) * lengths + KEPT / len(lengths)
    done = torch.cat(
        [torch.zeros_like(lengths[:1]), (lengths / lengths.sum(0)).cumsum(0)]
    ).T.contiguous()  # [N, J + 1]
    wanted = (
        torch.linspace(0, 1, count + 1, dtype=betas.dtype, device=betas.device)
        .expand(len(done), -1)
        .contiguous()
    )
    right = torch.searchsorted(done, wanted).clamp(1, len(betas) - 1)
    low, high = done.gather(1, right - 1), done.gather(1, right)
    share = ((wanted - low) / (high - low)).clamp(0, 1)
    found = torch.lerp(betas[right - 1], betas[right], share).T
    found[0], found[-1] = 0.0, 1.0
    return found.contiguous()


# Bidirectional Monte Carlo ------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Bidirectional:
    """Stochastic lower and upper bounds on log p(x) of simulated examples."""

    lower: Evidence
    upper: Evidence
    drawn: dict[str, Tensor]  # simulated values, including the latents

    @property
    def gap(self) -> Tensor:
        """Upper minus lower bound per example; in expectation, it bounds the error of both."""
        return self.upper.value - self.lower.value

    @property
    def mean(self) -> float:
        return float(self.gap.double().mean())

    @property
    def error(self) -> float:
        """Standard error of the mean gap, from its variation over the examples."""
        return (
            float(self.gap.double().std()) / len(self.gap) ** 0.5 if len(self.gap) > 1 else math.nan
        )

    def __repr__(self) -> str:
        return (
            f"gap {self.mean:.4f} ± {self.error:.2g} nats\nlower: {self.lower}\nupper: {self.upper}"
        )


def bidirectional(
    model: DeclaredModel,
    n: int = 100,
    *,
    settings: AIS | None = None,
    chains: int = CHAINS,
    steps: int | None = None,
    seed: int | None = None,
    memory: Memory = None,
    **fixed: Any,
) -> Bidirectional:
    """Measure the accuracy of annealing on a model by bidirectional Monte Carlo.

    z, x ~ p are simulated, so z is an exact draw from p(z|x) (Grosse et al. 2015). Forward chains
    give a lower bound on log p(x); backward chains from z give an upper bound. Both hold in
    expectation.

    Arguments:
        model: The model.
        n: The number of simulated examples.
        settings: Those of annealing; None is ``AIS()``.
        chains: The number of chains per example and direction.
        steps: The length of simulated sequences.
        seed: Decides the draws; None uses torch's global generator.
        memory: Limits the memory, as in :meth:`Model.log_evidence`.
        **fixed: The given variables, and any other variable that ``sample`` can fix.

    Returns:
        The lower and the upper bound, each an :class:`Evidence`, and the simulated data.

    Raises:
        ValueError: A given variable is missing, or AIS does not apply.

    >>> from aevb import zoo
    >>> settings = AIS(temperatures=20, leapfrog=2)
    >>> found = bidirectional(zoo.fa(x=3, z=2), 4, settings=settings, chains=4, seed=0)
    >>> found.lower.value.shape, found.upper.value.shape
    (torch.Size([4]), torch.Size([4]))
    """
    settings, graph = settings or AIS(), model.graph
    for name in graph.given:
        if name not in fixed:
            raise ValueError(
                f"{name!r} is a given variable: pass a value for it, bidirectional(model, "
                f"{name}=…)."
            )
    drawn = sample(model, n, fixed, steps=steps, seed=seed)
    given = fixed_values(model, n, steps or 1, {name: fixed[name] for name in graph.given})
    truth = (
        prepare(graph, drawn, like=model._parameter(), need=graph.stochastic, single=True) | given
    )
    batch = {
        name: value for name, value in truth.items() if name not in graph.latents or name in fixed
    }
    start = _checked(model, batch, settings, chains)
    lower: tuple[list[Weights], list[Tensor]] = ([], [])
    upper: tuple[list[Weights], list[Tensor]] = ([], [])
    at = 0
    with model._evaluating(None if seed is None else seed + 1), weights_fixed():
        for rows in _blocks(model, batch, start, chains, memory):
            path = Path(model, rows, start)
            forward, backward = _both_ways(path, narrow(truth, at, path.n), settings, chains)
            for sign, found, (log_weights, acceptance) in (
                (1, lower, forward),
                (-1, upper, backward),
            ):
                found[0].append(_weights(sign * log_weights))
                found[1].append(acceptance)
            at += path.n
    below = _evidence(model, *lower, settings, chains, start)
    above = _evidence(model, *upper, settings, chains, start)
    above = Evidence(
        -above.value, above.stderr, above.method + ", backwards", above.diagnostics, above.notes
    )
    return Bidirectional(below, above, drawn)
