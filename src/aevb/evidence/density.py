"""log p(x, z) and the initial density of annealing, as functions of all continuous latents.

The latents of a row are one unconstrained vector u. Latents with a bounded support are transformed
by torch's bijection, with its Jacobian. Finite latents are summed exactly inside both densities, so
both densities are differentiable by u.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributions import Transform, biject_to

from aevb.derive.axes import SAMPLES, expand_axis
from aevb.derive.dependence import Axis
from aevb.derive.plan import Plan, derive
from aevb.estimate.batch import split_latents
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.estimators import Estimate
from aevb.estimate.keys import mask_of, real_steps
from aevb.evidence.sampling import draw_latents, inner_sum

STARTS = ("posterior", "prior")
WARM_UP = 3  # warm-up calls before a CUDA graph is captured, so that libraries are initialised
# (u, β) → log f₀, log f₁, ∇ log f_β
Slope = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def why_not_from_posterior(model: DeclaredModel) -> str | None:
    """Return why annealing cannot start from q; None if it can."""
    plan = derive(model.graph, samples=2, sampling=True)
    for name in plan.drawn:
        if by_bayes := next(
            (other for other in plan.enumerated if Axis(other) in plan.values[name]), None
        ):
            return f"q draws {name} for each value of {by_bayes}, which follows by Bayes' rule"
    return None


class Path:
    """log f₀ and log f₁, [C, N] each, of C chains u [C, N, D].

    f₀ is normalised and can be sampled; ∫ f₁ du = p(x). f₁ = p(x, z). f₀ is q(z|x) for
    ``start="posterior"``; for "prior" it is the product of p's factors of the latents given the
    data.
    """

    def __init__(self, model: DeclaredModel, batch: Mapping[str, Tensor], start: str) -> None:
        graph = model.graph
        self.model, self.graph, self.batch, self.start = model, graph, batch, start
        self.n, self.steps = model._extent(batch)
        self.clamped, self.partial = split_latents(graph, batch)
        unknown = [name for name in graph.latents if name not in self.clamped]
        self.latents = [name for name in unknown if not graph.rule("p", name).spec.finite]
        self.sums = [name for name in unknown if name not in self.latents]
        self.plan: Plan = model.plan(
            how=dict.fromkeys(self.sums, "sum"),
            bound="iwae",
            clamped=self.clamped | frozenset(self.latents),
            partial=self.partial,
        )
        self.maps: dict[str, Transform] = {
            name: biject_to(graph.rule("p", name).spec.support) for name in self.latents
        }
        self.times = {name: self.steps if graph.timed[name] else 1 for name in self.latents}
        self.widths = {
            name: self.maps[name].inverse_shape(torch.Size([graph.size(name)]))[0]
            for name in self.latents
        }
        self.seen = {name: batch[mask_of(name)] for name in self.latents if mask_of(name) in batch}

    # Coordinates ----------------------------------------------------------------------------------

    def coordinates(self, values: Mapping[str, Tensor]) -> Tensor:
        """Map the latents' values, [C, T or 1, N, d] each, to u [C, N, D]."""
        parts = []
        for name in self.latents:
            value = self._inside(name, values[name])
            part = self.maps[name].inv(value)
            parts.append(part.transpose(-3, -2).flatten(-2).expand(-1, self.n, -1))
        return torch.cat(parts, -1)

    def _inside(self, name: str, value: Tensor) -> Tensor:
        """Replace padded and known values by a value of the support (unused coordinates)."""
        fill = torch.full_like(value, self.graph.rule("p", name).spec.fill)
        real = real_steps(self.batch, timed=self.graph.timed[name])
        if real is not None:
            value = torch.where(real, value, fill)
        return torch.where(self.seen[name], fill, value) if name in self.seen else value

    def free(self) -> Tensor:
        """Mask of coordinates in use, [N, D]: 0 for known values and padded steps, else 1."""
        like, parts = self.model._parameter(), []
        for name in self.latents:
            mask = torch.ones(self.times[name], self.n, 1, dtype=torch.bool, device=like.device)
            real = real_steps(self.batch, timed=self.graph.timed[name])
            if real is not None:
                mask = mask & real
            if name in self.seen:
                mask = mask & ~self.seen[name][..., :1]
            parts.append(mask.expand(-1, -1, self.widths[name]).transpose(0, 1).flatten(1))
        return torch.cat(parts, -1).to(like.dtype)

    def values(self, u: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the latents' values at u, and log |dz/du|, [C, N], of the coordinates in use."""
        found, log_jacobian = {}, u.new_zeros(u.shape[:-1])
        sizes = [self.times[name] * self.widths[name] for name in self.latents]
        for name, part in zip(self.latents, u.split(sizes, -1), strict=True):
            # [C, T, N, width]
            part = part.unflatten(-1, (self.times[name], self.widths[name])).transpose(-3, -2)
            value = self.maps[name](part)
            jacobian = self.maps[name].log_abs_det_jacobian(part, value)
            jacobian = (jacobian.sum(-1) if jacobian.dim() == part.dim() else jacobian).unsqueeze(
                -1
            )
            if name in self.seen:
                value = torch.where(self.seen[name], self.batch[name], value)
                jacobian = torch.where(
                    self.seen[name][..., :1], torch.zeros_like(jacobian), jacobian
                )
            real = real_steps(self.batch, timed=self.graph.timed[name])
            if real is not None:
                value, jacobian = (
                    torch.where(real, value, torch.zeros_like(value)),
                    torch.where(real, jacobian, torch.zeros_like(jacobian)),
                )
            found[name] = value
            log_jacobian = log_jacobian + jacobian.sum((-3, -1))
        return found, log_jacobian

    # Densities ------------------------------------------------------------------------------------

    def __call__(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log f₀, log f₁) at u."""
        values, log_jacobian = self.values(u)
        rows = {
            name: value for name, value in self.batch.items() if name[:-1] not in self.seen
        } | values
        working = Estimate(self.plan, self.model.factors, rows, {})
        likelihoods, kls = working.terms()
        joint = sum(likelihoods.values(), torch.zeros(())) - sum(kls.values(), torch.zeros(()))
        base = self._base(working)
        return self._flat(inner_sum(working, base), u) + log_jacobian, self._flat(
            inner_sum(working, joint), u
        ) + log_jacobian

    def _base(self, working: Estimate) -> Tensor:
        """Return Σ log q (or log p) of the unknown latents, for every enumerated value."""
        total = torch.zeros(())
        for name in (*self.latents, *self.sums):
            if self.start == "prior":
                part = working.log_p(name)
            else:
                part = working.log_w(name) if name in self.sums else working.log_q(name)
            seen = self.batch.get(mask_of(name))
            part = (
                part if seen is None else torch.where(seen[..., :1], torch.zeros_like(part), part)
            )
            total = total + (working.over_steps(part) if self.graph.timed[name] else part)
        return total

    def _flat(self, total: Tensor, u: Tensor) -> Tensor:
        return (
            expand_axis(total, SAMPLES, u.shape[0])
            .expand(*[1] * (total.dim() - 4), u.shape[0], 1, self.n, 1)
            .reshape(u.shape[:-1])
        )

    def gradient(self, u: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (log f₀, log f₁, ∇u log f_β) with log f_β = (1 − β) log f₀ + β log f₁, β [N]."""
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            start, end = self(u)
            (slope,) = torch.autograd.grad(torch.lerp(start, end, beta).sum(), u)
        return start.detach(), end.detach(), slope

    # Initial distribution -------------------------------------------------------------------------

    def draw(self, chains: int) -> Tensor:
        """Draw u ~ f₀, [C, N, D]."""
        if self.start == "prior":
            return self.coordinates(draw_latents(self.model, self.batch, chains))
        plan = derive(
            self.graph, samples=chains, clamped=self.clamped, partial=self.partial, sampling=True
        )
        working = Estimate(
            plan, self.model.factors, self.batch, self.model.draw_noise(plan, self.batch)
        )
        values = {name: working.program.values[name] for name in self.latents}
        return self.coordinates(
            {
                name: value.reshape(value.shape[-4:]).expand(chains, *value.shape[-3:])
                for name, value in values.items()
            }
        )

    def scale(self) -> Tensor:
        """Return the standard deviation of f₀ per coordinate, [N, D]: the unit of step sizes."""
        spread = self.draw(64).std(0)
        free = self.free() > 0
        return torch.where(free & (spread > 0), spread, torch.ones_like(spread))


def replayed(path: Path, chains: int) -> Slope:
    """Return ``path.gradient`` for this number of chains, as a CUDA graph on a GPU.

    The gradient consists of small kernels, which take longer to launch than to run.
    """
    free = path.free()
    if free.device.type != "cuda":
        return path.gradient
    u, beta = free.new_zeros(chains, *free.shape), free.new_full((path.n,), 0.5)
    side_stream, now = torch.cuda.Stream(free.device), torch.cuda.current_stream(free.device)
    side_stream.wait_stream(now)
    with torch.cuda.stream(side_stream):
        for _ in range(WARM_UP):
            path.gradient(u, beta)
    now.wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            found = path.gradient(u, beta)
    # A user-defined family may read values on the host, which a CUDA graph cannot capture.
    except RuntimeError:
        return path.gradient

    def replay(place: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u.copy_(place)
        beta.copy_(at)
        graph.replay()
        start, end, slope = found
        return start.clone(), end.clone(), slope.clone()

    return replay


def temperatures(count: int, steepness: float = 4.0) -> Tensor:
    """Return 0 = β₀ < … < β_J = 1 on a sigmoid schedule, finest near 0 and 1."""
    raw = torch.linspace(-steepness, steepness, count + 1, dtype=torch.float64).sigmoid()
    return (raw - raw[0]) / (raw[-1] - raw[0])
