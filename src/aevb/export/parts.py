"""The functions of a model that can be exported: encoder, decoder, prior and score.

Each is a module from a dictionary of named tensors to another one. It runs the same plan and
program as an estimate does, so there is no second implementation of any model. All random numbers
are inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from aevb.declare.evaluation_order import Stage, schedule
from aevb.declare.graph import Entry, Graph
from aevb.declare.noise_kinds import SEED, NoiseKind
from aevb.derive.axes import TIME, at_step
from aevb.derive.plan import Plan, derive
from aevb.estimate.batch import Batch, lay_out
from aevb.estimate.before import Before, Shapes, shapes_before, state_name
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.estimators import Estimate
from aevb.estimate.keys import is_mask, mask_of
from aevb.estimate.program import Program
from aevb.evidence.exact import marginal
from aevb.evidence.linear_gaussian import LinearGaussian, why_not_linear_gaussian
from aevb.evidence.structure import Structure
from aevb.export.moments import moments
from aevb.export.ports import (
    BATCH,
    PRIME_ROWS,
    PRIME_STEPS,
    TIME_AXIS,
    Axes,
    Port,
    axes_of,
    inside,
    next_name,
    outside,
    variable_port,
    zeros,
)
from aevb.export.ports import state_name as state_port
from aevb.posterior.amortised import Posterior

START = "start"  # the input that says whether a sequence begins with this step


class Part(nn.Module):
    """A function of a model, from named inputs to named outputs.

    ``steps`` is the number of steps of sequences, ``"time"`` for any number, or None for one step
    of a recurrence: the values of the step before are then inputs too. ``ports`` are the inputs;
    :meth:`drop` removes those that the function does not use.
    """

    what = ""
    model: DeclaredModel

    def __init__(self, model: DeclaredModel, steps: int | str | None) -> None:
        super().__init__()
        self.factors = model.factors  # the weights; the model itself is no submodule
        self.__dict__["model"] = model
        self.graph: Graph = model.graph
        self.steps = steps
        self.ports: list[Port] = []
        self.dropped: list[Port] = []
        self.shapes: Shapes = {}  # of the step before, for PRIME_ROWS rows
        self.kinds: dict[str, NoiseKind] = {}  # of the noise, by key

    def drop(self, names: Iterable[str]) -> None:
        """Remove inputs. Zeros take their place."""
        gone = set(names)
        self.dropped += [port for port in self.ports if port.name in gone]
        self.ports = [port for port in self.ports if port.name not in gone]

    # Inputs ---------------------------------------------------------------------------------------

    def add_variables(self, kinds: Mapping[str, str]) -> None:
        """Add the inputs for variables, by name with their kinds."""
        self.ports += [
            variable_port(self.graph, name, kind, self.steps) for name, kind in kinds.items()
        ]

    def add_noise(self, plan: Plan) -> None:
        """Add the noise of a plan's draws.

        A family without noise of its own has the draw as an input instead.
        """
        layout = plan.layout(PRIME_ROWS, PRIME_STEPS, dropout=False)
        entries = {key: entry_id for entry_id, key in plan.noise_keys.items()}
        for key, (kind, shape) in layout.items():
            name = _variable(self.graph, entries[key])
            if kind == SEED:
                size = self.graph.size(name)
                shape = plan._shape(plan.values[name], PRIME_ROWS, PRIME_STEPS, size)
                family = type(self.graph.rule("q", name).spec).__name__
                axes = axes_of(shape, self.steps)
                self.ports.append(Port(f"draw.{name}", "draw", key, axes, noise=f"q, a {family}"))
            else:
                axes = axes_of(shape, self.steps)
                self.ports.append(Port(f"noise.{key}", "noise", key, axes, noise=str(kind)))
                self.kinds[key] = kind

    def add_state(self, plan: Plan, data: Iterable[str]) -> None:
        """Add the values of the step before that a step reads."""
        if self.steps is not None:
            return
        like = {name: torch.zeros(1, PRIME_ROWS, self.graph.size(name)) for name in data}
        masks = {
            mask_of(port.key): torch.ones(1, PRIME_ROWS, 1) for port in self.ports if port.missing
        }
        self.shapes = shapes_before(plan, {**like, **masks}, self.factors)
        for key, shape in self.shapes.items():
            *lead, _, _, d = shape
            axes: Axes = (*(size for size in lead if size != 1), BATCH, d)
            self.ports.append(Port(state_port(key), "state", key, axes))
        self.ports.append(Port(START, "start", START, (1,)))

    # Values ---------------------------------------------------------------------------------------

    def extent(self, inputs: Mapping[str, Tensor]) -> tuple[int, int]:
        """The numbers of rows and of steps."""
        n = steps = None
        for port in self.ports:
            for axis, size in zip(port.axes, inputs[port.name].shape, strict=True):
                n = size if axis == BATCH and n is None else n
                steps = size if axis == TIME_AXIS and steps is None else steps
        if isinstance(self.steps, int):
            steps = self.steps
        return 1 if n is None else n, 1 if steps is None else steps

    def given(self, inputs: Mapping[str, Tensor], kinds: Iterable[str]) -> dict[str, Tensor]:
        """The inputs of some kinds by key, with zeros for those that were dropped."""
        n, steps = self.extent(inputs)
        like = self.model._parameter()
        found = {port.key: inputs[port.name] for port in self.ports if port.kind in kinds}
        return found | {
            port.key: zeros(port, n, steps, like) for port in self.dropped if port.kind in kinds
        }

    def batch(self, inputs: Mapping[str, Tensor]) -> Batch:
        """The data as a batch, with a mask for every variable whose entries may be missing."""
        values = self.given(inputs, ("data", "given", "latent"))
        if self.steps is None:
            values = {
                name: value.unsqueeze(1) if self.graph.timed[name] else value
                for name, value in values.items()
            }
        ports = [*self.ports, *self.dropped]
        masks = [mask_of(port.key) for port in ports if port.missing]
        return lay_out(self.graph, values, like=self.model._parameter(), masks=masks)

    def before(self, inputs: Mapping[str, Tensor]) -> Before | None:
        """The values of the step before; None for whole sequences."""
        if self.steps is not None:
            return None
        n, _ = self.extent(inputs)
        states = self.given(inputs, ("state",))
        values = {
            key: states[key].reshape(*shape[:-2], n, shape[-1])
            for key, shape in self.shapes.items()
        }
        start = inputs.get(START)
        if start is None:
            start = torch.zeros(1, dtype=torch.bool, device=self.model._parameter().device)
        return Before.of(start.reshape(1, 1, 1), values)

    def estimate(self, plan: Plan, inputs: Mapping[str, Tensor]) -> Estimate:
        """Run a plan with the inputs as data, noise and state."""
        n, steps = self.extent(inputs)
        noise: Batch = {}
        draws: Batch = {}
        layout = plan.layout(n, steps, dropout=False)
        for kind in ("noise", "draw"):
            for key, value in self.given(inputs, (kind,)).items():
                name = key.partition("[")[0]
                shape = layout[key][1]
                if kind == "draw":
                    shape = plan._shape(plan.values[name], n, steps, self.graph.size(name))
                timed = self.graph.timed[name] and self.steps is not None
                (draws if kind == "draw" else noise)[key] = inside(value, shape, timed)
        noise |= dict.fromkeys(draws, torch.zeros(()))
        return _Fed(draws, plan, self.factors, self.batch(inputs), noise, self.before(inputs))

    def shown(self, name: str, values: Mapping[str, Tensor], n: int, steps: int) -> Batch:
        """The parameters of a variable's distribution as outputs: ``x.mean``, ``x.sd``."""
        graph, found = self.graph, {}
        timed = graph.timed[name] and self.steps is not None
        for key, value in values.items():
            d, shape = graph.size(name), graph.shapes[name]
            shape = (d, d) if key == "tril" else shape if value.shape[-1] == d else (-1,)
            found[f"{name}.{key}"] = outside(value, n, steps if timed else None, shape)
        return found

    def after(self, values: Mapping[str, Tensor], n: int) -> Batch:
        """The state after this step as outputs."""
        return {
            next_name(port.name): outside(values[port.key], n, None, port.axes[-1:])  # type: ignore[arg-type]
            for port in self.ports
            if port.kind == "state" and port.key in values
        }


