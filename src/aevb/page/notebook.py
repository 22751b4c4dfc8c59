"""Pages in notebooks: the page of a run in memory, shown inline or saved as a file."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from aevb.estimate.keys import LENGTHS, STEPS
from aevb.model import Model
from aevb.page.contents import GREY_ROWS, known_values
from aevb.page.html import document, page, write_page
from aevb.page.sections import MOST_ROWS, Opened, run_section
from aevb.page.subject import Split, Subject
from aevb.tables.fitted import TableModel
from aevb.tables.frames import new_frame, read_table
from aevb.training.run import Run

HEIGHT = 860  # pixels of a page in a notebook
SMALLEST_IMAGE = 8  # pixels per side of a square that is taken for an image


@dataclass(frozen=True)
class Page:
    """A page of a run. A notebook shows it inline; :meth:`save` writes it as one file.

    ``content`` is the data of the page, and ``problems`` says what could not be computed.
    """

    content: dict[str, Any]

    @property
    def problems(self) -> list[str]:
        return [text for run in self.content["runs"] for text in run["problems"]]

    @property
    def html(self) -> str:
        """The page as one HTML document."""
        return page(self.content)

    def save(self, path: str | Path) -> Path:
        """Write the page as one .html file, and return its path."""
        out = Path(path)
        if out.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"{out} is no HTML file. Name one, e.g. page.save('page.html').")
        write_page(self.content, out)
        return out

    def __repr__(self) -> str:
        names = ", ".join(run["name"] for run in self.content["runs"])
        return f"Page of {names}; page.save('page.html') writes it"

    def _repr_html_(self) -> str:
        # The page runs apart from the notebook: it can read and change nothing of it.
        frame = Markup(
            '<iframe srcdoc="{}" sandbox="allow-scripts allow-downloads" title="{}" width="100%" '
            'height="{}" style="border: 0"></iframe>'
        )
        return str(frame.format(self.html, repr(self), HEIGHT))


def page_of_run(
    run: Run,
    data: Mapping[str, Any] | None,
    labels: Any,
    *,
    names: Sequence[str] | None,
    image: tuple[int, ...] | None,
    ink: bool,
    out: str | Path | None,
    rows: int | None,
) -> Page:
    """Make the page of a run on rows; see :meth:`aevb.training.run.Run.page`."""
    graph = run.model.graph
    if data is None:
        first = ", ".join(f'"{name}": {name.upper()}' for name in (*graph.observed, *graph.given))
        command = run.out is not None and (run.out / "data.json").is_file()
        also = f" `aevb page {run.out}` reads those of the training." if command else ""
        raise ValueError(f"A page shows rows: run.page({{{first}}}).{also}")
    subject = subject_of_run(run, data, labels)
    if names is not None:
        subject = replace(subject, label_names=_checked(names, subject))
    subject = replace(subject, image=image if image is not None else _image(subject), ink=ink)
    if image is not None and int(np.prod(image)) != graph.size(graph.observed[0]):
        raise ValueError(
            f"image={image} has {int(np.prod(image))} pixels, but {graph.observed[0]} has "
            f"{graph.size(graph.observed[0])} entries."
        )
    return _page(subject, run, out, rows)


def _checked(names: Sequence[str], subject: Subject) -> tuple[str, ...]:
    """The names of the classes of the labels."""
    labels = subject.splits[0].labels
    if subject.label_names or labels is None:
        raise ValueError(
            "names= gives the names of class numbers, but labels "
            + ("are not given." if labels is None else "are texts already.")
        )
    found = tuple(map(str, names))
    if int(labels.max(initial=-1)) >= len(found):
        raise ValueError(
            f"There are {len(found)} names, but labels has the class {int(labels.max())} (from 0)."
        )
    return found


def subject_of_run(run: Run, data: Mapping[str, Any], labels: Any) -> Subject:
    """Return a run with rows and their labels, both checked."""
    if not isinstance(data, Mapping):
        raise ValueError(
            f"data are arrays by variable, such as {{{run.model.graph.observed[0]!r}: X}}; got a "
            f"{type(data).__name__}."
        )
    names: tuple[str, ...] = ()
    if labels is None:
        labels = _known_classes(run.model, data)
    else:
        labels, names = _class_numbers(labels)
    subject = Subject(
        run.out.resolve().name if run.out is not None else "run",
        _on_cpu(run.model),
        [Split("", data, labels)],
        run.out,
        run,
        label_names=names,
    )
    n = subject.source(0).n
    if labels is not None and len(labels) != n:
        raise ValueError(f"There are {n} rows, but {len(labels)} labels.")
    return subject


def page_of_table(
    table: TableModel, frame: Any, *, out: str | Path | None, rows: int | None
) -> Page:
    """Make the page of a model of a table; see :meth:`aevb.TableModel.page`."""
    return _page(subject_of_table(table, frame), table.run, out, rows)


def subject_of_table(table: TableModel, frame: Any) -> Subject:
    """Return a model of a table with the rows of a frame."""
    import narwhals as nw

    read = read_table(frame)
    plain = read.library in ("dict", "array")
    native = new_frame("pyarrow", read.native) if plain else read.native
    whole = nw.from_native(native, eager_only=True)
    known = whole.select([name for name in whole.columns if name in table.schema]).to_native()
    folder = table.folder
    return Subject(
        folder.resolve().name if folder is not None else "table",
        _on_cpu(table.model),
        [Split("", table.schema.encode(known), None, None, whole.to_arrow())],
        folder,
        table.run,
        schema=table.schema,
    )


def _on_cpu(model: Model) -> Model:
    """The model, or a copy of one on a GPU: some numbers of a page are computed on the CPU."""
    return copy.deepcopy(model).cpu() if model._parameter().is_cuda else model


def _page(subject: Subject, run: Run | None, out: str | Path | None, rows: int | None) -> Page:
    with _progress() as tell:
        shown = run_section(
            opened_subject(subject, run), tell, rows=MOST_ROWS if rows is None else rows
        )
    found = Page(document([shown]))
    if out is not None:
        found.save(out)
    return found


@contextmanager
def _progress() -> Iterator[Callable[[str], None] | None]:
    """Show on a terminal which part of a page is being computed."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status("page") as status:
        yield lambda text: status.update(f"page: {text}")


