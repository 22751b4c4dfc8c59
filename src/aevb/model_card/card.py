"""The model card of a run.

Every number comes from the files of the run or is computed from its model and the rows that judge
it. What could not be read or computed is said instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aevb.model_card import parts
from aevb.model_card.markdown import front_matter
from aevb.page.notebook import opened_subject, subject_of_run, subject_of_table
from aevb.page.sections import Opened, section
from aevb.runtime.checked_files import replace
from aevb.tables.fitted import TableModel
from aevb.training.run import Run, recipe_of

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ModelCard:
    """The card of a run as Markdown. A notebook shows it, and :meth:`save` writes it.

    Attributes:
        name: The name of the run.
        text: The Markdown, with the front matter that hubs read.
        problems: What could not be computed, in sentences.

    >>> import os, tempfile
    >>> card = ModelCard("run", "---\\nlicense: mit\\n---\\n# A factor model\\n")
    >>> card
    ModelCard of run; card.save('README.md') writes it
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     card.save(os.path.join(folder, "README.md")).name
    'README.md'
    """

    name: str
    text: str
    problems: tuple[str, ...] = ()  # what could not be computed

    def save(self, path: str | Path) -> Path:
        """Write the card into the Markdown file ``path``, and return the path."""
        out = Path(path)
        if out.suffix.lower() != ".md":
            raise ValueError(f"{out} is no Markdown file. Name one, e.g. card.save('README.md').")
        replace(out, self.text)
        return out

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"ModelCard of {self.name}; card.save('README.md') writes it"

    def _repr_markdown_(self) -> str:
        return self.text.partition("\n---\n")[2]  # a notebook would show the front matter as text


def card_of(
    opened: Opened,
    *,
    command: str | None = None,
    about: str | None = None,
    license: str | None = None,
    repo: str | None = None,
    progress: Progress | None = None,
) -> ModelCard:
    """Make the card of an opened run; see :meth:`aevb.Run.card`.

    ``command`` is the command line that makes this card again. ``repo`` is the name on a hub.
    """
    if opened.model is None:
        raise ValueError(
            f"{opened.name} has no model that can be read, so there is no card: "
            f"{next(iter(opened.problems), 'model.json is missing')}"
        )
    checks: Mapping[str, Any] = section(opened, "checks", progress) or {}
    summary: Mapping[str, Any] = section(opened, "summary") or {}
    problems = tuple(
        parts.without_paths(text, opened)
        for text in dict.fromkeys([*opened.problems, *checks.get("problems", ())])
    )
    sections = {
        "": parts.introduction(opened, about),
        "Model": parts.model(opened),
        "Bound": parts.derivation(opened),
        "Data": parts.data(opened, summary),
        "Training": parts.training(opened, summary),
        "Results": parts.results(opened, checks),
        "Findings": parts.findings(checks),
        "Limits": parts.limits(opened, checks, problems),
        "Use": parts.use(opened, repo),
        "Reproduce": parts.reproduce(opened, command),
    }
    text = "\n\n".join(
        [
            front_matter(parts.tags(opened), license),
            *(f"## {title}\n\n{body}" if title else body for title, body in sections.items()),
        ]
    )
    return ModelCard(opened.name, text + "\n", problems)


def card_of_run(
    run: Run,
    data: Mapping[str, Any] | None,
    labels: Any,
    *,
    out: str | Path | None,
    about: str | None,
    license: str | None,
) -> ModelCard:
    """Make the card of a run in memory; see :meth:`aevb.Run.card`."""
    if data is not None:
        opened = opened_subject(subject_of_run(run, data, labels), run)
    else:
        name = run.out.resolve().name if run.out is not None else "run"
        first = run.model.graph.observed[0]
        opened = Opened(name, run.out, run.model, run, run.rows)
        opened.problems.append(f'the results, without rows: run.card({{"{first}": X}}).')
    return _saved(opened, out, about, license)


def card_of_table(
    table: TableModel,
    frame: Any,
    *,
    out: str | Path | None,
    about: str | None,
    license: str | None,
) -> ModelCard:
    """Make the card of a model of a table; see :meth:`aevb.TableModel.card`."""
    return _saved(opened_subject(subject_of_table(table, frame), table.run), out, about, license)


def _saved(
    opened: Opened, out: str | Path | None, about: str | None, license: str | None
) -> ModelCard:
    recipe = None
    if opened.folder is not None and opened.folder.is_dir():
        recipe = recipe_of(opened.folder)
    found = card_of(dataclasses.replace(opened, recipe=recipe), about=about, license=license)
    if out is not None:
        found.save(out)
    return found