class _Fed(Estimate):
    """An estimate in which the draws of some latents are given."""

    def __init__(
        self,
        draws: Mapping[str, Tensor],
        plan: Plan,
        factors: nn.ModuleDict,
        batch: Batch,
        noise: Mapping[str, Tensor],
        before: Before | None,
    ) -> None:
        self.draws = draws
        super().__init__(plan, factors, batch, noise, before=before)

    def _draw(self, name: str, entry: Entry, raw: Tensor, t: int | None) -> Tensor:
        if name in self.draws:
            return at_step(self.draws[name], t)
        return super()._draw(name, entry, raw, t)


class Encoder(Part):
    """From data to the parameters of q's factors.

    They are those of the exact marginal where q reads enumerated latents, and those given the draws
    where q reads drawn latents. ``unseen`` gives, by variable, the columns that no training row of
    q lacked: the outputs of rows that lack them are NaN.
    """

    what = "encoder"

    def __init__(
        self,
        model: DeclaredModel,
        steps: int | str | None,
        unseen: Mapping[str, Iterable[int]] | None = None,
    ) -> None:
        super().__init__(model, steps)
        graph = self.graph
        data = dict.fromkeys(graph.observed, "data") | dict.fromkeys(graph.given, "given")
        self.add_variables(data)
        refused = {name: tuple(sorted(columns)) for name, columns in (unseen or {}).items()}
        self.ports = [
            replace(port, refused=refused.get(port.key, ())) if port.missing else port
            for port in self.ports
        ]
        self.plan = encoding_plan(graph, partial=missing_of(self.ports))
        self.add_noise(self.plan)
        self.add_state(self.plan, data)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        working = self.estimate(self.plan, inputs)
        n, steps = self.extent(inputs)
        posterior = Posterior(self.model, dict(working.batch))
        found: dict[str, Tensor] = {}
        for name in self.graph.latents:
            found |= self.shown(name, self._moments(working, posterior, name), n, steps)
        found |= self.after(working.after(), n) if self.steps is None else {}
        for port in self.ports:
            if port.refused:
                columns = inputs[port.name].reshape(n, -1, self.graph.size(port.key))
                gone = columns[..., list(port.refused)].isnan().flatten(1).any(1)
                found = {
                    name: value.masked_fill(gone.reshape(n, *[1] * (value.dim() - 1)), torch.nan)
                    for name, value in found.items()
                }
        return found

    def _moments(self, working: Estimate, posterior: Posterior, name: str) -> dict[str, Tensor]:
        """The parameters of q's marginal of a latent at every step, [T or 1, N, numbers]."""
        graph = self.graph
        spec = graph.rule("p" if graph.rule("p", name).spec.finite else "q", name).spec
        regions: dict[str, dict[str, Tensor]] = {}
        for region, dist in posterior._by_region(working, name).items():
            regions[region] = {
                key: value.transpose(0, 1) if graph.timed[name] else value.unsqueeze(0)
                for key, value in moments(spec, dist).items()
            }

        def value_of(key: str) -> Tensor:
            if len(regions) == 1:
                return regions["all"][key]
            return working.program.piecewise(
                name,
                "q",
                lambda region: (
                    regions[region][key]
                    if region == "all"
                    else regions[region][key].narrow(TIME, 0, 1)
                ),
            )

        return {key: value_of(key) for key in regions["all"]}