def opened_subject(subject: Subject, run: Run | None) -> Opened:
    return Opened(
        subject.name,
        subject.folder,
        subject.model,
        run,
        [] if run is None else run.rows,
        subject=subject,
    )


def _known_classes(model: Model, data: Mapping[str, Any]) -> np.ndarray | None:
    """The known values of a latent class in the data, which serve as labels."""
    graph = model.graph
    for name in graph.latents:
        if graph.rule("p", name).spec.categorical and name in data and np.ndim(data[name]) == 1:
            return np.asarray(data[name])
    return None


def _class_numbers(labels: Any) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as class numbers, −1 where unknown, and the names of texts among them."""
    values = np.asarray(labels)
    if values.ndim != 1:
        raise ValueError(f"labels are class numbers or texts [N], got shape {values.shape}.")
    if values.dtype.kind in "OSU":
        known = np.array([one is not None and one == one for one in values.tolist()], dtype=bool)
        texts = np.array([str(one) for one in values[known].tolist()], dtype=str)
        names, codes = np.unique(texts, return_inverse=True)
        found = np.full(len(values), -1)
        found[known] = codes
        return found, tuple(names.tolist())
    numbers = np.nan_to_num(values.astype(float), nan=-1.0)
    wrong = np.flatnonzero((numbers != np.floor(numbers)) | ~np.isfinite(numbers))
    if len(wrong):
        raise ValueError(
            f"labels are class numbers or texts, but labels[{wrong[0]}] is "
            f"{values[wrong[0]]!r}. Round them, or pass a column of texts."
        )
    return numbers.astype(int), ()


def _image(subject: Subject) -> tuple[int, ...] | None:
    """The shape of rows that are images: as declared, as the data have it, or a square of pixels.

    A square is taken for an image if it is large and the numbers of some rows lie from 0 to 1.
    """
    graph, data = subject.model.graph, subject.splits[0].data
    name = graph.observed[0]
    if graph.timed[name] or LENGTHS in data or STEPS in data:
        return None
    shape = graph.shapes[name]
    if len(shape) < 2 and hasattr(data.get(name), "shape"):
        shape = tuple(data[name].shape[1:])
    if len(shape) > 1:
        shape = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
        return tuple(shape) if len(shape) == 2 or (len(shape) == 3 and shape[0] == 3) else None
    side = round(graph.size(name) ** 0.5)
    source = subject.source(0)
    values = known_values(subject, name, source.take(source.spread(GREY_ROWS)))
    inside = bool(((values >= 0) & (values <= 1) | np.isnan(values)).all())
    return (
        (side, side) if side >= SMALLEST_IMAGE and side**2 == graph.size(name) and inside else None
    )
