"""The result of a training run, in memory and on disk."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aevb.data.datasets import Recipe
from aevb.estimate.metric_names import Metric
from aevb.loading import read_model
from aevb.model import Model
from aevb.pictures import curves
from aevb.posterior.training_record import with_weights
from aevb.runtime.checked_files import IntegrityWarning
from aevb.training.best import Best, better
from aevb.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    check_beside,
    check_fit,
    folder_of,
    folders,
    latest_manifest,
    read,
    read_manifest,
)
from aevb.training.events import CONVERGED, STOPPED_EARLY, events
from aevb.training.run_folder import note_later, read_rows
from aevb.training.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from aevb.model_card import ModelCard
    from aevb.page.notebook import Page


@dataclass
class Run:
    """The result of :func:`fit`: the trained model, its settings, its history and its folder.

    The model has the weights of the last step or, if ``patience`` was set, of the best validation.
    Both are on disk; see :func:`load_run`.

    Attributes:
        model: The trained model.
        settings: The :class:`Settings` of the run.
        rows: The records of the history, one dictionary per recorded step; ``history`` has them as
            arrays.
        out: The folder of the run's files; None if it was not saved.
        step: The number of steps that were taken.
        seconds: The duration of the training.
        total: The number of steps that the settings ask for; None for a run that was read from its
            folder.

    >>> from aevb import Normal, fit
    >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
    >>> x = np.random.default_rng(0).normal(size=(50, 2))
    >>> run = fit(model, {"x": x}, validation={"x": x}, steps=20, progress=False)
    >>> run.step, run.best.step, len(run.history["elbo"]) > 0
    (20, 20, True)
    """

    model: Model
    settings: Settings
    rows: list[dict[str, Any]]
    out: Path | None
    step: int
    seconds: float
    total: int | None = None

    def __repr__(self) -> str:
        """Return a summary in a few lines; ``notes`` and ``history`` have the details.

        >>> from aevb import Normal, fit
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> fit(model, {"x": np.random.default_rng(0).normal(size=(50, 2))}, steps=20)
        Run of 20 steps, seed 0, all steps taken
          model   p(z) p(x|z), q(z|x)
          folder  not saved
        """
        parts = [f"Run of {self.step:,} steps", f"seed {self.settings.seed}", self.ended]
        graph = self.model.graph
        sides = (
            " ".join(entry.id for entry in graph.entries() if entry.side == side) for side in "pq"
        )
        lines = {"model": ", ".join(filter(None, sides))}
        if self.best is not None:
            lines["best"] = (
                f"validation {self.settings.judge} {self.best.value:.4f} at step {self.best.step:,}"
            )
        lines["folder"] = "not saved" if self.out is None else str(self.out)
        # The first line says how the run ended.
        notes = [one for one in events(self.rows) if one.kind not in (CONVERGED, STOPPED_EARLY)]
        return "\n".join(
            [
                ", ".join(filter(None, parts)),
                *(f"  {a:<7} {b}" for a, b in lines.items()),
                *(_wrapped("  note    ", str(one)) for one in notes),
            ]
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the run: what it chose, odd data, and signs that results may be wrong.

        >>> from aevb import Normal, fit
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> fit(model, {"x": np.random.default_rng(0).normal(size=(50, 2))}, steps=20).notes
        ()
        """
        return tuple(map(str, events(self.rows)))

    @property
    def ended(self) -> str:
        """How the run ended: "all steps taken", "converged", or "stopped early (patience 5)".

        It is empty for a run that was read from a folder and did neither converge nor stop early.
        """
        kinds = {event.kind for event in events(self.rows)}
        if STOPPED_EARLY in kinds:
            return f"stopped early (patience {self.settings.patience})"
        if CONVERGED in kinds:
            return "converged"
        return "all steps taken" if self.step == self.total else ""

    def _repr_html_(self) -> str:
        from aevb.notebook import cards

        judge = self.settings.judge
        return cards.run_card(self, Metric(judge), Metric(judge, validation=True))

    @classmethod
    def load(
        cls,
        out: str | Path,
        *,
        custom: Iterable[type] = (),
        modules: Mapping[str, Any] | None = None,
    ) -> Run:
        """Read a run from its folder: the model at the last checkpoint, and the history up to it.

        Arguments:
            out: The folder.
            custom: Your own classes of conditionals and networks, as for :func:`aevb.load`.
            modules: Your own torch modules and functions, as for :func:`aevb.load`.

        Returns:
            The run.

        >>> import tempfile
        >>> from aevb import Normal, fit
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> x = np.random.default_rng(0).normal(size=(50, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = fit(model, {"x": x}, steps=20, out=f"{folder}/run", progress=False)
        ...     again = Run.load(f"{folder}/run")
        >>> again.step, again.settings == run.settings
        (20, True)
        """
        folder = Path(out)
        model, found, rows = _load(folder, "last", custom, modules)
        seconds = max((row.get("seconds", 0.0) for row in rows), default=0.0)
        return cls(model, _settings(found.state["settings"]), rows, folder, found.step, seconds)

    @property
    def best(self) -> Best | None:
        """The step and value of the best validation; None without validation.

        If several are equal, it is the first.
        """
        key = Metric(self.settings.judge, validation=True).key
        best: Best | None = None
        for row in self.rows:
            best = better(best, row["step"], row.get(key, np.nan))
        return best

    @property
    def history(self) -> dict[str, np.ndarray]:
        """Every recorded quantity as an array.

        The array ``<name>.step`` has the steps of its values.

        ``gap`` is KL(q ‖ exact posterior), if the posterior is known: the recorded value, or else
        the evidence minus the ELBO.
        """
        found: dict[str, list[tuple[int, Any]]] = {}
        for row in self.rows:
            gaps = {}
            for validation in (False, True):
                gap, evidence, elbo = (
                    Metric(name, validation).key for name in ("gap", "evidence", "elbo")
                )
                if evidence in row and elbo in row:
                    gaps[gap] = row[evidence] - row[elbo]
            for name, value in (gaps | row).items():
                if name != "step" and isinstance(value, int | float):
                    found.setdefault(name, []).append((row["step"], value))
        arrays = {
            name: np.array([value for _, value in pairs], dtype=float)
            for name, pairs in found.items()
        }
        return arrays | {
            Metric.of(name).steps: np.array([step for step, _ in pairs])
            for name, pairs in found.items()
        }

    @property
    def phases(self) -> list[tuple[str, int, int]]:
        """The phases trained so far, in order, as (name, first step, step after the last).

        Names are "E", "M", "joint" and "mle".
        """
        found: list[tuple[str, int, int]] = []
        start = 0
        while start < self.step:
            phase = self.settings.schedule.phase(start, self.step)
            end = min(self.step, start + max(1, phase.length - phase.position))
            found.append((phase.name, start, end))
            start = end
        return found

    def plot(self, path: str | Path | None = None) -> Figure:
        """Plot the bound, its terms and the evidence (if known) over the steps.

        Arguments:
            path: A PNG file to write; None writes nothing.

        Returns:
            The figure.

        >>> from aevb import Normal, fit
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> x = np.random.default_rng(0).normal(size=(50, 2))
        >>> len(fit(model, {"x": x}, steps=20, progress=False).plot().axes) > 0
        True
        """
        figure = curves(
            self.history, [(start, end) for name, start, end in self.phases if name == "E"]
        )
        if path is not None:
            figure.savefig(path, dpi=130)
        return figure

    def page(
        self,
        data: Mapping[str, Any] | None = None,
        labels: Any = None,
        *,
        names: Sequence[str] | None = None,
        image: tuple[int, ...] | None = None,
        ink: bool = True,
        out: str | Path | None = None,
        rows: int | None = None,
    ) -> Page:
        """Make a page to look at this run: findings, curves, latent map, clusters and checks.

        This takes up to a few minutes for a large model; a terminal shows what is computed.

        Arguments:
            data: The rows to show, as for :func:`fit`; rows that the model was not trained on judge
                it better.
            labels: Class numbers [N], −1 where unknown, or texts.
            names: The names of the classes 0, 1, …, if ``labels`` are numbers.
            image: The shape of an image, such as (28, 28), if the rows are images.
            ink: Whether grey levels are drawn as dark ink on paper; False draws them light on
                black, as photographs are.
            out: Write the page as one HTML file.
            rows: The largest number of rows on the map.

        Returns:
            The page. A notebook shows it inline, and ``page.save(path)`` writes it.

        >>> from aevb import Normal, fit
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> x = np.random.default_rng(0).normal(size=(50, 2))
        >>> fit(model, {"x": x}, steps=20).page({"x": x})
        Page of run; page.save('page.html') writes it
        """
        from aevb.page.notebook import page_of_run

        return page_of_run(
            self, data, labels, names=names, image=image, ink=ink, out=out, rows=rows
        )

    def card(
        self,
        data: Mapping[str, Any] | None = None,
        labels: Any = None,
        *,
        out: str | Path | None = None,
        about: str | None = None,
        license: str | None = None,
    ) -> ModelCard:
        """Make a model card: what this run is, how good it is, and where its limits are.

        The card is Markdown with the front matter that model hubs read. It holds no cell of the
        data.

        Arguments:
            data: Rows as for :func:`fit`, by which the model is judged. Without them the card says
                that the results were not computed.
            labels: Class numbers [N], −1 where unknown, or texts.
            out: A file to write, such as README.md.
            about: What the model is for, in a sentence.
            license: An identifier such as "mit".

        Returns:
            The card. ``card.save(path)`` writes it.

        >>> from aevb import Normal, fit
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> x = np.random.default_rng(0).normal(size=(50, 2))
        >>> fit(model, {"x": x}, steps=20).card()
        ModelCard of run; card.save('README.md') writes it
        """
        from aevb.model_card import card_of_run

        return card_of_run(self, data, labels, out=out, about=about, license=license)


