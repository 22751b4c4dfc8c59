"""TableModel: a model of a table with its schema. Every result is a frame like the input."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from aevb.data.large_tables import LargeTable
from aevb.evidence import AIS, Particles
from aevb.evidence.exact import why_not_exact
from aevb.export import Exported, export_model
from aevb.loading import load
from aevb.model import Model
from aevb.posterior.choice import UntaughtError
from aevb.posterior.exact import ExactPosterior
from aevb.runtime.checked_files import LONGEST_BESIDE, DataWarning, read_json
from aevb.runtime.checked_files import replace as replace_file
from aevb.tables.cells import frame_of, typed
from aevb.tables.columns import Column
from aevb.tables.declarations import PART
from aevb.tables.fitting import fit_data
from aevb.tables.frames import Table, new_frame, read_table
from aevb.tables.left_out import warn_of_unfilled
from aevb.tables.schema import Schema
from aevb.tables.tail_probabilities import TailProbabilities
from aevb.training.run import Run, load_run
from aevb.training.run_folder import SCHEMA

if TYPE_CHECKING:
    from aevb.model_card import ModelCard
    from aevb.page.notebook import Page

DRAWS = 200  # of the latents, where the posterior is not exact
AT_ONCE = 2**23  # numbers per array: entries of the rows of a part, for all values of the classes


@dataclass(frozen=True)
class TableModel:
    """A model of a table, fitted by :meth:`Schema.fit` or read by :func:`load_table`.

    Its methods take a frame with the schema's columns, in any order, and return frames of the same
    library with the same index, names, levels and units.

    Arguments:
        schema: The :class:`Schema` of the table.
        model: The :class:`Model` of its encoded rows.
        run: The run that fitted it, if there is one.
        saved: The folder of a model that was read and is no run.

    >>> import tempfile
    >>> import pandas as pd
    >>> random = np.random.default_rng(0)
    >>> height = np.repeat([170.0, 210.0], 30) + random.normal(size=60)
    >>> frame = pd.DataFrame({"height": height, "mass": 0.4 * height + random.normal(size=60)})
    >>> schema = Schema.read(frame)
    >>> fitted = schema.fit(schema.mixture(2), frame, seed=0, progress=False)
    >>> fitted
    TableModel of 2 columns with the latent cluster (2); exact posterior
    >>> list(fitted.clusters(frame))
    ['cluster', 'p0', 'p1']
    >>> sorted(fitted.profiles()["height"].round(-1).tolist())
    [170.0, 210.0]
    >>> holes = pd.DataFrame({"height": [170.0, 210.0], "mass": [np.nan, np.nan]})
    >>> fitted.impute(holes)["mass"].round().tolist()
    [68.0, 84.0]
    >>> fitted.score(holes)["log_p"].shape, fitted.sample(3, seed=0)["mass"].shape
    ((2,), (3,))
    >>> fitted.with_unknown_levels("missing").schema.unknown_levels
    'missing'
    >>> fitted.page(frame)
    Page of table; page.save('page.html') writes it
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fitted.save(folder)
    ...     again = load_table(folder)
    >>> again.schema == schema
    True
    """

    schema: Schema
    model: Model
    run: Run | None = None
    saved: Path | None = None

    @property
    def folder(self) -> Path | None:
        """The folder of the run, or the one that the model was read from."""
        return self.saved if self.run is None else self.run.out

    def __post_init__(self) -> None:
        _check_matches(self.schema, self.model)

    def __repr__(self) -> str:
        latents = ", ".join(
            f"{name} ({self.model.graph.size(name)})" for name in self.model.graph.latents
        )
        exact = "exact" if why_not_exact(self.model) is None else "approximate"
        return (
            f"TableModel of {len(self.schema.used)} columns with the latent{'s' * (',' in latents)}"
            f" {latents}; {exact} posterior"
        )

    def _repr_html_(self) -> str:
        from aevb.notebook import result_cards

        return result_cards.table_card(self)

    def with_unknown_levels(self, choice: str) -> TableModel:
        """Return the model with another treatment of levels that its schema does not know.

        Arguments:
            choice: "missing" treats such cells as missing, and "error" refuses them; see
                :meth:`Schema.with_unknown_levels`.
        """
        return replace(self, schema=self.schema.with_unknown_levels(choice))

    # Latents --------------------------------------------------------------------------------------

    def codes(self, frame: Any, *, return_std: bool = False, seed: int = 0) -> Any:
        """The posterior mean of the continuous latents.

        Arguments:
            frame: The rows.
            return_std: Whether to return the posterior standard deviations too.
            seed: Decides the draws, where the posterior is not exact.

        Returns:
            A frame with one column per entry (z1, z2, …); with ``return_std`` a second one.

        >>> random = np.random.default_rng(0)
        >>> height = random.normal(170, 9, 60)
        >>> frame = {"height": height, "mass": 0.4 * height + random.normal(size=60)}
        >>> schema = Schema.read(frame)
        >>> list(schema.fit(schema.factors(1), frame, progress=False).codes(frame))
        ['z']
        """
        graph, table = self.model.graph, read_table(frame)
        names = [name for name in graph.latents if not graph.rule("p", name).spec.finite]
        if not names:
            raise ValueError(
                "This model has no continuous latents, so rows have no codes. Use clusters(frame) "
                "for the probabilities of its clusters, or fit schema.factors(3) or schema.vae(3)."
            )
        found = [
            [(p[name].mean, p[name].variance.clamp_min(0).sqrt()) for name in names]
            for p in self._posteriors(table, seed)
        ]
        means, spreads = {}, {}
        for name, each in zip(names, zip(*found, strict=True), strict=True):
            mean, spread = (_numpy(torch.cat(part)) for part in zip(*each, strict=True))
            for j in range(mean.shape[1]):
                label = name if mean.shape[1] == 1 else f"{name}{j + 1}"
                means[label], spreads[label] = mean[:, j], spread[:, j]
        if return_std:
            return table.beside(means), table.beside(spreads)
        return table.beside(means)

    def clusters(self, frame: Any, *, seed: int = 0) -> Any:
        """The most probable cluster of each row, and the probability of every cluster.

        Arguments:
            frame: The rows.
            seed: Decides the draws, where the posterior is not exact.

        Returns:
            A frame with the columns ``cluster`` (from 0) and ``p0``, ``p1``, ….
        """
        table = read_table(frame)
        probabilities = self._probabilities(table, seed)
        columns: dict[str, np.ndarray] = {"cluster": probabilities.argmax(1)}
        columns |= {f"p{k}": probabilities[:, k] for k in range(probabilities.shape[1])}
        return table.beside(columns)

    def profiles(self) -> Any:
        """What the clusters of a mixture are.

        Returns:
            A frame with one row per cluster. The column ``share`` has the probability of the
            cluster. Every other column has its typical cell there: the mean of a number, the median
            of a positive number, the most probable level.
        """
        graph = self.model.graph
        rules = [graph.rule("p", name) for name in graph.observed]
        (latent, *others) = graph.latents
        mixture = not others and graph.rule("p", latent).spec.categorical
        if not mixture or any([str(ref) for ref in rule.key.parents] != [latent] for rule in rules):
            raise ValueError(
                "Profiles are those of a mixture, whose columns depend on the cluster alone: fit "
                "schema.mixture(3)."
            )
        fixed: dict[str, Any] = {latent: torch.eye(graph.size(latent)).to(self.model._parameter())}
        found = self.model.sample(graph.size(latent), mean=True, seed=0, **fixed)
        data = {name: _numpy(found[name]) for name in self.schema.variables}
        factor: Any = self.model.factors[graph.rule("p", latent).id]
        share = _numpy(factor.root.softmax(-1))
        cells = self.schema.decode(data)
        columns: dict[str, Any] = {"cluster": np.arange(len(share)), "share": share}
        for column in self.schema.used:
            values = cells[column.name]
            columns[column.name] = (
                typed(column, values, column.dtype)
                if column.kind == "date" or column.listed
                else values
            )
        return new_frame(self.schema.library, columns)

    def _probabilities(self, table: Table, seed: int) -> np.ndarray:
        graph = self.model.graph
        names = [name for name in graph.latents if graph.rule("p", name).spec.categorical]
        if names == [PART]:
            raise ValueError(
                "This model is a density of several mixtures, whose parts are no clusters. Use "
                "schema.fit_clusters(frame), or fit schema.mixture(3)."
            )
        if not names:
            raise ValueError(
                "This model has no clusters. Use codes(frame), or fit schema.mixture(3) or "
                "schema.gmvae(3, 2)."
            )
        return np.concatenate([_numpy(p[names[0]].probs) for p in self._posteriors(table, seed)])

    def _posteriors(self, table: Table, seed: int) -> Iterator[Any]:
        """Yield the posterior of the latents, a limited number of rows at a time."""
        method = "exact" if why_not_exact(self.model) is None else "auto"
        for part in _parts(self.model, self.schema.encode(table)):
            with _advising():
                yield self.model.posterior(samples=DRAWS, seed=seed, method=method, **part)

    # Density --------------------------------------------------------------------------------------

    def score(
        self,
        frame: Any,
        *,
        method: str | AIS | Particles = "auto",
        samples: int | None = None,
        tail: bool = False,
        seed: int = 0,
    ) -> Any:
        """log p of each row, as a density of the original columns (nats).

        Missing cells are marginalised out. Among rows with the same missing cells, those with the
        lowest log_p are outliers. log_p of rows with different missing cells is not comparable:
        each known cell adds a term that depends on its unit. Their tail probabilities are
        comparable: the shares of rows simulated from the model, with the same missing cells, that
        are at most as likely.

        Arguments:
            frame: The rows.
            method: As in :meth:`Model.log_evidence`.
            samples: The number of draws, if log p is not exact.
            tail: Whether to add tail probabilities; they need an exact log p.
            seed: Decides the draws.

        Returns:
            A frame with the column ``log_p``. If the evidence is not exact, ``stderr`` has its
            standard error; with ``tail``, the column ``tail`` has the tail probabilities.
        """
        if tail and (method not in ("auto", "exact") or why_not_exact(self.model) is not None):
            raise ValueError(
                'tail=True needs an exact log p. Leave it out, or score with method="auto" and a '
                "model whose log p is exact: schema.fit_default(frame) or schema.mixture(3)."
            )
        table = read_table(frame)
        data: dict[str, Any] = dict(self.schema.encode(table))
        jacobian = self.schema.log_jacobian(table)
        found = self.model.log_evidence(method=method, samples=samples, seed=seed, **data)
        columns = {"log_p": _numpy(found.value) + jacobian}
        if found.method != "exact":
            columns["stderr"] = _numpy(found.stderr)
            if found.notes:
                warnings.warn(" ".join(found.notes), DataWarning, stacklevel=2)
        if tail:
            tails = TailProbabilities(self.schema, self.model, seed).of(frame, columns["log_p"])
            assert tails is not None
            columns["tail"] = tails
        return table.beside(columns)

    def sample(self, n: int = 1, *, seed: int | None = None) -> Any:
        """Draw new rows, with the library, names, types and units of the training table.

        A saved model remembers the library of its frame. A table that was read from a file gives a
        table of pyarrow.

        Arguments:
            n: The number of rows.
            seed: Decides the draws; None uses torch's global generator.

        Returns:
            A frame with the rows.
        """
        drawn = {name: _numpy(value) for name, value in self.model.sample(n, seed=seed).items()}
        found = self.schema.decode({name: drawn[name] for name in self.schema.variables})
        return frame_of(self.schema, found)

    # Missing cells --------------------------------------------------------------------------------

    def impute(
        self,
        frame: Any,
        draws: int | None = None,
        *,
        return_std: bool = False,
        rounded: bool = True,
        seed: int = 0,
    ) -> Any:
        """Fill the missing cells of the modelled columns, given the known cells of their row.

        A number gets its posterior mean in the units of the table (of a positive column: the mean
        of the log-normal, not the exponential of the mean logarithm), a count its mean, rounded,
        and a level the most probable one. Known cells, cells with an unknown level and columns left
        out are unchanged.

        Arguments:
            frame: The rows.
            draws: Return a list of that many frames filled with joint draws instead (multiple
                imputation).
            return_std: Also return a frame with the posterior standard deviation of each filled
                number, and for a level the probability that it is another one; 0 for known cells.
            rounded: False fills counts, other whole numbers, and numbers of an ordered column with
                posterior means that need not be whole; their mean squared error is smaller. A
                column of integers is then one of float64, and counts and levels that are filled so
                are no cells that :meth:`score` reads.
            seed: Decides the draws.

        Returns:
            The filled frame, or as ``draws`` and ``return_std`` say.
        """
        table = read_table(frame)
        hidden = self.schema.missing_cells(table, unknown_levels=False)
        data = self.schema.encode(table)
        warn_of_unfilled(self.schema.columns, table, self.schema.missing_words)
        if draws is not None:
            if return_std:
                raise ValueError("Use draws= or return_std=True, not both.")
            return self._drawn(table, data, hidden, draws, seed)
        some = np.flatnonzero(np.logical_or.reduce(list(hidden.values())))
        found = self._moments({name: value[some] for name, value in data.items()}, rounded, seed)
        filled, spreads, means = {}, {}, {}
        for column in self.schema.used:
            rows = np.flatnonzero(hidden[column.name])
            spread = np.zeros(table.rows)
            if len(rows):
                at = np.searchsorted(some, rows)
                means[column.name], spread[rows] = (part[at] for part in found[column.name])
                dtype = table.cells(column.name, ()).dtype
                cells = typed(column, means[column.name], dtype, rounded=rounded)
                filled[column.name] = rows, cells
            spreads[column.name] = spread
        _warn_of_extrapolation(self.schema, means)
        whole = table.replaced(filled)
        return (whole, table.beside(spreads)) if return_std else whole

    def _moments(self, data: dict[str, np.ndarray], rounded: bool, seed: int) -> Moments:
        """The value and the uncertainty of the cells of columns with missing ones, [rows] each."""
        cuts = list(_parts(self.model, data)) if len(next(iter(data.values()))) else []
        found = [_moments(self.schema, self.model, part, rounded, seed) for part in cuts]
        sizes = [len(next(iter(part.values()))) for part in cuts]

        def joined(name: str, which: int) -> np.ndarray:
            return np.concatenate(
                [
                    part[name][which] if name in part else np.full(size, np.nan)  # all are known
                    for part, size in zip(found, sizes, strict=True)
                ]
            )

        return {name: (joined(name, 0), joined(name, 1)) for part in found for name in part}

    def _drawn(
        self,
        table: Table,
        data: dict[str, Any],
        hidden: dict[str, np.ndarray],
        draws: int,
        seed: int,
    ) -> list[Any]:
        if draws < 1:
            raise ValueError(f"draws is the number of filled frames, at least 1, got {draws}.")
        if not any(mask.any() for mask in hidden.values()):
            return [table.replaced({}) for _ in range(draws)]
        with _advising():
            drawn = self.model.impute(samples=draws, seed=seed, **data).draws
        frames, dtypes = [], {name: table.cells(name, ()).dtype for name in hidden}
        for k in range(draws):
            plain = self.schema.decode({name: _numpy(value[k]) for name, value in drawn.items()})
            filled = {
                name: (rows, typed(self.schema[name], plain[name][rows], dtypes[name]))
                for name, mask in hidden.items()
                if len(rows := np.flatnonzero(mask))
            }
            frames.append(table.replaced(filled))
        return frames

    # Files ----------------------------------------------------------------------------------------

    def page(self, frame: Any, *, out: str | Path | None = None, rows: int | None = None) -> Page:
        """Make a page to look at this model and the rows of a frame.

        Arguments:
            frame: The rows.
            out: As in :meth:`Run.page`.
            rows: As in :meth:`Run.page`.

        Returns:
            The page. A notebook shows it inline, and ``page.save(path)`` writes it.
        """
        from aevb.page.notebook import page_of_table

        return page_of_table(self, frame, out=out, rows=rows)

    def card(
        self,
        frame: Any,
        *,
        out: str | Path | None = None,
        about: str | None = None,
        license: str | None = None,
    ) -> ModelCard:
        """Make a model card, with results on the rows of a frame; see :meth:`Run.card`.

        Arguments:
            frame: Rows by which the model is judged; the card holds no cell of them.
            out: A file to write, such as README.md.
            about: What the model is for, in a sentence.
            license: An identifier such as "mit".

        Returns:
            The card. ``card.save(path)`` writes it.

        >>> import numpy as np, pandas as pd
        >>> from aevb import Schema
        >>> frame = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 2)), columns=["a", "b"])
        >>> Schema.read(frame).fit_default(frame, seed=0).card(frame)
        ModelCard of table; card.save('README.md') writes it
        """
        from aevb.model_card import card_of_table

        return card_of_table(self, frame, out=out, about=about, license=license)

    def export(
        self,
        format: str = "onnx",
        *,
        what: str = "encoder",
        out: str | Path | None = None,
        bound: str = "auto",
        samples: int | None = None,
        check: bool = True,
    ) -> Exported:
        """Write a part of the model behind the table into a file; see :meth:`Model.export`.

        The inputs are not the columns of the table but the arrays of ``schema.encode(frame)``, and
        a score is a density of these. The metadata of the file has the schema, which says how
        every column is prepared, under the key "schema".

        Arguments:
            format: As in :meth:`Model.export`.
            what: As in :meth:`Model.export`.
            out: As in :meth:`Model.export`.
            bound: As in :meth:`Model.export`.
            samples: As in :meth:`Model.export`.
            check: As in :meth:`Model.export`.

        Returns:
            The :class:`~aevb.export.Exported`.

        >>> import os, tempfile
        >>> from aevb import Schema
        >>> table = {"height": [1.5, 1.7, 1.8, 1.6, 1.9, 1.75], "weight": [50, 66, 82, 61, 90, 70]}
        >>> schema = Schema.read(table)
        >>> fitted = schema.fit(schema.factors(1), table, seed=0)
        >>> file = os.path.join(tempfile.mkdtemp(), "encoder.pt2")
        >>> fitted.export("torch", what="encoder", out=file).outputs["z.mean"]
        ('batch', 1)
        """
        return export_model(
            self.model,
            self.model.teaching,
            format,
            what=what,
            out=out,
            bound=bound,
            samples=samples,
            check=check,
            metadata={"schema": json.loads(self.schema.to_json())},
        )

    def save(self, folder: str | Path) -> None:
        """Write the model and ``schema.json`` into a folder, which :func:`load_table` reads.

        Arguments:
            folder: The folder.
        """
        self.model.save(folder)
        replace_file(Path(folder) / SCHEMA, self.schema.to_json())


def load_table(folder: str | Path) -> TableModel:
    """Read a model of a table.

    Arguments:
        folder: A run of :meth:`Schema.fit`, or a folder of :meth:`TableModel.save`.

    Returns:
        The :class:`TableModel`.

    >>> import tempfile
    >>> schema = Schema.read({"height": [170.0, 160.0, 180.0], "sex": ["f", "m", "f"]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     TableModel(schema, schema.mixture(2)).save(folder)
    ...     again = load_table(folder)
    >>> again
    TableModel of 2 columns with the latent cluster (2); exact posterior
    """
    place = Path(folder)
    if not (place / SCHEMA).is_file():
        raise ValueError(
            f"{place} holds no model of a table: {SCHEMA} is missing. aevb.load and aevb.load_run "
            f"read other models."
        )
    schema = _read_schema(place)
    if (place / "checkpoints").is_dir():
        model = load_run(place)
        return TableModel(schema, model, replace(Run.load(place), model=model))
    return TableModel(schema, load(place), saved=place)


def fit_table(
    schema: Schema,
    model: Model,
    frame: Any,
    *,
    validation: Any = None,
    out: str | Path | None = None,
    starts: int | None = None,
    hide: float = 0.0,
    **settings: Any,
) -> TableModel:
    """Fit a model to a frame; see :meth:`Schema.fit`."""
    _check_matches(schema, model)
    if isinstance(frame, LargeTable):
        frame = frame.sample if why_not_exact(model) is None else frame.few()
    data = schema.encode(frame)
    held_out = None if validation is None else schema.encode(validation)
    settings |= {"starts": starts, "hide": hide, "validation": held_out, "out": out}
    if out is None:
        return TableModel(schema, model, fit_data(schema, model, data, **settings))
    with _schema_beside(schema, Path(out)):
        return TableModel(schema, model, fit_data(schema, model, data, **settings))


@contextmanager
def _schema_beside(schema: Schema, folder: Path) -> Iterator[None]:
    """Write ``schema.json`` before a run begins, so that a killed run has it, too.

    The schema of a run that is there already is never changed: its weights belong to it. Raise
    ValueError if that schema is another one.
    """
    file, model = folder / SCHEMA, folder / "model.json"
    if file.is_file() and model.is_file():
        _check_same(schema, _read_schema(folder), folder)
    fresh = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if fresh:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(file, schema.to_json())
    try:
        yield
    except BaseException:
        if fresh and not model.is_file():
            file.unlink(missing_ok=True)  # fit refused its settings or data
        raise
    if not file.is_file():
        replace_file(file, schema.to_json())


def _read_schema(folder: Path) -> Schema:
    try:
        record = read_json(folder / SCHEMA, LONGEST_BESIDE)
    except ValueError as error:
        raise ValueError(f"{folder / SCHEMA} is damaged: {str(error).rstrip('.')}.") from None
    return Schema.from_json(json.dumps(record))


def _check_same(schema: Schema, there: Schema, folder: Path) -> None:
    """Raise ValueError if a run in a folder was trained with another schema."""
    if schema.with_unknown_levels(there.unknown_levels) == there:
        return
    if schema.missing_words != there.missing_words:
        words = [", ".join(map(repr, one.missing_words)) for one in (there, schema)]
        raise ValueError(
            f"{folder} was trained with the words {words[0]} for missing cells, and now they are "
            f"{words[1]}. To resume, give the words of the run; otherwise choose another folder."
        )
    now, before = ({column.name: column for column in one.columns} for one in (schema, there))
    name = next(
        (name for name in {**before, **now} if before.get(name) != now.get(name)), schema.names[0]
    )
    parts = [
        "not there"
        if column is None
        else f"{column.kind} (location {column.location:g}, scale {column.scale:g})"
        for column in (before.get(name), now.get(name))
    ]
    raise ValueError(
        f"{folder} was trained with another schema: column {name!r} was {parts[0]} and is now "
        f"{parts[1]}. To resume, give the table and the schema of the run; otherwise choose "
        f"another folder."
    )


def _check_matches(schema: Schema, model: Model) -> None:
    """Raise ValueError if the model does not observe the schema's variables."""
    want = {
        name: len(columns[0].levels) if columns[0].kind in ("category", "ordered") else len(columns)
        for name, columns in schema.variables.items()
    }
    have = {name: model.graph.size(name) for name in model.graph.observed}
    if want != have:
        told = [
            ", ".join(f"{name} ({size})" for name, size in part.items()) for part in (have, want)
        ]
        raise ValueError(
            f"The model observes {told[0]}, but the schema has {told[1]}. Declare the model from "
            f"this schema: schema.mixture(3), schema.factors(2), schema.vae(4), …."
        )


@contextmanager
def _advising() -> Iterator[None]:
    """Add the fix for tables to the error that q was not trained on missing cells."""
    try:
        yield
    except UntaughtError as error:
        raise ValueError(
            f"{error.for_commands} schema.fit(model, frame, hide=0.2) does that; mixtures and "
            f"exact factors need nothing."
        ) from None


def _numpy(value: Tensor) -> np.ndarray:
    return value.detach().double().cpu().numpy()


# Moments of missing cells -------------------------------------------------------------------------

Moments = dict[str, tuple[np.ndarray, np.ndarray]]


def _parts(model: Model, data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield encoded rows, as many at a time as the memory of their posterior allows."""
    graph, n = model.graph, len(next(iter(data.values())))
    specs = {name: graph.rule("p", name).spec for name in graph.latents}
    values = max(spec.count(graph.size(name)) or DRAWS for name, spec in specs.items())
    entries = sum(graph.size(name) for name in graph.observed)
    rows = max(100, AT_ONCE // (values * entries))
    for start in range(0, n, rows):
        yield {name: value[start : start + rows] for name, value in data.items()}


def _moments(
    schema: Schema, model: Model, data: dict[str, Any], rounded: bool, seed: int
) -> Moments:
    exact = why_not_exact(model) is None
    parts: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    if exact:
        posterior = model.posterior(method="exact", seed=seed, **data)
        assert isinstance(posterior, ExactPosterior)
        for name, found in posterior.marginals.components.items():
            if name in schema.variables:
                parts[name] = tuple(  # type: ignore[assignment]
                    _numpy(part[:, 0]) for part in (found.weight, found.mean, found.variance)
                )
    else:
        with _advising():
            drawn = model.impute(samples=DRAWS, seed=seed, **data)
        for name, value in drawn.draws.items():
            mean = _numpy(value).swapaxes(0, 1)  # [rows, draws, entries]
            if schema.variables[name][0].listed:  # probabilities have less noise than draws
                mean = _numpy(drawn.mean[name])[:, None]
            weight = np.full(mean.shape[:2], 1 / mean.shape[1])
            parts[name] = weight, mean, np.zeros_like(mean)
    result: Moments = {}
    for name, columns in schema.variables.items():
        if name not in parts:
            continue
        weight, mean, variance = parts[name]
        for j, column in enumerate(columns):
            if column.kind in ("category", "ordered"):
                shares = (weight[..., None] * mean).sum(1)
                best = np.array(column.levels, dtype=object)[shares.argmax(1)]
                result[column.name] = best, 1 - shares.max(1)
                if column.kind == "ordered" and column.facts.type == "number" and not rounded:
                    levels = np.array(column.levels, dtype=float)
                    mean = shares @ levels
                    result[column.name] = mean, np.sqrt((shares @ levels**2 - mean**2).clip(0))
            else:
                result[column.name] = _number(
                    column, weight, mean[..., j], variance[..., j], rounded=rounded
                )
    return result


def _warn_of_extrapolation(schema: Schema, filled: Mapping[str, np.ndarray]) -> None:
    """Warn if filled numbers lie far beyond all known cells of their column."""
    told = []
    for column in schema.used:
        low, high = column.facts.low, column.facts.high
        if not column.dense or low is None or high is None or column.name not in filled:
            continue
        values = filled[column.name].astype(float)
        far = np.maximum(values - high, low - values)
        count = int((far > (high - low) / 2).sum())
        if count:
            told.append(f"{column.name!r} ({count}, up to {values[far.argmax()]:.4g})")
    if told:
        more = f" and {len(told) - 5} more columns" if len(told) > 5 else ""
        warnings.warn(
            DataWarning(
                f"Filled cells lie far beyond all known cells of {', '.join(told[:5])}{more}: the "
                f"model extrapolates. A model with fewer parameters does so less, and so does the "
                f'kind "real" instead of "positive".'
            ),
            stacklevel=3,
        )


def _number(
    column: Column,
    weight: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    *,
    rounded: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of a mixture of components, in the units of the table."""
    if column.dense:
        mean, variance = mean * column.scale + column.location, variance * column.scale**2
    if column.kind == "positive":
        first = np.exp(mean + variance / 2)
        mean, variance = first, np.expm1(variance) * first**2
    middle = (weight * mean).sum(1)
    spread = np.sqrt((weight * (variance + (mean - middle[:, None]) ** 2)).sum(1))
    if column.kind == "binary":
        which = (middle > 0.5).astype(int)
        return (
            np.array([column.levels[i] for i in which], dtype=object),
            np.minimum(middle, 1 - middle),
        )
    return (np.rint(middle) if column.kind == "count" and rounded else middle), spread
