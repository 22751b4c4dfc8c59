"""The public function :func:`fit`, which trains a model with one seed or with several."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Unpack, overload

import torch

from aevb.data.datasets import Recipe
from aevb.model import Model
from aevb.runtime.contention import sharing_cores
from aevb.runtime.suggestions import did_you_mean
from aevb.trackers.opening import Trackers
from aevb.trackers.packages import check_installed
from aevb.training.after_hook import After
from aevb.training.checkpoint import TrainingError
from aevb.training.checks import refuse_shared
from aevb.training.devices import device_for
from aevb.training.events import ODD_DATA, WARNINGS, Event
from aevb.training.loop import Training
from aevb.training.purity import added
from aevb.training.run import Run
from aevb.training.seed_folders import seed_folder
from aevb.training.settings import ALIASES, Settings
from aevb.training.settings_options import SettingsOptions
from aevb.training.several_seeds import list_of_seeds, train_together
from aevb.training.tracking import Tracking
from aevb.training.usual_schedule import chose, usual_schedule

__all__ = ["TrainingError", "fit"]


@overload
def fit(
    model: Model,
    data: Any,
    *,
    validation: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    device: str | torch.device | None = None,
    progress: bool | None = None,
    tensorboard: bool = False,
    trackers: Trackers = (),
    after: After | None = None,
    seeds: None = None,
    recipe: Recipe | None = None,
    **settings: Unpack[SettingsOptions],
) -> Run: ...
@overload
def fit(
    model: Model,
    data: Any,
    *,
    validation: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    device: str | torch.device | None = None,
    progress: bool | None = None,
    tensorboard: bool = False,
    trackers: Trackers = (),
    after: After | None = None,
    seeds: int | Sequence[int],
    recipe: Recipe | None = None,
    **settings: Unpack[SettingsOptions],
) -> list[Run]: ...
def fit(
    model: Model,
    data: Any,
    *,
    validation: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    device: str | torch.device | None = None,
    progress: bool | None = None,
    tensorboard: bool = False,
    trackers: Trackers = (),
    after: After | None = None,
    seeds: int | Sequence[int] | None = None,
    recipe: Recipe | None = None,
    **settings: Unpack[SettingsOptions],
) -> Run | list[Run]:
    """Train a model in place and return the run.

    Afterwards the model has the weights of the last step or, if ``patience`` is set, those of the
    best validation. :func:`load_run` reads either from the run's files.

    Arguments:
        model: The model to train.
        data: A dictionary from variable to array, file or (for sequences) frame; or one file, torch
            Dataset or frame of all variables (:func:`aevb.sequences`).
        validation: Validation data, in the same form. Required by ``patience``.
        out: Folder for the run's files. It must be empty or not exist yet; with ``resume=True`` it
            may hold the run to continue.
        resume: Continue the run in ``out`` from its last checkpoint. If there is no checkpoint yet,
            the run starts at step 0.
        device: The device to train on: "cpu", "cuda", "cuda:1", "mps", a torch.device, or "auto"
            (a GPU if there is one on which the model trains, otherwise the CPU). The model moves
            there and stays there; the rows follow it. By default the device that the model is on.
        progress: Display of the progress. By default a live panel on a terminal, one line that is
            updated in a notebook, and nothing elsewhere; True also prints plain lines elsewhere;
            False prints nothing. Where nothing is displayed, notes that say that results may be
            wrong are warnings; ``run.notes`` has all notes.
        tensorboard: Write scalars for TensorBoard into ``out/tensorboard``.
        trackers: Where else the numbers of the run go: "wandb", "mlflow", "trackio",
            "tensorboard", or objects of classes derived from :class:`aevb.trackers.Tracker`, or
            functions that return one. If a tracker fails, the run goes on and warns.
        after: A function ``after(step, model)``, called after every validation. It may return a
            dictionary of numbers, which are recorded in the history.
        seeds: A number of runs or a list of seeds. ``seeds=8`` trains eight fresh models of the
            same declaration and leaves ``model`` unchanged. Their files go into ``out/seed-N``.
            Each run equals ``fit(model.fresh(seed), …, seed=seed)``; with ``compile=True`` on a
            GPU, up to rounding. Several models share a GPU, which is much faster than training one
            by one.
        recipe: Where the rows came from and how they were prepared. It is saved as
            ``out/data.json``, so that the command line can prepare other rows in the same way.
        **settings: The fields of :class:`Settings`: epochs or steps, batch, lr, schedule, how,
            bound, …. Without ``schedule``, and without settings of the bound such as ``samples``,
            models with a usual schedule take that one: ``mle()`` or ``em()`` for the series models
            of the zoo whose evidence is exact. The run notes the choice.

    Returns:
        The :class:`Run`; with ``seeds``, a list of runs in the order of the seeds.

    Raises:
        TypeError: A keyword is not a setting.
        ValueError: A setting, the data or ``out`` does not fit the model or the schedule. No step
            is taken.
        CheckpointError: With ``resume=True``, the checkpoint is damaged or belongs to another
            model, other data or other settings.
        TrainingError: A loss, gradient or weight became non-finite, or a file could not be written.
        KeyboardInterrupt: The run was interrupted (Ctrl-C, SIGTERM). It saves a checkpoint first if
            ``out`` is set.

    >>> import torch
    >>> from aevb import Normal
    >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
    >>> run = fit(model, {"x": x[50:]}, validation={"x": x[:50]}, steps=20, progress=False)
    >>> run.step, bool(run.history["elbo"][-1] < 0)
    (20, True)
    """
    names = [one.name for one in fields(Settings)]
    unknown = sorted(set(settings) - set(names))
    if unknown:
        raise TypeError(
            f"fit has no setting {unknown[0]!r}."
            f"{did_you_mean(unknown[0], names, aliases=ALIASES)} Its settings are "
            f"{', '.join(names)}."
        )
    if out is not None and str(out) == "":
        raise ValueError(
            'out="" names no folder. Give the folder for the run\'s files, or leave out= out.'
        )
    notes: list[Event] = []
    if (schedule := usual_schedule(model, settings)) is not None:
        settings["schedule"] = schedule
        notes.append(chose(schedule))
    folder = Path(out) if out is not None else None
    tracking = Tracking(trackers, several=seeds is not None)
    if tensorboard or tracking.tensorboard:
        check_installed("tensorboard", "tensorboard")
    options: dict[str, Any] = {
        "tensorboard": tensorboard or tracking.tensorboard,
        "tracking": tracking,
        "after": after,
        "recipe": recipe,
    }
    if seeds is None:
        with ExitStack() as closing, sharing_cores():
            chosen = Settings(**settings)
            place, avoided = _place(model, device, chosen)
            notes += avoided
            training = Training(
                model if place is None else model.to(place),
                data,
                validation,
                chosen,
                folder,
                resume,
                closing,
                progress=progress,
                **options,
            )
            for note in notes:
                training.history.note_once(training.step, note)
            return training.run()
    if "seed" in settings:
        raise ValueError("Pass seed= for one run or seeds= for several runs, not both.")
    every = [replace(Settings(**settings), seed=seed) for seed in list_of_seeds(seeds)]
    _refuse_several(model, folder)
    place, avoided = _place(model, device, every[0])
    notes += avoided
    with ExitStack() as closing, sharing_cores():
        trainings: list[Training] = []
        for one in every:
            if trainings:  # the data are opened once; the display shows the first run
                data, validation = trainings[0].job.source, trainings[0].validation.source
                progress = False
            trainings.append(
                Training(
                    model.fresh(one.seed) if place is None else model.fresh(one.seed).to(place),
                    data,
                    validation,
                    one,
                    None if folder is None else seed_folder(folder, one.seed),
                    resume,
                    closing,
                    progress=progress,
                    # All runs have the same data, of which the first one warns.
                    warned=[one for one in WARNINGS if not trainings or one not in ODD_DATA],
                    **options,
                )
            )
        if len(trainings) > 1:
            trainings[0].history.tell(
                f"{len(trainings)} runs together; the display shows seed {every[0].seed}."
            )
        for training in trainings:
            for note in notes:
                training.history.note_once(training.step, note)
        return train_together(trainings)


def _place(
    model: Model, device: str | torch.device | None, settings: Settings
) -> tuple[torch.device | None, list[Event]]:
    """Return the device to move to, if one is asked for, and notes about the choice."""
    if device is None:
        return None, []
    place, avoided = device_for(model, device, settings)
    return place, [] if avoided is None else [avoided]


def _refuse_several(model: Model, folder: Path | None) -> None:
    """Refuse several runs in the folder of one run, or of a model with parts of its own.

    A fresh model is made from the declaration alone.
    """
    if folder is not None and (folder / "model.json").exists():
        raise ValueError(
            f"{folder} holds a model or a run of its own. Choose another folder for the runs of "
            f"several seeds."
        )
    refuse_shared(model)
    if (what := added(model)) is not None:
        raise ValueError(
            f"seeds= trains fresh models made from the declaration, which does not include this: "
            f"{what}. Train this model without seeds=."
        )
