"""Model: a declaration with its weights, and everything a user does with it."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from aevb.declare.conditionals import Conditional, Factor
from aevb.declare.deterministic import Cell, Deterministic, Function, Recurrence
from aevb.declare.evaluation_order import schedule
from aevb.declare.graph import Entry, Graph
from aevb.declare.networks import Shape
from aevb.declare.registry import from_record, to_record
from aevb.derive.axes import TIME
from aevb.derive.explain import Explanation, describe, explain
from aevb.derive.plan import Plan, derive
from aevb.estimate import noise as noises
from aevb.estimate.batch import Batch, are_labels, numbers, prepare, split_latents
from aevb.estimate.estimators import Bound, estimate
from aevb.estimate.keys import mask_of
from aevb.estimate.program import Program
from aevb.evidence import AIS, Evidence, Particles, log_evidence
from aevb.evidence.amortisation import Gap, split_gap
from aevb.model_folder import checked_files, write_model
from aevb.posterior import Imputation, Posterior, impute, posterior_of, public
from aevb.posterior.training_record import Teaching
from aevb.runtime.checked_files import read_json, tensor_shapes
from aevb.runtime.contention import sharing_cores
from aevb.runtime.evaluation_mode import drops_units, evaluating
from aevb.runtime.seeding import draw_from, seeded

FORMAT = 1
DIGESTED = 2**22  # parameters of p of which a checksum is taken
MOST_FACTORS = 10_000  # of a declaration that is read from a file, and entries of a list in it
MOST_FIXED = 2**24  # numbers of a model that is read from a file that are not among its weights
MOST_UNWEIGHTED = 1000  # parents, or given variables, that no weight belongs to
MOST_MADE = 20  # tensors that are made on the way, for each tensor of weights and each factor
TEACHING = "aevb teaching"  # the weights file's word for which of q's factors were trained
RESERVED = (
    "self", "steps", "lengths", "how", "bound", "samples", "gradient", "temperature", "noise", "seed", "kl_weight", "mean", "method", "memory",
    "iterations", "n",
    "elbo", "iwae", "evidence", "expected", "gap", "step", "epoch", "lr", "phase", "seconds", "note",
)  # fmt: skip


class Model(nn.Module):
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
        super().__init__()
        if missing not in ("zeros", "mask"):
            raise ValueError(f'missing is "zeros" or "mask", got {missing!r}.')
        self.graph = Graph(p, q, given or {})
        for name in self.graph.shapes:
            if name in RESERVED:
                raise ValueError(f"{name!r} is a word of this library; call the variable something else.")
        self.missing = missing
        self.factors = nn.ModuleDict({entry.id: self._build(entry) for entry in self.graph.entries()})
        self._plans: dict[Any, Plan] = {}
        self._initial = self._digest()
        self.teaching = Teaching(self)

    def _build(self, entry: Entry) -> nn.Module:
        spec, shape = entry.spec, self.graph.shapes[entry.key.name]
        own = entry.key.name if isinstance(spec, Cell) else None
        parents = {str(ref): self.graph.shapes[ref.name] for ref in entry.key.parents if ref.name != own}
        told = self.missing == "mask" and entry.side == "q"
        masked = [str(ref) for ref in entry.key.parents if told and ref.name in self.graph.observed]
        try:
            if isinstance(spec, Cell):
                return Recurrence(spec, shape[0], parents, masked)
            if isinstance(spec, Deterministic):
                return Function(spec, shape, parents, masked)
            return Factor(spec, shape, parents, masked) if spec.has_parameters else nn.Module()
        except ValueError as error:
            raise ValueError(f"{entry.where}: {error}") from None

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
            model = from_declaration(self.declaration(), custom=parts).to(like.device, like.dtype)
        theirs = dict(model.named_parameters())
        for name, mine in self.named_parameters():
            if name not in theirs:
                raise ValueError(f"This model has a parameter {name} that its declaration does not make, so that a fresh one would lack it.")
            if not mine.requires_grad:
                theirs[name].requires_grad_(False).copy_(mine)
        return model

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move to a device or a precision, as torch does; a GPU that is not there is refused."""
        wanted = [str(value) for value in (*args[:1], kwargs.get("device")) if isinstance(value, str | torch.device)]
        if any(name.startswith("cuda") for name in wanted) and not torch.cuda.is_available():
            raise ValueError(
                f'There is no GPU here for .to("{wanted[0]}"): torch finds no CUDA device. Stay on the CPU, or install a torch with CUDA.'
            )
        return super().to(*args, **kwargs)

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Move to a GPU."""
        return self.to("cuda" if device is None else torch.device("cuda", device) if isinstance(device, int) else device)

    def theta(self) -> list[nn.Parameter]:
        """The generative parameters: everything reached from a factor of p, even if q uses it too."""
        return [parameter for entry in self.graph.entries() if entry.side == "p" for parameter in self.factors[entry.id].parameters()]

    def phi(self) -> list[nn.Parameter]:
        """The inference parameters: what only q reaches."""
        return [parameter for entry in self.graph.entries() if entry.side == "q" for parameter in self.factors[entry.id].parameters()]

    def __repr__(self) -> str:
        counts = {entry.id: sum(parameter.numel() for parameter in self.factors[entry.id].parameters()) for entry in self.graph.entries()}
        return describe(self.graph, counts)

    __str__ = __repr__

    def plan(
        self,
        *,
        how: Mapping[str, str] | None = None,
        bound: str = "elbo",
        samples: int = 1,
        gradient: str = "plain",
        clamped: Iterable[str] = (),
        partial: Iterable[str] = (),
    ) -> Plan:
        """The estimator derived for these choices (cached). ``clamped`` latents are known in every row, ``partial`` in some."""
        key = (tuple(sorted((how or {}).items())), bound, samples, gradient, frozenset(clamped), frozenset(partial))
        if key not in self._plans:
            self._plans[key] = derive(
                self.graph, how=how, bound=bound, samples=samples, gradient=gradient, clamped=frozenset(clamped), partial=frozenset(partial)
            )
        return self._plans[key]

    def explain(self, **choices: Any) -> Explanation:
        """The estimator as mathematics, and for each term how it is taken and why; ``.latex`` holds it for a document."""
        return explain(self.plan(**choices))

    # The bound ---------------------------------------------------------------------------------------------------------------

    def _parameter(self) -> Tensor:
        """A tensor whose device and precision are the model's."""
        for tensor in chain(self.parameters(), self.buffers()):
            if tensor.is_meta:
                raise ValueError('This model has no weights: it is on the meta device. Make it elsewhere (.to_empty(device="cpu")), and load some.')
            if tensor.is_floating_point():
                return tensor
        return torch.zeros(())

    @contextmanager
    def _in_its_precision(self) -> Iterator[None]:
        """Say in words that torch lacks an operation in the model's precision."""
        try:
            yield
        except NotImplementedError as error:
            dtype = self._parameter().dtype
            if dtype not in (torch.bfloat16, torch.float16):
                raise
            raise ValueError(f"torch cannot compute this in {str(dtype)[6:]}, which the model is in ({error}). Use model.float().") from error

    def prepare(self, *, steps: Any = None, lengths: Any = None, **data: Any) -> Batch:
        """Check data against the declaration and lay them out as estimates read them."""
        return prepare(self.graph, data, like=self._parameter(), steps=steps, lengths=lengths)

    def draw_noise(self, plan: Plan, batch: Mapping[str, Tensor], *, seed: int | None = None) -> dict[str, Tensor]:
        """All random numbers of one estimate; the global generator's, or those of a seed."""
        like = self._parameter()
        n, steps = self._extent(batch)
        generator = None if seed is None else torch.Generator(like.device).manual_seed(seed)
        layout = plan.layout(n, steps, dropout=drops_units(self))
        return noises.draw(layout, generator=generator, device=like.device, dtype=like.dtype)

    def _check_noise(self, plan: Plan, batch: Mapping[str, Tensor], noise: Mapping[str, Tensor]) -> None:
        for name, (_, shape) in plan.layout(*self._extent(batch), dropout=False).items():
            if name not in noise or tuple(noise[name].shape) != shape:
                found = f"has shape {list(noise[name].shape)}" if name in noise else "is missing"
                raise ValueError(f"The noise of {name} {found}; this estimate needs {list(shape)}. Draw it with draw_noise(plan, batch).")

    def _extent(self, batch: Mapping[str, Tensor]) -> tuple[int, int]:
        timed = [value.shape[TIME] for name, value in batch.items() if self.graph.timed.get(name)]
        return next(iter(batch.values())).shape[-2], timed[0] if timed else 1

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

    @contextmanager
    def _evaluating(self, seed: int | None) -> Iterator[None]:
        """No gradients, no dropout, and a seed of its own if one is given, for this thread alone."""
        with self._in_its_precision(), torch.no_grad(), evaluating(self), seeded(seed, all_code=seed is not None and self._has_own_code()):
            yield

    def _has_own_code(self) -> bool:
        """Whether a part of the model is a user's, which may draw numbers itself."""
        specs = (part for entry in self.graph.entries() for part in (entry.spec, getattr(entry.spec, "net", None)) if part is not None)
        return any(not type(part).__module__.startswith(("aevb.", "torch.nn.modules.")) for part in chain(specs, self.modules()))

    def sample(self, n: int = 1, *, steps: int | None = None, mean: bool = False, seed: int | None = None, **fixed: Any) -> dict[str, Tensor]:
        """Ancestral samples of all variables, [n, size] or [n, steps, size] each.

        A variable may be fixed if it is given, a root of p, or all its parents are fixed; anything else would be an
        intervention. ``mean=True`` returns observed variables as the mean of their conditional instead of a draw from it.
        """
        graph = self.graph
        timed = [name for name in graph.stochastic if graph.timed[name]]
        n, steps = _count("n", "rows", n), None if steps is None else _count("steps", "steps", steps)
        if steps is not None and not timed:
            raise ValueError("No variable of this model has [t], so that a sample has no steps. Leave out steps=.")
        if timed and steps is None:
            raise ValueError(f"{timed[0]}[t] lives in time: say how many steps to draw, e.g. sample({n}, steps=28).")
        for name in graph.given:
            if name not in fixed and any(ref.name == name for other in graph.p for ref in graph.reads("p", other)):
                raise ValueError(f"{name!r} is given: p is conditioned on it. Pass {name}=…, e.g. sample({n}, {name}=…).")
        known = self._fixed(n, steps or 1, fixed)
        for name in fixed:
            self._check_fixed(name, set(fixed))
        free = {name: graph.reads("p", name) for name in graph.p if name not in fixed}
        with self._evaluating(seed):
            program = Program(graph, self.factors, known, steps=steps or 1)  # type: ignore[arg-type]
            program.values |= known
            program.run(schedule(free, "p"), self._ancestral(n, steps or 1))
            values = {name: program.values[name] for name in graph.stochastic}
            if mean:
                for name in graph.observed:
                    if name not in fixed:
                        values[name] = program.mean(name)
        return {name: public(graph, name, value, n, steps or 1) for name, value in values.items()}

    def _fixed(self, n: int, steps: int, fixed: Mapping[str, Any]) -> Batch:
        """Fixed values for all n rows: a label or a number, one row, or n of them."""
        full = {}
        for name, value in fixed.items():
            if name not in self.graph.shapes or self.graph.is_deterministic(name):
                raise ValueError(f"{name!r} is not a variable that can be fixed; those are {', '.join((*self.graph.stochastic, *self.graph.given))}.")
            tensor = numbers(name, value)
            time = (steps,) if self.graph.timed[name] else ()
            labels = time if not tensor.is_floating_point() else None
            if not tensor.dim():
                tensor = tensor.expand(n, *time)
            elif tensor.shape in ((*time, *self.graph.shapes[name]), labels) and (time or labels is None or tensor.shape != (n,)):
                tensor = tensor.expand(n, *tensor.shape)
            if tensor.shape[0] != n:
                raise ValueError(f"{name} has {tensor.shape[0]} rows, but {n} samples were asked for. Fix one row, or one for each sample.")
            self._check_known(name, tensor)
            full[name] = tensor
        return prepare(self.graph, full, like=self._parameter(), need=tuple(full), single=True) if full else {}

    def _check_known(self, name: str, value: Tensor) -> None:
        """Refuse a fixed value with something unknown in it: NaN, or the label −1."""
        unknown = value.isnan() | (value == -1) if are_labels(self.graph, name, value) else value.isnan()
        if bool(unknown.any()):
            row = int(unknown.nonzero()[0, 0])
            fix = "" if name in self.graph.given else f", or leave {name} out to draw it"
            raise ValueError(
                f"sample fixes {name}, but it is unknown in row {row}, from 0 (−1 or NaN). What is fixed has to be known: give its value{fix}."
            )

    def _check_fixed(self, name: str, fixed: set[str]) -> None:
        if name in self.graph.given:
            return
        frontier = [ref.name for ref in self.graph.reads("p", name)]
        while frontier:
            parent = frontier.pop()
            if self.graph.is_deterministic(parent):
                frontier += [ref.name for ref in self.graph.reads("p", parent) if ref.name != parent]
            elif parent not in fixed:
                raise ValueError(
                    f"sample cannot fix {name!r}: p draws it given {parent!r}, which is free, so this would be an intervention. "
                    f"Use reconstruct({name}=…) or posterior({name}=…) to condition on it, or fix {parent!r} too."
                )

    def _ancestral(self, n: int, steps: int) -> Callable[[str, Entry, Tensor, int | None], Tensor]:
        like = self._parameter()

        def draw(name: str, entry: Entry, raw: Tensor, t: int | None) -> Tensor:
            factor = self.factors[entry.id]
            assert isinstance(factor, Factor)
            count = steps if self.graph.timed[name] and t is None else 1
            raw = raw.expand(torch.broadcast_shapes(raw.shape, (count, n, 1)))
            dist, kind = factor.distribution(raw), factor.spec.noise(factor.d)
            if kind is None:
                return draw_from(dist)
            shape = (*raw.shape[:-1], kind[1])
            return factor.spec.reparametrise(dist, noises.draw_one(kind[0], shape, None, like.device, like.dtype))

        return draw

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
        return posterior_of(self, batch, samples=samples, seed=seed, method=method)

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
        return impute(posterior_of(self, batch, seed=seed, method=method, prefer_exact=True), samples)

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
        graph = self.graph
        sides = {side: {str(entry.key): to_record(entry.spec) for entry in graph.entries() if entry.side == side} for side in "pq"}
        given = {name: list(shape) for name, shape in graph.given.items()}
        return {"format": "aevb model", "version": FORMAT, **sides, "given": given, "missing": self.missing}

    def save(self, path: str | Path) -> None:
        """Write ``model.json`` (the declaration), ``weights.safetensors`` and ``manifest.json`` (their hashes) into a folder."""
        if str(path) == "":
            raise ValueError('save("") names no folder. Say where the model is to be saved.')
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        write_model(Path(path), self.declaration(), weights, {TEACHING: json.dumps(self.teaching.state(self))})


