"""Model: a declaration with its weights, and everything a user does with it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch  # noqa: F401 (the examples in docstrings use it)
from torch import Tensor

from aevb.declare.conditionals import Conditional
from aevb.declare.networks import Shape
from aevb.declare.serialization import deserialize, serialize
from aevb.derive.explain import Explanation, explain
from aevb.estimate import ancestral
from aevb.estimate.batch import prepare, split_latents
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.estimators import Bound, estimate
from aevb.estimate.keys import mask_of
from aevb.evidence import AIS, Evidence, Particles, log_evidence
from aevb.evidence.amortisation import Gap, split_gap
from aevb.model_folder import write_model
from aevb.posterior import Imputation, Posterior, impute, posterior_of
from aevb.posterior.training_record import Teaching
from aevb.runtime.contention import sharing_cores
from aevb.runtime.evaluation_mode import evaluating
from aevb.runtime.seeding import seeded

DIGESTED = 2**22  # parameters of p of which a checksum is taken
TEACHING = "aevb teaching"  # the weights file's word for which of q's factors were trained


class Model(DeclaredModel):
    """A latent variable model p with an approximate posterior q.

    Declare the two factorizations; the bound, its estimator and their derivation follow.

    >>> from aevb import Bernoulli, Normal, mlp
    >>> vae = Model(
    ...     p={"z": Normal(20), "x | z": Bernoulli(784, net=mlp(500, 500))},
    ...     q={"z | x": Normal(net=mlp(500, 500))},
    ... )
    >>> vae.elbo(x=torch.zeros(3, 784)).value.shape
    torch.Size([3])

    ``given`` holds the sizes of variables that are only conditioned on. ``missing="mask"`` lets q's networks see which
    entries are missing, through inputs whose weights start at zero; by default it reads them as zeros.
    """

    def __init__(
        self,
        p: Mapping[str, Conditional],
        q: Mapping[str, Conditional],
        given: Mapping[str, int | Shape] | None = None,
        *,
        missing: str = "zeros",
    ) -> None:
        super().__init__(p, q, given, missing=missing)
        self._initial = self._digest()
        self.teaching = Teaching(self)

    def _digest(self) -> int | None:
        """A checksum of p's weights, the same in single and in double precision; None where they are many, or have no values."""
        theta = self.theta()
        if sum(parameter.numel() for parameter in theta) > DIGESTED or any(parameter.is_meta for parameter in theta):
            return None
        digest = 0
        for parameter in theta:
            digest = zlib.crc32(parameter.detach().float().cpu().contiguous().numpy().tobytes(), digest)
        return digest

    def untouched(self) -> bool:
        """Whether p's weights are still those that the model was initialised with: not trained, loaded or set."""
        return self._initial is not None and self._initial == self._digest()

    # Looking at it --------------------------------------------------------------------------------------------------------

    def fresh(self, seed: int) -> Model:
        """A new model of the same declaration, initialised from a seed, where this one is and in its precision.

        What is frozen here (``requires_grad_(False)``) is the same there, frozen too.
        """
        like = self._parameter()
        parts = {type(part) for entry in self.graph.entries() for part in (entry.spec, getattr(entry.spec, "net", None)) if part is not None}
        with seeded(seed, all_code=True):
            model = Model(**deserialize(self.declaration(), custom=parts)).to(like.device, like.dtype)
        theirs = dict(model.named_parameters())
        for name, mine in self.named_parameters():
            if name not in theirs:
                raise ValueError(f"This model has a parameter {name} that its declaration does not make, so that a fresh one would lack it.")
            if not mine.requires_grad:
                theirs[name].requires_grad_(False).copy_(mine)
        return model

    def explain(self, **choices: Any) -> Explanation:
        """The estimator as mathematics, and for each term how it is taken and why; ``.latex`` holds it for a document."""
        return explain(self.plan(**choices))

    # The bound ---------------------------------------------------------------------------------------------------------------

    def elbo(
        self,
        *,
        how: Mapping[str, str] | None = None,
        bound: str = "elbo",
        samples: int = 1,
        gradient: str = "plain",
        temperature: float | Tensor = 0.5,
        kl_weight: float | Tensor = 1.0,
        noise: Mapping[str, Tensor] | None = None,
        seed: int | None = None,
        steps: Any = None,
        lengths: Any = None,
        **data: Any,
    ) -> Bound:
        """An estimate of a lower bound on log p(data | given), one number an example.

        ``how`` overrides the plan a latent at a time; ``bound="iwae"`` with ``samples=K`` is the importance-weighted bound;
        ``gradient`` is "plain", "stl" or "dreg". The same ``noise`` (or ``seed``) gives the same numbers. A latent may be
        passed too, for all rows or some (−1 or NaN elsewhere): it is clamped there.
        """
        if not isinstance(temperature, Tensor) and not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}.")
        batch = self.prepare(steps=steps, lengths=lengths, **data)
        clamped, partial = split_latents(self.graph, batch)
        plan = self.plan(how=how, bound=bound, samples=samples, gradient=gradient, clamped=clamped, partial=partial)
        if noise is None:
            noise = self.draw_noise(plan, batch, seed=seed)
        else:
            self._check_noise(plan, batch, noise)
        with self._in_its_precision():
            return estimate(plan, self.factors, batch, noise, temperature=temperature, kl_weight=kl_weight)  # type: ignore[arg-type]

    @sharing_cores()
    def log_evidence(
        self,
        *,
        method: str | AIS | Particles = "auto",
        samples: int | None = None,
        seed: int | None = None,
        memory: float | str | None = None,
        **data: Any,
    ) -> Evidence:
        """log p(data | given), one number an example: exact where the declaration allows it, otherwise estimated.

        ``method`` is "exact", "importance" (q proposes; ``samples`` draws, 1000), "ais" (annealed chains; ``samples`` of them, 16),
        "particles" (a filter for sequences; ``samples`` particles, 1000), "prior" (plain Monte Carlo, to see why it fails), or settings
        of one, such as ``AIS(temperatures=5000)``. "auto" is exact where that is possible, else importance. ``memory`` bounds what tensors
        hold at once: bytes, or a text such as "2 GiB"; on a GPU torch reserves more than tensors hold. What is returned prints
        itself, with notes where it should not be trusted.
        """
        return log_evidence(self, self.prepare(**data), method=method, samples=samples, seed=seed, memory=memory)

    @sharing_cores()
    def gap(
        self,
        *,
        iterations: int = 500,
        samples: int = 1000,
        method: str | AIS | Particles = "auto",
        how: Mapping[str, str] | None = None,
        seed: int | None = None,
        **data: Any,
    ) -> Gap:
        """log p(data | given) − ELBO, split into what q's family cannot reach and what amortisation costs, one number an example each.

        The best q of each example's own is found by ``iterations`` of gradient ascent from the encoder's, which stays where the ascent does
        not clearly improve on it; both bounds are then taken with ``samples`` fresh draws. ``method`` is how :meth:`log_evidence` finds the
        evidence, ``how`` overrides the plan as in :meth:`elbo`.
        """
        return split_gap(self, data, iterations=iterations, samples=samples, method=method, how=how, seed=seed)

    # Use after training -----------------------------------------------------------------------------------------------------------

    def sample(self, n: int = 1, *, steps: int | None = None, mean: bool = False, seed: int | None = None, **fixed: Any) -> dict[str, Tensor]:
        """Ancestral samples of all variables, [n, size] or [n, steps, size] each.

        A variable may be fixed if it is given, a root of p, or all its parents are fixed; anything else would be an
        intervention. ``mean=True`` returns observed variables as the mean of their conditional instead of a draw from it.
        """
        return ancestral.sample(self, n, fixed, steps=steps, mean=mean, seed=seed)

    def untaught(self) -> dict[str, str]:
        """The latents whose factors in q were not trained for this p, and why; none after a run that trained q."""
        return self.teaching.untaught(self)

    def posterior(
        self, *, samples: int = 64, seed: int | None = None, method: str = "auto", steps: Any = None, lengths: Any = None, **data: Any
    ) -> Posterior:
        """p(latents | data): ``["z"]`` is a distribution, ``.sample(S)`` draws jointly, ``.log_prob(z=…)`` scores.

        It is q(latents | data) where q was trained. Where it was not (after ``mle()``, for instance), or where rows end in missing steps that q
        cannot forecast, it is the exact posterior if that is known, and otherwise refused. ``method`` is "auto", "q" (as it is) or "exact"; what is
        returned says in its ``method`` which one it is.
        """
        batch = self.prepare(steps=steps, lengths=lengths, **data)
        return posterior_of(self, self.teaching, batch, samples=samples, seed=seed, method=method)

    def reconstruct(
        self, *, mean: bool = True, seed: int | None = None, method: str = "auto", steps: Any = None, lengths: Any = None, **data: Any
    ) -> dict[str, Tensor]:
        """Observed variables through the posterior and back: latents drawn once, then p's mean (or a draw). To fill cells, use :meth:`impute`."""
        return self.posterior(seed=seed, method=method, steps=steps, lengths=lengths, **data).reconstruct(mean=mean)

    @sharing_cores()
    def impute(
        self, *, samples: int = 50, seed: int | None = None, method: str = "auto", steps: Any = None, lengths: Any = None, **data: Any
    ) -> Imputation:
        """Fill missing cells (NaN) of the observed variables: their posterior mean, standard deviation and joint draws given all known cells.

        By the exact posterior where it is known (a series' missing end is then its forecast), otherwise by ``samples`` draws of q. ``method`` is as
        in :meth:`posterior`.

        >>> from aevb import Normal, fit, mle
        >>> x = torch.randn(200, 1, generator=torch.Generator().manual_seed(0)) + 0.1 * torch.randn(200, 2)
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2, scale="learned")}, q={"z | x": Normal(scale="learned")})
        >>> run = fit(model, {"x": x}, schedule=mle(), steps=200)
        >>> filled = model.impute(x=torch.tensor([[1.0, float("nan")]]))
        >>> filled
        1 missing cell of x filled by the exact posterior (mle() trains p alone)
        >>> filled.mean["x"].shape, filled.draws["x"].shape
        (torch.Size([1, 2]), torch.Size([50, 1, 2]))
        """
        batch = self.prepare(steps=steps, lengths=lengths, **data)
        return impute(posterior_of(self, self.teaching, batch, seed=seed, method=method, prefer_exact=True), samples)

    def log_prob(self, *, steps: Any = None, lengths: Any = None, **assignment: Any) -> Tensor:
        """log p of a complete assignment (every stochastic variable and every given one), one number an example."""
        graph = self.graph
        need = (*graph.stochastic, *graph.given)
        batch = prepare(graph, assignment, like=self._parameter(), need=need, steps=steps, lengths=lengths, single=True)
        for name in graph.latents:
            if mask_of(name) in batch:
                raise ValueError(f"{name!r} is unknown in some rows; log_prob takes a complete assignment.")
        plan = self.plan(clamped=graph.latents)
        with evaluating(self), self._in_its_precision():
            return estimate(plan, self.factors, batch, {}).value  # type: ignore[arg-type]

    # Saving ------------------------------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The weights, as torch has them; which of q's factors were trained goes with them in torch's own metadata."""
        found = super().state_dict(*args, **kwargs)
        mine = getattr(found, "_metadata", {}).get(kwargs.get("prefix", "")[:-1])
        if mine is not None:
            mine[TEACHING] = self.teaching.state(self)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over weights, as torch does, and which of q's factors were trained, where ``state_dict`` of a model says so."""
        result = super().load_state_dict(state_dict, strict, assign)
        teaching = getattr(state_dict, "_metadata", {}).get("", {}).get(TEACHING)
        if isinstance(teaching, Mapping):
            self.teaching.restore(self, teaching)
        return result

    def declaration(self) -> dict[str, Any]:
        """The declaration as JSON-ready data."""
        return serialize(self.graph, self.missing)

    def save(self, path: str | Path) -> None:
        """Write ``model.json`` (the declaration), ``weights.safetensors`` and ``manifest.json`` (their hashes) into a folder."""
        if str(path) == "":
            raise ValueError('save("") names no folder. Say where the model is to be saved.')
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        write_model(Path(path), self.declaration(), weights, {TEACHING: json.dumps(self.teaching.state(self))})
