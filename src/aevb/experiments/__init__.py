"""The tutorial's experiments, a file for each of its models: from settings to results on disk."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait

import torch

from aevb.experiments import cvae, fa, gmvae, vae, vrnn
from aevb.experiments.lab import Lab, Result

Task = Callable[[Lab], Result]
SECTIONS = ("fa", "vae", "cvae", "gmvae", "vrnn")
KILLED = (
    "Its process was killed, by hand or by the system for want of memory; with fewer --jobs each "
    "has more. The others are not affected."
)


def tasks(lab: Lab, section: str) -> dict[str, Task]:
    """What a section consists of, in the order of its telling."""
    known: dict[str, dict[str, Task]] = {
        "fa": fa.TASKS,
        "vae": vae.TASKS,
        "cvae": cvae.TASKS,
        "vrnn": vrnn.TASKS,
    }
    return known[section] if section in known else gmvae.tasks(lab)


def run(
    lab: Lab, sections: tuple[str, ...] = SECTIONS, *, jobs: int = 1
) -> Iterator[tuple[str, float | None, str | None]]:
    """Do what is not done yet, ``jobs`` tasks at a time in processes of their own; yield each
    task's name, seconds and, if it failed, why.

    A task that was finished before has no seconds. One that fails does not stop the others.
    """
    wanted = [name for section in sections for name in tasks(lab, section)]
    for name in wanted:
        if lab.done(name):
            yield name, None, None
    left = sorted((name for name in wanted if not lab.done(name)), key=_longest_first)
    if jobs == 1:
        for name in left:
            yield name, *_do(lab, name)
    else:
        yield from _in_processes(lab, left, jobs)
    for name, summary in gmvae.SUMMARIES.items():
        parts = [part for part in wanted if part.startswith(f"{name}/")]
        if parts and all(lab.done(part) for part in parts):
            lab.do(name, summary)


def _in_processes(
    lab: Lab, names: list[str], jobs: int
) -> Iterator[tuple[str, float | None, str | None]]:
    """Each of ``jobs`` processes does one task after another. One that is killed takes only its
    task with it, and another takes its place.
    """
    threads = max(1, (os.cpu_count() or 1) // jobs)

    def process() -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, mp_context=context, initializer=_prepare, initargs=(threads,))

    left = list(names)
    doing: dict[Future[tuple[float | None, str | None]], tuple[str, ProcessPoolExecutor]] = {}

    def begin(worker: ProcessPoolExecutor) -> None:
        name = left.pop(0)
        doing[worker.submit(_do, lab, name)] = name, worker

    try:
        for _ in range(min(jobs, len(left))):
            begin(process())
        while doing:
            for future in wait(doing, return_when=FIRST_COMPLETED).done:
                name, worker = doing.pop(future)
                error = future.exception()
                killed = isinstance(error, BrokenExecutor)
                if killed or not left:
                    worker.shutdown()
                if left:
                    begin(process() if killed else worker)
                yield (
                    name,
                    *(
                        future.result()
                        if error is None
                        else (None, KILLED if killed else f"{type(error).__name__}: {error}")
                    ),
                )
    finally:
        for _, worker in doing.values():
            worker.shutdown(wait=False)


def _longest_first(name: str) -> int:
    order = (
        "vrnn/ours",
        "fa/alternate",
        "gmvae/estimators",
        "gmvae/tutorial",
        "vrnn",
        "fa/tutorial",
        "cvae/both",
        "cvae/clamped",
        "vae/exact",
        "fa/evidence",
        "vae",
        "cvae",
        "gmvae",
        "fa",
    )
    return next((i for i, start in enumerate(order) if name.startswith(start)), len(order))


def _prepare(threads: int) -> None:
    """Processes share the cores; scikit-learn's libraries would take all of them each."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    torch.set_num_threads(threads)
    threadpool_limits(threads)


def _do(lab: Lab, name: str) -> tuple[float | None, str | None]:
    if lab.device.startswith("cuda"):
        # TF32: the tutorial's sizes are small, and so is the difference
        torch.set_float32_matmul_precision("high")
    try:
        return lab.do(name, tasks(lab, name.partition("/")[0])[name]), None
    except Exception:
        return None, traceback.format_exc()