def load_run(
    out: str | Path,
    which: str = "best",
    *,
    custom: Iterable[type] = (),
    modules: Mapping[str, Any] | None = None,
) -> Model:
    """Read the model of a run from its folder.

    Arguments:
        out: The folder.
        which: "best" loads the weights of the best validation, or of the last checkpoint if there
            was no validation. "last" loads the last checkpoint, from which ``resume=True``
            continues; these are also the weights that ``fit`` leaves in the model, unless
            ``patience`` was set.
        custom: Your own classes of conditionals and networks, as for :func:`aevb.load`.
        modules: Your own torch modules and functions, as for :func:`aevb.load`.

    Returns:
        The model, in evaluation mode (no dropout). ``fit`` trains it further as usual.

    Raises:
        ValueError: The folder holds no run.
        CheckpointError: The files of the run are missing or damaged.

    >>> import tempfile
    >>> from aevb import Normal, fit
    >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
    >>> x = np.random.default_rng(0).normal(size=(50, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = fit(model, {"x": x}, steps=20, out=f"{folder}/run", progress=False)
    ...     again = load_run(f"{folder}/run", which="last")
    >>> str(again) == str(model)
    True
    """
    if which not in ("best", "last"):
        raise ValueError(f'which is "best" or "last", got {which!r}.')
    return _load(Path(out), which, custom, modules)[0]