class Decoder(Part):
    """From latents and given variables to the parameters of p's factors of some variables."""

    def __init__(
        self, model: DeclaredModel, steps: int | str | None, what: str, targets: Iterable[str]
    ) -> None:
        super().__init__(model, steps)
        graph = self.graph
        self.what, self.targets = what, tuple(targets)
        self.add_variables(
            dict.fromkeys(graph.latents, "latent")
            | dict.fromkeys(graph.given, "given")
            | dict.fromkeys(graph.observed, "latent")
        )
        self.stages = generating_stages(graph)
        if steps is None:
            plan = derive(graph, clamped=frozenset(graph.latents))
            self.add_state(plan, (*graph.stochastic, *graph.given))

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        graph, batch, before = self.graph, self.batch(inputs), self.before(inputs)
        n, steps = self.extent(inputs)
        program = Program(graph, self.factors, batch, steps=steps, before=before)
        program.values |= batch
        program.run(self.stages, _nothing)
        found: dict[str, Tensor] = {}
        for name in self.targets:
            found |= self.shown(name, self._moments(program, name), n, steps)
        return found | (self.after(self._after(program), n) if before is not None else {})

    def _moments(self, program: Program, name: str) -> dict[str, Tensor]:
        def at(region: str) -> dict[str, Tensor]:
            spec, dist = program.distribution("p", name, region)
            return moments(spec, dist)

        return {
            key: program.piecewise(name, "p", lambda region, key=key: at(region)[key])  # type: ignore[misc]
            for key in at("all")
        }

    def _after(self, program: Program) -> dict[str, Tensor]:
        """The states and the functions that this step computed."""
        states = {
            state_name(name, i): part
            for name, state in program.states.items()
            for i, part in enumerate(state)
        }
        functions = {
            name: program.values[name]
            for name in self.shapes
            if not is_mask(name)
            and ":" not in name
            and self.graph.is_deterministic(name)
            and name in program.values
        }
        return functions | states