def _count(word: str, what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"sample({word}=…) is how many {what} to draw, a whole number from 1 on. Got {value!r}.")
    return int(value)


def from_declaration(declaration: Mapping[str, Any], custom: Iterable[type] = ()) -> Model:
    """A fresh model from its declaration as data. ``custom`` are your own classes, if they are not registered."""
    if not isinstance(declaration, Mapping) or declaration.get("format") != "aevb model":
        raise ValueError("This is not an aevb model's declaration.")
    version = declaration.get("version")
    if isinstance(version, int) and version > FORMAT:
        raise ValueError(f"The model was saved in format {version}, newer than this version's {FORMAT}. Update aevb.")
    if not isinstance(version, int) or not all(isinstance(declaration.get(part), Mapping) for part in ("p", "q", "given")):
        raise ValueError("This is not an aevb model's declaration: version, p, q or given is missing, or not what it should be.")
    given, missing = declaration["given"], declaration.get("missing", "zeros")
    if not all(isinstance(shape, list | tuple) for shape in given.values()) or not isinstance(missing, str):
        raise ValueError("This is not an aevb model's declaration: given has a shape for each variable, and missing is a word.")
    if len(declaration["p"]) + len(declaration["q"]) > MOST_FACTORS:
        raise ValueError(f"The declaration has {len(declaration['p']) + len(declaration['q'])} factors; at most {MOST_FACTORS} are read.")
    custom = tuple(custom)
    p, q = ({key: from_record(record, custom) for key, record in declaration[side].items()} for side in ("p", "q"))
    return Model(p, q, {name: tuple(shape) for name, shape in given.items()}, missing=missing)


