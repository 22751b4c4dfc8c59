"""A declaration with its weights, as estimates, evidence and posteriors read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn

from aevb.declare.conditionals import Conditional, Factor
from aevb.declare.deterministic import Cell, Deterministic, Function, Recurrence
from aevb.declare.graph import Entry, Graph
from aevb.declare.missing_members import MissingMemberError, explaining_missing_members
from aevb.declare.networks import Shape
from aevb.declare.own_families import check_own_family
from aevb.derive.axes import TIME
from aevb.derive.explain import describe
from aevb.derive.plan import Plan, derive
from aevb.estimate import noise as noises
from aevb.estimate.batch import Batch, prepare
from aevb.estimate.family_check import warn_of_wrong_families
from aevb.estimate.keys import mask_of
from aevb.runtime.devices import device_named
from aevb.runtime.evaluation_mode import drops_units, evaluating
from aevb.runtime.seeding import seeded

RESERVED = (
    "self",
    "steps",
    "lengths",
    "given",
    "how",
    "bound",
    "samples",
    "gradient",
    "resample",
    "gaps",
    "temperature",
    "noise",
    "seed",
    "kl_weight",
    "mean",
    "method",
    "memory",
    "iterations",
    "n",
    "elbo",
    "iwae",
    "particles",
    "objective",
    "evidence",
    "expected",
    "gap",
    "step",
    "epoch",
    "lr",
    "phase",
    "seconds",
    "note",
)


class DeclaredModel(nn.Module):
    """The graph of p and q, one module per factor, and the derived plans.

    :class:`aevb.Model` adds the user's methods.
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
                raise ValueError(
                    f"{name!r} is a word of this library; call the variable something else."
                )
        self.missing = missing
        self.factors = nn.ModuleDict(
            {entry.id: self._build(entry) for entry in self.graph.entries()}
        )
        warn_of_wrong_families(
            (entry, factor)
            for entry in self.graph.entries()
            if isinstance(factor := self.factors[entry.id], Factor)
        )
        self._plans: dict[Any, Plan] = {}

    def _build(self, entry: Entry) -> nn.Module:
        spec, shape = entry.spec, self.graph.shapes[entry.key.name]
        own = entry.key.name if isinstance(spec, Cell) else None
        parents = {
            str(ref): self.graph.shapes[ref.name] for ref in entry.key.parents if ref.name != own
        }
        reads_masks = self.missing == "mask" and entry.side == "q"
        masked = [
            str(ref) for ref in entry.key.parents if reads_masks and ref.name in self.graph.observed
        ]
        try:
            if isinstance(spec, Cell):
                return Recurrence(spec, shape[0], parents, masked)
            if isinstance(spec, Deterministic):
                return Function(spec, shape, parents, masked)
            if not spec.has_parameters:
                return nn.Module()
            factor = Factor(spec, shape, parents, masked)
            check_own_family(factor)
            return factor
        except ValueError as error:
            raise ValueError(f"{entry.where}: {error}") from None

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move to a device or a precision, as in torch.

        Raise ValueError if there is no such GPU.
        """
        for value in (*args[:1], kwargs.get("device")):
            if isinstance(value, str | torch.device) and str(value).startswith(("cuda", "mps")):
                device_named(value, argument=".to({!r})")
        return super().to(*args, **kwargs)

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Move to a GPU."""
        return self.to(
            "cuda"
            if device is None
            else torch.device("cuda", device)
            if isinstance(device, int)
            else device
        )

    def theta(self) -> list[nn.Parameter]:
        """The generative parameters θ: all parameters of p.

        Returns:
            The parameters, including those of nodes that q reads too.

        >>> from aevb import Model, Normal
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> sum(parameter.numel() for parameter in model.theta())
        8
        """
        return [
            parameter
            for entry in self.graph.entries()
            if entry.side == "p"
            for parameter in self.factors[entry.id].parameters()
        ]

    def phi(self) -> list[nn.Parameter]:
        """The inference parameters φ: the parameters that only q reads.

        Returns:
            The parameters of q's entries.

        >>> from aevb import Model, Normal
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> sum(parameter.numel() for parameter in model.phi())
        6
        """
        return [
            parameter
            for entry in self.graph.entries()
            if entry.side == "q"
            for parameter in self.factors[entry.id].parameters()
        ]

    def __repr__(self) -> str:
        counts = {
            entry.id: sum(parameter.numel() for parameter in self.factors[entry.id].parameters())
            for entry in self.graph.entries()
        }
        return describe(self.graph, counts)

    __str__ = __repr__

    def plan(
        self,
        *,
        how: Mapping[str, str] | None = None,
        bound: str = "elbo",
        samples: int | None = None,
        gradient: str = "plain",
        resample: float | None = None,
        clamped: Iterable[str] = (),
        partial: Iterable[str] = (),
    ) -> Plan:
        """Derive the estimator for some choices (cached).

        Arguments:
            how: Overrides for single latents, as in :meth:`Model.elbo`.
            bound: As in :meth:`Model.elbo`.
            samples: As in :meth:`Model.elbo`.
            gradient: As in :meth:`Model.elbo`.
            resample: As in :meth:`Model.elbo`.
            clamped: The latents that are known in every row.
            partial: The variables that are known in some rows or entries only.

        Returns:
            The plan: ``choices`` says how each latent is drawn and its term is taken.

        >>> from aevb import Model, Normal
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> plan = model.plan()
        >>> str(plan.choices["z"].draw), plan is model.plan()
        ('pathwise', True)
        """
        key = (
            tuple(sorted((how or {}).items())),
            bound,
            samples,
            gradient,
            resample,
            frozenset(clamped),
            frozenset(partial),
        )
        if key not in self._plans:
            self._plans[key] = derive(
                self.graph,
                how=how,
                bound=bound,
                samples=samples,
                gradient=gradient,
                resample=resample,
                clamped=frozenset(clamped),
                partial=frozenset(partial),
            )
        return self._plans[key]

    def _parameter(self) -> Tensor:
        """A tensor with the device and precision of the model."""
        for tensor in chain(self.parameters(), self.buffers()):
            if tensor.is_meta:
                raise ValueError(
                    "This model is on the meta device and has no weights. Use "
                    '.to_empty(device="cpu"), then load weights.'
                )
            if tensor.is_floating_point():
                return tensor
        return torch.zeros(())

    @contextmanager
    def _in_its_precision(self) -> Iterator[None]:
        """Raise a readable ValueError for what is not implemented.

        That is an operation in the model's half precision, or a member of a distribution.
        """
        try:
            with explaining_missing_members(dict(self.factors.items())):
                yield
        except MissingMemberError:
            raise
        except NotImplementedError as error:
            dtype = self._parameter().dtype
            if dtype not in (torch.bfloat16, torch.float16):
                raise
            raise ValueError(
                f"torch cannot compute this in the model's precision, {str(dtype)[6:]} ({error}). "
                f"Use model.float()."
            ) from error

    def prepare(
        self, *, steps: Any = None, lengths: Any = None, gaps: Any = False, **data: Any
    ) -> Batch:
        """Check data against the declaration and convert them to a batch.

        Arguments:
            steps: Marks the real steps of ragged sequences, [N, T].
            lengths: The number of steps of each ragged sequence, [N].
            gaps: Whether to allow missing entries of observed variables that p reads. A plan that
                names them as ``partial`` draws them from p.
            **data: The variables by name.

        Returns:
            Tensors by variable, [steps or 1, N, size], with masks of what is missing.

        >>> import torch
        >>> from aevb import Model, Normal
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> model.prepare(x=torch.zeros(3, 2))["x"].shape
        torch.Size([1, 3, 2])
        """
        return prepare(
            self.graph, data, like=self._parameter(), steps=steps, lengths=lengths, gaps=bool(gaps)
        )

    def draw_noise(
        self, plan: Plan, batch: Mapping[str, Tensor], *, seed: int | None = None
    ) -> dict[str, Tensor]:
        """Draw all random numbers of one estimate.

        Arguments:
            plan: The estimate, from :meth:`plan`. Give :meth:`plan` what elbo gets (how, bound,
                samples, …), and as ``partial`` the variables with missing entries that p reads.
            batch: The data, from :meth:`prepare`.
            seed: Decides the numbers; None uses torch's global generator.

        Returns:
            The noise by latent, for :meth:`Model.elbo`, each [K, T, N, d]: samples, steps, rows
            and entries. K and T are 1 for one sample and without time. Axes of enumerated latents
            come before K. In training mode there are dropout masks too, by factor and layer.

        >>> import torch
        >>> from aevb import Model, Normal
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> x = torch.zeros(3, 2)
        >>> noise = model.draw_noise(model.plan(), model.prepare(x=x), seed=0)
        >>> torch.equal(model.elbo(x=x, noise=noise).value, model.elbo(x=x, seed=0).value)
        True
        """
        for name in self.graph.observed:
            gaps = mask_of(name) in batch and self.graph.is_read_by_p(name)
            if gaps and name not in plan.completed:
                raise ValueError(
                    f"{name} has missing entries that p reads, and this estimate does not draw "
                    f"them. Fill the entries, or name {name} in the plan's partial=."
                )
        like = self._parameter()
        n, steps = self._extent(batch)
        generator = None if seed is None else torch.Generator(like.device).manual_seed(seed)
        layout = plan.layout(n, steps, dropout=drops_units(self))
        return noises.draw(layout, generator=generator, device=like.device, dtype=like.dtype)

    def _check_noise(
        self, plan: Plan, batch: Mapping[str, Tensor], noise: Mapping[str, Tensor]
    ) -> None:
        needed = plan.layout(*self._extent(batch), dropout=False)
        masks = plan.layout(*self._extent(batch), dropout=True)  # none of them: no dropout
        for name, (_, shape) in masks.items():
            if name not in noise and name not in needed:
                continue
            if name not in noise or tuple(noise[name].shape) != shape:
                found = f"has shape {list(noise[name].shape)}" if name in noise else "is missing"
                raise ValueError(
                    f"The noise of {name} {found}; this estimate needs {list(shape)}: samples, "
                    f"steps, rows, entries. Draw it with draw_noise(plan, batch)."
                )

    def _extent(self, batch: Mapping[str, Tensor]) -> tuple[int, int]:
        """The numbers of examples and of steps."""
        timed = [value.shape[TIME] for name, value in batch.items() if self.graph.timed.get(name)]
        return next(iter(batch.values())).shape[-2], timed[0] if timed else 1

    @contextmanager
    def _evaluating(self, seed: int | None) -> Iterator[None]:
        """Disable gradients and dropout, and use the seed if one is given, in this thread only."""
        with (
            self._in_its_precision(),
            torch.no_grad(),
            evaluating(self),
            seeded(seed, all_code=seed is not None and self._has_own_code()),
        ):
            yield

    def _has_own_code(self) -> bool:
        """Whether the model uses a class of the user, whose code may draw random numbers."""
        specs = (
            part
            for entry in self.graph.entries()
            for part in (entry.spec, getattr(entry.spec, "net", None))
            if part is not None
        )
        return any(
            not type(part).__module__.startswith(("aevb.", "torch.nn.modules."))
            for part in chain(specs, self.modules())
        )
