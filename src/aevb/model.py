"""Model: a declaration with its weights, and all methods of the user."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributions import Distribution

from aevb.data.sequence_index import SequenceIndex
from aevb.data.sequences import column_names, frames_in_arrays, future_in_arrays
from aevb.declare.conditionals import Conditional, Factor
from aevb.declare.missing_members import explaining_missing_members
from aevb.declare.networks import Shape
from aevb.declare.own_networks import is_maker, own_networks, wrap
from aevb.declare.serialization import deserialize, serialize
from aevb.derive.explain import Explanation, explain
from aevb.estimate import ancestral
from aevb.estimate.batch import Batch, class_vectors, numbers, prepare, split_latents
from aevb.estimate.bound import Bound, KLWeight
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.estimators import estimate
from aevb.estimate.keys import mask_of
from aevb.evidence import AIS, Evidence, Particles, log_evidence
from aevb.evidence.amortisation import Gap, split_gap
from aevb.export import Exported, export_model
from aevb.forecasting import Beliefs, Forecast, filter_of, forecast_of, named, smooth_of
from aevb.model_folder import write_model
from aevb.posterior import Imputation, Posterior, impute, posterior_of, untrained_gaps_note
from aevb.posterior.training_record import Teaching, not_finite_text
from aevb.runtime.callers import frames_of_aevb
from aevb.runtime.checked_files import DataWarning
from aevb.runtime.contention import sharing_cores
from aevb.runtime.evaluation_mode import evaluating
from aevb.runtime.seeding import seeded
from aevb.runtime.suggestions import did_you_mean

Result = TypeVar("Result", Beliefs, Evidence, Forecast, Imputation)
UNTRAINED = (
    "No parameter of this model was trained or set: the result is that of its initial weights. "
    "Train it first, by aevb.fit(model, …)."
)
DIGESTED = 2**22  # no checksum of p's weights is computed for more parameters than this
# The metadata key, in the weights file, of the record which of q's factors were trained.
TEACHING = "aevb teaching"


class Model(DeclaredModel):
    """A latent variable model p with an approximate posterior q.

    Declare the two factorizations; the bound, its estimator and their derivation follow.

    Arguments:
        p: The factors of the generative model: "variable | parents" → conditional.
        q: The factors of the approximate posterior of the latents, in the same notation.
        given: The sizes of the variables that are only conditioned on, by name.
        missing: With "mask", q's networks also read a mask of the missing entries, through weights
            that start at zero. By default, "zeros", they read missing entries as zeros only.
        seed: Decides the initial weights, also those of torch modules of your own (except
            ``wrap(…, pretrained=True)``). None draws them from torch's global generator, whose
            seed differs from process to process.

    Attributes:
        usual_schedule: The name of the schedule that :func:`fit` uses if none is given, such as
            "mle" of ``zoo.local_level()``. None is ``joint()``. Files do not keep it.

    >>> from aevb import Bernoulli, Normal, mlp
    >>> vae = Model(
    ...     p={"z": Normal(20), "x | z": Bernoulli(784, net=mlp(500, 500))},
    ...     q={"z | x": Normal(net=mlp(500, 500))},
    ...     seed=0,
    ... )
    >>> vae.elbo(x=torch.zeros(3, 784)).value.shape
    torch.Size([3])
    """

    usual_schedule: str | None = None

    def __init__(
        self,
        p: Mapping[str, Conditional],
        q: Mapping[str, Conditional],
        given: Mapping[str, int | Shape] | None = None,
        *,
        missing: str = "zeros",
        seed: int | None = None,
    ) -> None:
        with seeded(seed, all_code=True):
            super().__init__(p, q, given, missing=missing)
            if seed is not None:
                self._redraw_own_modules()
        self._initial = self._digest()
        self.teaching = Teaching(self)

    def _redraw_own_modules(self) -> None:
        """Draw the weights of the user's modules again: they were drawn before the model's seed."""
        specs = {entry.id: getattr(entry.spec, "net", None) for entry in self.graph.entries()}
        for name, built in own_networks(dict(self.factors.items())):
            net = specs[name]
            if isinstance(net, wrap) and not net.pretrained and not is_maker(net.net):
                built.redraw()

    def _digest(self) -> int | None:
        """A checksum of p's weights, the same in single and double precision.

        None for a large model or one on the meta device.
        """
        theta = self.theta()
        if sum(parameter.numel() for parameter in theta) > DIGESTED or any(
            parameter.is_meta for parameter in theta
        ):
            return None
        digest = 0
        for parameter in theta:
            digest = zlib.crc32(
                parameter.detach().float().cpu().contiguous().numpy().tobytes(), digest
            )
        return digest

    def untouched(self) -> bool:
        """Return whether p's weights are still the initial ones: not trained, loaded or set.

        >>> from aevb import Normal, fit
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> model.untouched()
        True
        >>> run = fit(model, {"x": torch.randn(50, 2)}, steps=2, progress=False)
        >>> model.untouched()
        False
        """
        return self._initial is not None and self._initial == self._digest()

    def _noted(self, found: Result) -> Result:
        """Add a note to a result if p has parameters that were neither trained, loaded nor set."""
        if not self.theta() or not self.untouched():
            return found
        return replace(found, notes=(*found.notes, UNTRAINED))

    # Copies and explanations ----------------------------------------------------------------------

    def fresh(self, seed: int) -> Model:
        """Build a new model with the same declaration, device and precision.

        Frozen parameters (``requires_grad_(False)``) are copied and frozen in the new model too.

        Arguments:
            seed: Decides the initial weights.

        Returns:
            The new model.

        >>> from aevb import Normal
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> one, other = model.fresh(seed=0), model.fresh(seed=0)
        >>> all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))
        True
        """
        like = self._parameter()
        parts = {
            type(part)
            for entry in self.graph.entries()
            for part in (entry.spec, getattr(entry.spec, "net", None))
            if part is not None
        }
        modules = {
            entry.id: entry.spec.net.net
            for entry in self.graph.entries()
            if isinstance(entry.spec.net, wrap)
        }
        declared = deserialize(self.declaration(), parts, modules)
        model = Model(**declared, seed=seed).to(like.device, like.dtype)
        model.usual_schedule = self.usual_schedule
        theirs = dict(model.named_parameters())
        for name, mine in self.named_parameters():
            if name not in theirs:
                raise ValueError(
                    f"This model has a parameter {name} that its declaration does not create, so "
                    f"a fresh model would lack it."
                )
            if not mine.requires_grad:
                theirs[name].requires_grad_(False).copy_(mine)
        return model

    def explain(self, **choices: Any) -> Explanation:
        """Explain the estimator: its formula, and for each latent how its term is computed and why.

        Arguments:
            **choices: ``how``, ``bound``, ``samples``, ``gradient`` and ``resample``, as in
                :meth:`elbo`, and ``clamped`` and ``partial``, the variables that the data hold in
                all rows or with missing entries.

        Returns:
            The explanation, a string; its attribute ``latex`` holds the formula in LaTeX.

        >>> from aevb import Normal
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> print(model.explain())
        log p(x) ≥ E of this estimator (ELBO):
        <BLANKLINE>
          log p(x|zˢ) − KL(q(z|x) ‖ p(z))
        <BLANKLINE>
          zˢ = μ(x) + σ(x) ε, ε ~ N(0, I)
        <BLANKLINE>
        z: pathwise: a Normal sample is a differentiable function of its parameters and of noise.
           term closed: KL(Normal ‖ Normal) is known, and z has no parents in p.
        cost: each example passes through x's network 1×.
        """
        return explain(self.plan(**choices))

    def _repr_html_(self) -> str:
        from aevb.notebook import cards

        return cards.model_card(self)

    def prepare(
        self, *, steps: Any = None, lengths: Any = None, gaps: Any = False, **data: Any
    ) -> Batch:
        """Check data against the declaration and convert them to a batch.

        A variable with time may be a frame, whose lines are steps (:func:`aevb.sequences`).
        """
        data, lengths, _ = self._in_arrays(data, lengths)
        batch = super().prepare(steps=steps, lengths=lengths, gaps=gaps, **data)
        self.teaching.check_levels(self, batch)
        return batch

    def _in_arrays(
        self, data: Mapping[str, Any], lengths: Any
    ) -> tuple[dict[str, Any], Any, SequenceIndex | None]:
        """Replace frames by arrays. Raise ValueError for other columns than those of training."""
        found = frames_in_arrays(self.graph, data, lengths)
        self.teaching.check_columns(column_names(self.graph, data, found[2]))
        if found[2] is not None:
            self.teaching.warn_of_other_pace(found[2].clock.pace(found[2].spacing))
        return found

    # The bound ------------------------------------------------------------------------------------

    def elbo(
        self,
        *,
        how: Mapping[str, str] | None = None,
        bound: str = "elbo",
        samples: int | None = None,
        gradient: str = "plain",
        resample: float | None = None,
        temperature: float | Tensor = 0.5,
        kl_weight: KLWeight = 1.0,
        noise: Mapping[str, Tensor] | None = None,
        seed: int | None = None,
        steps: Any = None,
        lengths: Any = None,
        **data: Any,
    ) -> Bound:
        """Estimate a lower bound on log p(data | given), one number per example.

        Missing entries (NaN) leave the likelihood; those that p reads (its own past) are drawn from
        p.

        Arguments:
            how: Overrides the plan for single latents, e.g. ``how={"y": "gumbel"}``.
            bound: "elbo"; "iwae", the importance-weighted bound; or "particles", the bound of a
                particle filter, for sequences.
            samples: The number K of draws; of particles for ``bound="particles"``. By default 1,
                or 5 if ``bound`` is not "elbo".
            gradient: "plain", "stl" or "dreg", or for particles "score", which includes the
                gradient of resampling.
            resample: The share of effective particles below which a particle filter resamples a row
                (default 0.5; 0 is never).
            temperature: The temperature of relaxed draws.
            kl_weight: The weight of the KL terms, one number or numbers by latent.
            noise: The noise of :meth:`draw_noise`, by latent, each [samples, steps, rows,
                entries]. The same noise gives the same numbers.
            seed: Draws the noise; None uses torch's global generator.
            steps: Marks the real steps of ragged sequences, [N, T].
            lengths: The number of steps of each ragged sequence, [N].
            **data: The observed and given variables by name. A latent may be among them, for all
                rows or some of them (−1 or NaN elsewhere); it is then clamped in these rows.

        Returns:
            The bound in ``value`` and its parts in ``terms``. With ``kl_weight``, ``objective`` has
            the weights and a gradient; ``value`` is still the bound. Gaps that q was not trained on
            make the bound loose; a warning names them.

        >>> from aevb import Normal
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> x = torch.zeros(3, 2)
        >>> bound = model.elbo(x=x, seed=0)
        >>> bound.value.shape, sorted(bound.terms)
        (torch.Size([3]), ['kl(z)', 'x'])
        >>> tighter = model.elbo(x=x, bound="iwae", samples=50, seed=0)
        """
        if not isinstance(temperature, Tensor) and not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}.")
        for name in kl_weight if isinstance(kl_weight, Mapping) else ():
            if name not in self.graph.latents:
                raise ValueError(
                    f"kl_weight= names {name!r}, which is no latent. The latents are "
                    f"{', '.join(self.graph.latents)}.{did_you_mean(name, self.graph.latents)}"
                )
        batch = self.prepare(steps=steps, lengths=lengths, gaps=True, **data)
        if (note := untrained_gaps_note(self, self.teaching, batch)) is not None:
            warnings.warn(DataWarning(note), stacklevel=frames_of_aevb())
        self.teaching.warn_of_other_units(self, batch)
        clamped, partial = split_latents(self.graph, batch)
        plan = self.plan(
            how=how,
            bound=bound,
            samples=samples,
            gradient=gradient,
            resample=resample,
            clamped=clamped,
            partial=partial,
        )
        if noise is None:
            noise = self.draw_noise(plan, batch, seed=seed)
        else:
            self._check_noise(plan, batch, noise)
        with self._in_its_precision():
            found = estimate(
                plan, self.factors, batch, noise, temperature=temperature, kl_weight=kl_weight
            )
        if self.teaching.trained and (told := not_finite_text(found.value)) is not None:
            warnings.warn(DataWarning(f"The bound {told}"), stacklevel=frames_of_aevb())
        return found

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
        """Compute log p(data | given), one number per example.

        The result is exact if the declaration allows it, otherwise an estimate.

        ``method`` is one of

        - "exact";
        - "importance": importance sampling with q as proposal (``samples`` draws, default 1000);
        - "ais": annealed importance sampling (``samples`` chains, default 16);
        - "particles": a particle filter for sequences (``samples`` particles, default 1000);
        - "prior": plain Monte Carlo with draws from the prior, to show why it fails;
        - "auto": exact if possible, otherwise importance sampling; if values are missing that p
          reads (``"h[t] | x[t-1]"``) and nothing is exact, the particle filter, which draws them
          from p;
        - or settings of a method, such as ``AIS(temperatures=5000)``.

        Arguments:
            method: See above.
            samples: The number of draws, chains or particles.
            seed: Decides the draws; None uses torch's global generator.
            memory: Limits the memory of all tensors: a number of bytes, or a string such as "2
                GiB". On a GPU torch reserves more memory than the tensors need.
            **data: The observed and given variables by name; also ``steps`` or ``lengths`` of
                ragged sequences, as in :meth:`elbo`.

        Returns:
            The :class:`Evidence`, which prints itself, with notes if it is unreliable.

        >>> from aevb import MultivariateNormal, Normal, linear
        >>> p = {"z": Normal(1), "x | z": Normal(2, net=linear(), scale="learned")}
        >>> model = Model(p, q={"z | x": MultivariateNormal()})
        >>> model.log_evidence(x=torch.zeros(3, 2)).method
        'exact'
        >>> model.log_evidence(x=torch.zeros(3, 2), method="importance", samples=50, seed=0).method
        'importance'
        """
        lengths = data.pop("lengths", None)
        data, lengths, index = self._in_arrays(data, lengths)
        batch = self.prepare(gaps=True, lengths=lengths, **data)
        self.teaching.warn_of_other_units(self, batch)
        found = log_evidence(self, batch, method=method, samples=samples, seed=seed, memory=memory)
        if found.method not in ("exact", "prior"):
            note = untrained_gaps_note(self, self.teaching, batch)
            found = replace(found, notes=(*found.notes, *([note] if note else [])))
        return self._noted(found if index is None else replace(found, index=index))

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
        """Split log p(data | given) − ELBO into approximation gap and amortisation gap.

        The approximation gap remains with the best member of q's family for each example. This
        member is found by gradient ascent from the encoder's output; the encoder's output is kept
        if the ascent does not clearly improve it. Both bounds are then estimated with fresh draws.
        Missing entries that p reads are drawn from p in both bounds; what that costs is part of the
        approximation gap.

        Arguments:
            iterations: The number of steps of gradient ascent.
            samples: The number of fresh draws.
            method: The method of the evidence, as in :meth:`log_evidence`.
            how: Overrides the plan, as in :meth:`elbo`.
            seed: Decides the draws.
            **data: The observed and given variables by name.

        Returns:
            The :class:`Gap`, with one number of each kind per example.

        >>> from aevb import Normal
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> gap = model.gap(x=torch.zeros(3, 2), iterations=5, samples=100, seed=0)
        >>> torch.allclose(gap.total, gap.approximation + gap.amortisation, atol=1e-5)
        True
        """
        return split_gap(
            self, data, iterations=iterations, samples=samples, method=method, how=how, seed=seed
        )

    # Use after training ---------------------------------------------------------------------------

    def sample(
        self,
        n: int = 1,
        *,
        steps: int | None = None,
        mean: bool = False,
        seed: int | None = None,
        **fixed: Any,
    ) -> dict[str, Tensor]:
        """Draw ancestral samples of all variables.

        Arguments:
            n: The number of rows.
            steps: The number of steps of a sequence.
            mean: Whether an observed variable is the mean of its conditional instead of a draw.
            seed: Decides the draws; None uses torch's global generator.
            **fixed: Values of variables that are not drawn. A variable may be fixed if it is given
                or a root of p, or if all its parents are fixed; otherwise fixing it would be an
                intervention.

        Returns:
            The draws by variable, each [n, size] or [n, steps, size].

        >>> from aevb import Normal
        >>> model = Model(p={"z": Normal(2), "x | z": Normal(3)}, q={"z | x": Normal()})
        >>> model.sample(5, seed=0)["x"].shape
        torch.Size([5, 3])
        """
        self.teaching.check_columns(column_names(self.graph, fixed))
        return ancestral.sample(self, n, fixed, steps=steps, mean=mean, seed=seed)

    def untaught(self) -> dict[str, str]:
        """Find the latents whose factors in q were not trained for this p.

        Returns:
            The reason for each of them; empty after a run that trained q.

        >>> from aevb import Normal, fit, mle
        >>> p = {"z": Normal(1), "x | z": Normal(2, scale="learned")}
        >>> model = Model(p, q={"z | x": Normal(scale="learned")})
        >>> run = fit(model, {"x": torch.randn(50, 2)}, schedule=mle(), steps=2, progress=False)
        >>> model.untaught()
        {'z': 'mle() trains p alone'}
        """
        return self.teaching.untaught(self)

    def posterior(
        self,
        *,
        samples: int = 64,
        seed: int | None = None,
        method: str = "auto",
        steps: Any = None,
        lengths: Any = None,
        **data: Any,
    ) -> Posterior:
        """The posterior p(latents | data).

        With ``method="auto"`` it is q(latents | data) if q was trained. If q was not trained (for
        instance after ``mle()``), or if rows end in missing steps that q cannot forecast, it is the
        exact posterior; if that is unknown, this raises an error.

        Arguments:
            samples: The number of draws of the other latents that a marginal averages over.
            seed: Decides the draws; None uses torch's global generator.
            method: "auto", "q" or "exact".
            steps: Marks the real steps of ragged sequences, [N, T].
            lengths: The number of steps of each ragged sequence, [N].
            **data: The observed and given variables by name, and latents that are known.

        Returns:
            The :class:`Posterior`. ``["z"]`` is a distribution, ``.sample(S)`` draws jointly, and
            ``.log_prob(z=…)`` is its log-density; its attribute ``method`` is "q" or "exact".

        >>> from aevb import Normal
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> posterior = model.posterior(x=torch.zeros(3, 2))
        >>> posterior["z"].mean.shape, posterior.method
        (torch.Size([3, 1]), 'q')
        """
        batch = self.prepare(steps=steps, lengths=lengths, gaps=True, **data)
        self.teaching.warn_of_other_units(self, batch)
        return posterior_of(self, self.teaching, batch, samples=samples, seed=seed, method=method)

    def reconstruct(
        self,
        *,
        mean: bool = True,
        seed: int | None = None,
        method: str = "auto",
        steps: Any = None,
        lengths: Any = None,
        **data: Any,
    ) -> dict[str, Tensor]:
        """Reconstruct the observed variables.

        The latents are drawn once from the posterior. To fill missing cells, use :meth:`impute`.

        Arguments:
            mean: Whether the result is p's mean; otherwise it is a draw.
            seed: Decides the draws; None uses torch's global generator.
            method: The posterior, as in :meth:`posterior`.
            steps: As in :meth:`posterior`.
            lengths: As in :meth:`posterior`.
            **data: The observed and given variables by name.

        Returns:
            The reconstructions by variable, in the shapes of the data.

        >>> from aevb import Normal
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> model.reconstruct(x=torch.zeros(3, 2), seed=0)["x"].shape
        torch.Size([3, 2])
        """
        return self.posterior(
            seed=seed, method=method, steps=steps, lengths=lengths, **data
        ).reconstruct(mean=mean)

    @sharing_cores()
    def impute(
        self,
        *,
        samples: int = 50,
        seed: int | None = None,
        method: str = "auto",
        steps: Any = None,
        lengths: Any = None,
        **data: Any,
    ) -> Imputation:
        """Impute missing cells (NaN) of the observed variables, given the known cells.

        It uses the exact posterior if that is known (missing steps at the end of a series are then
        forecasts), otherwise draws of q. If p reads missing entries (its own past), draws of q and
        p are weighted by a particle filter, so that a gap is filled given the data before and after
        it.

        Arguments:
            samples: The number of draws.
            seed: Decides the draws; None uses torch's global generator.
            method: The posterior, as in :meth:`posterior`.
            steps: As in :meth:`posterior`.
            lengths: As in :meth:`posterior`.
            **data: The observed and given variables by name, with NaN where missing.

        Returns:
            The posterior ``mean``, the standard deviation ``sd`` and joint ``draws``, by variable.

        >>> from aevb import Normal, fit, mle
        >>> z = torch.randn(200, 1, generator=torch.Generator().manual_seed(0))
        >>> x = z + 0.1 * torch.randn(200, 2)
        >>> p = {"z": Normal(1), "x | z": Normal(2, scale="learned")}
        >>> model = Model(p, q={"z | x": Normal(scale="learned")})
        >>> run = fit(model, {"x": x}, schedule=mle(), steps=200)
        >>> filled = model.impute(x=torch.tensor([[1.0, float("nan")]]))
        >>> filled
        1 missing cell of x filled by the exact posterior (mle() trains p alone)
        >>> filled.mean["x"].shape, filled.draws["x"].shape
        (torch.Size([1, 2]), torch.Size([50, 1, 2]))
        """
        data, lengths, index = self._in_arrays(data, lengths)
        batch = self.prepare(steps=steps, lengths=lengths, gaps=True, **data)
        self.teaching.warn_of_other_units(self, batch)
        found = impute(
            posterior_of(
                self,
                self.teaching,
                batch,
                seed=seed,
                method=method,
                prefer_exact=True,
                weigh_gaps=True,
            ),
            samples,
        )
        return self._noted(found if index is None else replace(found, index=index))

    # Sequences ------------------------------------------------------------------------------------

    @sharing_cores()
    def forecast(
        self,
        *,
        steps: int | None = None,
        samples: int = 500,
        given: Mapping[str, Any] | None = None,
        method: str = "auto",
        seed: int | None = None,
        lengths: Any = None,
        **past: Any,
    ) -> Forecast:
        """Forecast the observed variables for some steps after the end of each row.

        ``method="auto"`` is exact where the evidence is exact (Kalman filter, forward algorithm);
        otherwise a particle filter with q as proposal runs to the end of the past, and p continues
        ``samples`` of its particles. "q" draws the past's latents from q.

        Arguments:
            steps: The number of steps.
            samples: The number of joint draws.
            given: The future of given variables with a time axis, ``given={"u": u}`` of shape
                [N, steps, size], or a frame.
            method: "auto", "exact", "particles" or "q".
            seed: Decides the draws; None uses torch's global generator.
            lengths: The number of past steps of each row, if they differ, [N].
            **past: The data so far by name; missing entries (NaN) are marginalised out. For a frame
                (:func:`aevb.sequences`), ``frame()`` of the result continues its index.

        Returns:
            The :class:`Forecast`: ``mean``, ``sd``, ``draws`` (joint over variables and steps),
            ``quantile``, ``interval``, ``log_prob`` and ``plot``; its attribute ``method`` says how
            it was computed.

        >>> from aevb import Normal
        >>> p = {"z[t] | z[t-1]": Normal(1, scale=0.1), "x[t] | z[t]": Normal(1, scale=1.0)}
        >>> model = Model(p, q={"z[t] | x[t]": Normal()})
        >>> forecast = model.forecast(steps=12, x=torch.zeros(1, 30, 1), seed=0)
        >>> forecast.mean["x"].shape, forecast.draws["x"].shape, forecast.method
        (torch.Size([1, 12, 1]), torch.Size([500, 1, 12, 1]), 'exact')
        """
        past, lengths, index = self._in_arrays(past, lengths)
        if isinstance(given, Mapping) and isinstance(steps, Integral) and steps > 0:
            given = future_in_arrays(index, given, int(steps), self.graph, "given: ")
        found = forecast_of(
            self,
            self.teaching,
            past,
            steps=steps,
            samples=samples,
            given=given,
            method=method,
            seed=seed,
            lengths=lengths,
        )
        return self._noted(found if index is None else self._forecast_in(found, index))

    def _forecast_in(self, found: Forecast, index: SequenceIndex) -> Forecast:
        """Return a forecast of frames, whose score takes frames of the future too."""
        score = found._score

        def scored(future: Mapping[str, Any]) -> Evidence:
            plain = future_in_arrays(index, future, found.steps, self.graph, "log_prob: ")
            assert score is not None
            return replace(score(plain), index=index)

        notes = named(found.notes, index.ids)
        return replace(found, index=index, notes=notes, _score=scored)

    @sharing_cores()
    def filter(
        self,
        *,
        samples: int = 500,
        method: str = "auto",
        seed: int | None = None,
        lengths: Any = None,
        **data: Any,
    ) -> Beliefs:
        """Beliefs about the latents at each step given the data up to it, p(z[t] | x[0..t]).

        ``method="auto"`` is exact where the evidence is exact, otherwise a particle filter with q
        as proposal. "q" is q's own belief, if q reads no later data.

        Arguments:
            samples: The number of particles, at least 1,000 of them, or of draws of q.
            method: "auto", "exact", "particles" or "q".
            seed: Decides the draws; None uses torch's global generator.
            lengths: The number of steps of each row, if they differ, [N].
            **data: The observed and given variables by name.

        Returns:
            The :class:`Beliefs`: ``mean``, ``sd`` and ``probs`` by latent, and ``["z"]`` as a
            distribution where it is known.

        >>> from aevb import Normal
        >>> p = {"z[t] | z[t-1]": Normal(1, scale=0.1), "x[t] | z[t]": Normal(1, scale=1.0)}
        >>> model = Model(p, q={"z[t] | x[t]": Normal()})
        >>> model.filter(x=torch.zeros(1, 5, 1)).mean["z"].shape
        torch.Size([1, 5, 1])
        """
        data, lengths, index = self._in_arrays(data, lengths)
        found = filter_of(
            self,
            self.teaching,
            data,
            samples=samples,
            method=method,
            seed=seed,
            lengths=lengths,
        )
        if index is not None:
            found = replace(found, index=index, notes=named(found.notes, index.ids))
        return self._noted(found)

    @sharing_cores()
    def smooth(
        self,
        *,
        samples: int = 500,
        method: str = "auto",
        seed: int | None = None,
        lengths: Any = None,
        **data: Any,
    ) -> Beliefs:
        """Beliefs about the latents at each step given all data, p(z[t] | x).

        By particles, ``samples`` paths are drawn by backward simulation where p is Markov in its
        latents, otherwise they are the lines of the last particles; ``why`` of the result says
        which. "q" is q's posterior, which smooths only if q reads later data.

        Arguments:
            samples: The number of draws, of the particles' paths or of q. The filter has as many
                particles, and at least 1,000.
            method: As in :meth:`filter`.
            seed: As in :meth:`filter`.
            lengths: As in :meth:`filter`.
            **data: The observed and given variables by name.

        Returns:
            The :class:`Beliefs`.

        >>> from aevb import Normal
        >>> p = {"z[t] | z[t-1]": Normal(1, scale=0.1), "x[t] | z[t]": Normal(1, scale=1.0)}
        >>> model = Model(p, q={"z[t] | x[t]": Normal()})
        >>> x = torch.zeros(1, 5, 1)
        >>> bool((model.smooth(x=x).sd["z"] <= model.filter(x=x).sd["z"] + 1e-5).all())
        True
        """
        data, lengths, index = self._in_arrays(data, lengths)
        found = smooth_of(
            self,
            self.teaching,
            data,
            samples=samples,
            method=method,
            seed=seed,
            lengths=lengths,
        )
        if index is not None:
            found = replace(found, index=index, notes=named(found.notes, index.ids))
        return self._noted(found)

    def distribution(self, variable: str, parents: Mapping[str, Any] | None = None) -> Distribution:
        """The conditional of a variable in p, given values of its parents.

        Arguments:
            variable: The variable as p declares it: "x", "x[t]", or "x[0]" for a first step.
            parents: A value of each parent, by its name in the declaration, such as
                ``{"z[t-1]": z}``: numbers [..., size], or whole numbers [...] that are classes.
                Numbers on a last axis of that size that sum to 1 are probabilities of classes, or
                one-hot; a single axis of integers always holds classes.

        Returns:
            The torch distribution, with the shape of the parents' values, and with gradients. The
            numbers of an image lie on one axis, [..., size].

        >>> from aevb import zoo
        >>> hmm = zoo.hmm(2, 3, seed=0)
        >>> moves = hmm.distribution("y[t]", {"y[t-1]": torch.arange(3)})
        >>> moves.probs.shape, moves.probs.sum(-1)  # the transition matrix: from, to
        (torch.Size([3, 3]), tensor([1., 1., 1.], grad_fn=<SumBackward1>))
        >>> hmm.distribution("x[t]", {"y[t]": torch.arange(3)}).mean.shape
        torch.Size([3, 2])
        """
        entries = {
            str(entry.key.target): entry
            for name in self.graph.stochastic
            for entry in self.graph.p[name].values()
        }
        wanted, values = variable.replace(" ", ""), dict(parents or {})
        if wanted not in entries:
            raise ValueError(
                f"p has no conditional of {variable!r}; it has those of {', '.join(entries)}."
                f"{did_you_mean(wanted, list(entries))}"
            )
        entry, like = entries[wanted], self._parameter()
        needed = {ref.label: ref.name for ref in entry.key.parents}
        if values.keys() != needed.keys():
            raise ValueError(
                f"{entry.key} needs values of {', '.join(needed) or 'no parents'}; got "
                f"{', '.join(map(str, values)) or 'none'}."
            )
        inputs = {}
        for label, name in needed.items():
            value, size = values[label], self.graph.size(name)
            self.teaching.check_columns(column_names(self.graph, {name: value}))
            if not (torch.is_tensor(value) and value.requires_grad):
                value = numbers(label, value)
            value = value.to(like.device)
            if name in self.graph.stochastic and self.graph.rule("p", name).spec.categorical:
                value = class_vectors(label, value, size)
            if value.dim() == 0 or value.shape[-1] != size:
                raise ValueError(
                    f"{label} has {size} numbers on its last axis, got shape {list(value.shape)}."
                )
            inputs[label] = value.to(like.dtype)
        factor = self.factors[entry.id]
        assert isinstance(factor, Factor)
        with evaluating(self), self._in_its_precision():
            raw = factor(inputs)
            return factor.distribution(raw if inputs else raw[0, 0])

    def log_prob(self, *, steps: Any = None, lengths: Any = None, **assignment: Any) -> Tensor:
        """Compute log p of a complete assignment.

        Arguments:
            steps: Marks the real steps of ragged sequences, [N, T].
            lengths: The number of steps of each ragged sequence, [N].
            **assignment: A value for every stochastic and every given variable, by name.

        Returns:
            One number per example.

        >>> from aevb import Normal
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> model.log_prob(**model.sample(3, seed=0)).shape
        torch.Size([3])
        """
        graph = self.graph
        need = (*graph.stochastic, *graph.given)
        self.teaching.check_columns(column_names(graph, assignment))
        batch = prepare(
            graph,
            assignment,
            like=self._parameter(),
            need=need,
            steps=steps,
            lengths=lengths,
            single=True,
        )
        self.teaching.check_levels(self, batch)
        for name in graph.latents:
            if mask_of(name) in batch:
                raise ValueError(
                    f"{name!r} is unknown in some rows; log_prob takes a complete assignment."
                )
        plan = self.plan(clamped=graph.latents)
        with evaluating(self), self._in_its_precision():
            return estimate(plan, self.factors, batch, {}).value

    # Saving ---------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The weights, as in torch.

        torch's metadata also records which of q's factors were trained.
        """
        found = super().state_dict(*args, **kwargs)
        mine = getattr(found, "_metadata", {}).get(kwargs.get("prefix", "")[:-1])
        if mine is not None:
            mine[TEACHING] = self.teaching.state(self)
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights, as in torch.

        If ``state_dict`` records which of q's factors were trained, load that record too.
        """
        result = super().load_state_dict(state_dict, strict, assign)
        teaching = getattr(state_dict, "_metadata", {}).get("", {}).get(TEACHING)
        if isinstance(teaching, Mapping):
            self.teaching.restore(self, teaching)
        return result

    def declaration(self) -> dict[str, Any]:
        """Return the declaration as JSON-ready data; :func:`aevb.from_declaration` reads it.

        >>> from aevb import Normal
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> model.declaration()["q"]
        {'z | x': {'type': 'Normal'}}
        """
        return serialize(self.graph, self.missing)

    def export(
        self,
        format: str = "onnx",
        *,
        what: str = "encoder",
        out: str | Path | None = None,
        steps: int | None = None,
        bound: str = "auto",
        samples: int | None = None,
        check: bool = True,
    ) -> Exported:
        """Write a part of the model into a file that other programs can run.

        ``what`` is

        - "encoder": from data to the parameters of q's factors;
        - "decoder": from latents to the parameters of p's factors of the observed variables;
        - "prior": from their parents to the parameters of p's factors of the latents;
        - "score": from data to log p(data) where that is exact, otherwise to the bound, with its
          noise as an input.

        The number of rows is free, and the number of steps too unless the model has a recurrence.
        Then the file holds one step, with the values of the step before as inputs and the new ones
        as outputs. NaN entries are marginalised out as everywhere.

        Arguments:
            format: "onnx", or "torch" for a file of ``torch.export`` (``.pt2``).
            what: See above.
            out: The file, by default e.g. ``encoder.onnx``.
            steps: Write out that many steps of a recurrence, instead of one step.
            bound: The value of the score: "exact", "elbo" or "iwae"; "auto" is exact where the
                evidence is exact.
            samples: The number of samples of the bound. By default 1, or 5 for "iwae".
            check: Compare the file with the model on sampled data, if onnxruntime is installed.

        Returns:
            The :class:`~aevb.export.Exported`: path, inputs and outputs with their axes, and the
            largest ``difference`` that was found.

        >>> import os, tempfile
        >>> from aevb import Normal
        >>> model = Model(p={"z": Normal(2), "x | z": Normal(3)}, q={"z | x": Normal()})
        >>> file = os.path.join(tempfile.mkdtemp(), "encoder.pt2")
        >>> exported = model.export("torch", what="encoder", out=file)
        >>> exported.inputs, exported.outputs
        ({'x': ('batch', 3)}, {'z.mean': ('batch', 2), 'z.sd': ('batch', 2)})
        """
        with explaining_missing_members(dict(self.factors.items())):
            return export_model(
                self,
                self.teaching,
                format,
                what=what,
                out=out,
                steps=steps,
                bound=bound,
                samples=samples,
                check=check,
            )

    def save(self, path: str | Path) -> None:
        """Write the model into a folder.

        The files are ``model.json`` (the declaration), ``weights.safetensors`` and
        ``manifest.json`` (their hashes). :func:`aevb.load` reads them.

        Arguments:
            path: The folder. A saved model in it is replaced, at one moment: a kill leaves the old
                or the new one. Files of a run or of other programs are never replaced.

        Raises:
            ValueError: The folder holds a run, or other files of these names.

        >>> import tempfile
        >>> from aevb import Normal, load
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save(folder)
        ...     again = load(folder)
        >>> all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
        True
        """
        if str(path) == "":
            raise ValueError(
                'save("") names no folder. Pass the folder to save the model in, e.g. '
                'save("model").'
            )
        weights = {
            name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()
        }
        write_model(
            Path(path),
            self.declaration(),
            weights,
            {TEACHING: json.dumps(self.teaching.state(self))},
        )