def recipe_of(out: Path) -> Recipe | None:
    """Read how a run prepared its rows; None if the command line did not train the run."""
    if (manifest := latest_manifest(out)) is not None:
        check_beside(out, "data.json", manifest)
    return Recipe.read(out)


def _load(
    folder: Path,
    which: str,
    custom: Iterable[type] = (),
    modules: Mapping[str, Any] | None = None,
) -> tuple[Model, Checkpoint, list[dict[str, Any]]]:
    """Return the model, its checkpoint, and the history up to it.

    An :class:`IntegrityWarning` reports a history that does not match the checkpoints.
    """
    path = folder / "model.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no run: model.json is missing.")
    places = folders(folder)
    if not places and (folder / "weights.safetensors").is_file():
        raise ValueError(
            f"{folder} holds a saved model, not a run. Read it by aevb.load({str(folder)!r})."
        )
    if not places:
        raise ValueError(f"{folder} holds no checkpoint yet. Train it further with resume=True.")
    chosen, manifest = places[-1], read_manifest(places[-1])
    best = manifest["state"]["best"]
    if which == "best" and best is not None and best["step"] != manifest["step"]:
        chosen = folder_of(folder, best["step"])
        if not chosen.is_dir():
            raise CheckpointError(
                f'{chosen}, the best checkpoint, is missing. Load the last one: which="last".'
            )
    check_beside(folder, "model.json", manifest)
    found = read(chosen)
    model = read_model(path, chosen / "weights.safetensors", custom, modules)
    floating = [tensor.dtype for tensor in found.weights.values() if tensor.is_floating_point()]
    model = model.to(floating[0]) if floating else model
    check_fit(found, model.state_dict(), folder)
    model.load_state_dict(found.weights)
    model.teaching.restore(
        model,
        found.state["teaching"]
        if "teaching" in found.state
        else _older(model, found.state["settings"]),
    )
    rows, wrong = read_rows(folder, found.state, found.step)
    if found.step != manifest["step"]:
        wrong = wrong or read_rows(folder, manifest["state"], manifest["step"])[1]
    for sentence in filter(None, (wrong, note_later(folder, manifest["step"]))):
        warnings.warn(sentence, IntegrityWarning, stacklevel=3)
    return model.eval(), found, rows


def _older(model: Model, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the training record of q for a checkpoint without one: mle() and em() train p only."""
    schedule = settings.get("schedule")
    name = schedule.get("name") if isinstance(schedule, dict) else None
    return (
        {"untaught": dict.fromkeys(with_weights(model), f"{name}() trains p")}
        if name in ("mle", "em")
        else {}
    )


def _settings(record: dict[str, Any]) -> Settings:
    """Return the settings of a checkpoint's record."""
    try:
        return Settings.from_record(record)
    except ValueError as error:
        raise CheckpointError(
            f"The checkpoint's settings are damaged ({error}). Resume from an earlier checkpoint."
        ) from None


def _wrapped(head: str, text: str) -> str:
    """Return a text in lines that begin below one another, after a head."""
    return textwrap.fill(
        text,
        100,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