class Bound(Part):
    """From data and noise to the bound of a plan and its terms, one number per example."""

    what = "score"

    def __init__(
        self, model: DeclaredModel, steps: int | str | None, bound: str, samples: int | None
    ) -> None:
        super().__init__(model, steps)
        graph = self.graph
        data = dict.fromkeys(graph.observed, "data") | dict.fromkeys(graph.given, "given")
        self.add_variables(data)
        self.plan = model.plan(bound=bound, samples=samples, partial=missing_of(self.ports))
        self.add_noise(self.plan)
        self.add_state(self.plan, data)
        self.key = bound if graph.latents else "log_p"

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        working = self.estimate(self.plan, inputs)
        n, _ = self.extent(inputs)
        bound = working.bound()
        terms = {f"{self.key}.{name}": term for name, term in bound.terms.items()}
        found = {self.key: bound.value, **terms}
        return found | (self.after(working.after(), n) if self.steps is None else {})


class LogEvidence(Part):
    """From data to the exact log p(data | given), one number per example, computed in float64."""

    what = "score"

    def __init__(self, model: DeclaredModel, steps: int | str | None) -> None:
        super().__init__(model, steps)
        graph = self.graph
        self.add_variables(
            dict.fromkeys(graph.observed, "data") | dict.fromkeys(graph.given, "given")
        )
        self.joint = why_not_linear_gaussian(model) is None
        self.structure = None if self.joint else Structure(model)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        batch = self.batch(inputs)
        n, _ = self.extent(inputs)
        if self.structure is None:
            value = LinearGaussian(self.model, batch, torch.float64).log_evidence()
        else:
            value = marginal(self.model, self.structure, batch)
        return {"log_p": value.expand(n).to(self.model._parameter().dtype)}


# Plans and stages -----------------------------------------------------------------------------


def encoding_plan(graph: Graph, partial: frozenset[str] = frozenset()) -> Plan:
    """The plan by which q's factors are computed: finite latents are summed where possible."""
    try:
        return derive(graph, partial=partial)
    except ValueError:  # the bound would need several samples, but q's factors do not
        return derive(graph, partial=partial, sampling=True)


def generating_stages(graph: Graph) -> tuple[Stage, ...]:
    """The order in which p's functions of known variables are computed."""
    functions = {name: graph.reads("p", name) for name in graph.p if graph.is_deterministic(name)}
    return schedule(functions, "p")


def missing_of(ports: Iterable[Port]) -> frozenset[str]:
    """The observed variables whose entries may be missing."""
    return frozenset(port.key for port in ports if port.missing)


def _variable(graph: Graph, entry_id: str) -> str:
    return next(entry.key.name for entry in graph.entries() if entry.id == entry_id)


def _nothing(*_: Any) -> Tensor:
    raise AssertionError("p's functions draw nothing")