def read_model(path: Path, weights: Path, custom: Iterable[type] = ()) -> Model:
    """A fresh model from the file of its declaration. Its sizes are compared with the header of its weights before memory is taken for it."""
    where = path.parent
    try:
        declaration = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}.") from None
    try:
        found = tensor_shapes(weights)
    except ValueError as error:
        raise ValueError(f"{weights} is damaged or not a safetensors file: {error}.") from None
    custom = tuple(custom)
    try:
        factors = _check_counts(declaration, len(found))
        with _Budget(MOST_FIXED + 2 * sum(map(math.prod, found.values())), MOST_MADE * (len(found) + factors)):
            model = from_declaration(declaration, custom)
    except ValueError:
        raise
    except (TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise ValueError(f"{path} declares a model that cannot be built ({type(error).__name__}: {str(error).splitlines()[0]}).") from error
    _check_shapes(where, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, found)
    return model


class _Budget(TorchFunctionMode):
    """Refuse to make more tensors, or tensors of more numbers taken together, than there are weights for, before memory is taken for them."""

    MAKERS = frozenset(
        {"empty", "zeros", "ones", "full", "eye", "rand", "randn", "new_empty", "new_zeros", "new_ones", "new_full"}
        | {"arange", "linspace", "tril_indices", "repeat_interleave"}
    )

    def __init__(self, numbers: int, tensors: int) -> None:
        super().__init__()
        self.left, self.tensors = numbers, tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.MAKERS:
            self.left -= self._numbers(func.__name__, args)
            self.tensors -= 1
            if self.left < 0 or self.tensors < 0:
                raise ValueError("the declaration has sizes for which there are not as many weights")
        return func(*args, **kwargs or {})

    @staticmethod
    def _numbers(maker: str, args: Any) -> int:
        """How many numbers a call will make."""
        sizes = [size for size in args if not isinstance(size, Tensor)]
        shape = sizes[0] if sizes and isinstance(sizes[0], tuple | list) else [size for size in sizes if type(size) is int]
        if maker in ("arange", "linspace"):
            return max(map(abs, shape), default=0)
        if maker == "repeat_interleave":
            return math.prod(shape) * (args[0].numel() if isinstance(args[0], Tensor) else 1)
        return math.prod(shape) ** (2 if maker == "eye" and len(shape) == 1 else 1)


def _check_counts(declaration: Any, tensors: int) -> int:
    """Refuse more layers or parents than the file has tensors, since each has some, and lists without end. Returns the number of factors."""
    parts = declaration if isinstance(declaration, Mapping) else {}
    sides = [side for side in (parts.get("p"), parts.get("q")) if isinstance(side, Mapping)]
    given = parts.get("given")
    records: list[Any] = [record for side in sides for record in side.values()]
    layers = max((record["layers"] for record in records if isinstance(record, Mapping) and isinstance(record.get("layers"), int)), default=0)
    if layers > tensors:
        raise ValueError(f"The declaration has a recurrence of {layers} layers, but there are only {tensors} tensors of weights.")
    if (longest := _longest(records)) > MOST_FACTORS:
        raise ValueError(f"The declaration has a list of {longest} entries; at most {MOST_FACTORS} are read.")
    if (parents := sum(key.count(",") for side in sides for key in side)) > 2 * tensors + MOST_UNWEIGHTED:
        raise ValueError(f"The declaration has {parents} parents, but there are only {tensors} tensors of weights.")
    if isinstance(given, Mapping) and len(given) > tensors + MOST_UNWEIGHTED:
        raise ValueError(f"The declaration has {len(given)} given variables, but there are only {tensors} tensors of weights.")
    return len(records)


def _longest(values: Iterable[Any]) -> int:
    """The length of the longest list inside JSON data."""
    found, level = 0, list(values)
    while level:
        found = max([found, *(len(value) for value in level if isinstance(value, list))])
        level = [inner for value in level if isinstance(value, dict | list) for inner in (value.values() if isinstance(value, dict) else value)]
    return found


def _check_shapes(where: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    for name in sorted(expected.keys() ^ found.keys()):
        raise ValueError(f"{where}: the weights and the declaration disagree: {name} is in only one of them.")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(f"{where}: {name} has shape {list(found[name])}, the declaration says {list(shape)}.")


def load(path: str | Path, custom: Iterable[type] = ()) -> Model:
    """Read a model that ``save`` wrote, after comparing its files with their hashes. Nothing is unpickled and nothing is imported."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    folder = Path(path)
    places = checked_files(folder)
    model = read_model(places["model.json"], places["weights.safetensors"], custom)
    try:
        weights = load_file(places["weights.safetensors"])
        with safe_open(places["weights.safetensors"], "pt") as file:
            teaching = json.loads((file.metadata() or {}).get(TEACHING, "{}"))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{places['weights.safetensors']} is damaged or not a safetensors file: {error}.") from None
    floating = [tensor.dtype for tensor in weights.values() if tensor.is_floating_point()]
    model = model.to(floating[0]) if floating else model
    model.load_state_dict(weights)
    model.teaching.restore(model, teaching if isinstance(teaching, Mapping) else None)
    return model
