"""The tutorial's experiments, one file per model: from settings to results on disk."""

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
    "Its process was killed, by a user or because memory ran out. The other tasks are not "
    "affected. Run it again with a smaller --jobs, so that each process has more memory."
)


def tasks(lab: Lab, section: str) -> dict[str, Task]:
    """Return the tasks of a section, in the order of the report."""
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
    """Run the tasks that have no result yet, ``jobs`` at a time, each in its own process.

    Yield the name of each task, its seconds (None if it was finished before) and, if it failed,
    the reason. A task that fails does not stop the others.
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
    """Run the tasks in ``jobs`` processes, each of which takes one task after another.

    If a process is killed, only its task fails, and a new process replaces it.
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
    """Limit the threads of a process, because the processes share the cores.

    Without a limit, scikit-learn's libraries would use all cores in each process.
    """
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    torch.set_num_threads(threads)
    threadpool_limits(threads)


def _do(lab: Lab, name: str) -> tuple[float | None, str | None]:
    if lab.device.startswith("cuda"):
        # This is TF32. The tutorial's networks are small, and so is the difference.
        torch.set_float32_matmul_precision("high")
    try:
        return lab.do(name, tasks(lab, name.partition("/")[0])[name]), None
    except Exception:
        return None, traceback.format_exc()
