"""Write the reference from the package itself: public names, settings of fit, commands, models.

A page has a mark such as ``<!-- from source: settings -->``, and the text of :data:`WRITERS` takes
its place when the site is built. The reference therefore cannot differ from the package.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aevb

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

MARK = re.compile(r"<!-- from source: (?P<writer>\w+)(?P<words>[^>]*) -->")
INCLUDE = re.compile(r"```\{include\} (?P<path>\S+)")  # a page that shows a file from elsewhere
DOCS = Path(__file__).resolve().parents[1]
REFERENCE = DOCS / "reference"
OTHERS = "others"


# Public names -------------------------------------------------------------------------------------


def names(words: str) -> str:
    """Describe the public names that come from modules, e.g. ``declare.networks training.fit``.

    ``members`` among the words describes the methods and attributes of classes too. ``others``
    stands for all modules that no page of the reference names.
    """
    asked = words.split()
    wanted = [one for one in asked if one != "members"]
    if wanted == [OTHERS]:
        wanted = sorted(set(aevb._FROM) - claimed())
    found = [name for module in wanted for name in sorted(aevb._FROM[module])]
    return described("aevb", found, members="members" in asked)


def module(words: str) -> str:
    """Describe what a public module exports, e.g. ``aevb.data``; ``members`` as in ``names``."""
    name, *more = words.split()
    return described(name, sorted(import_module(name).__all__), members="members" in more)


def modules(words: str) -> str:
    """Describe what each of some public modules exports, under a heading each.

    A module that exports nothing is left out.
    """
    texts = []
    for name in words.split():
        found = import_module(name)
        if text := described(name, list(getattr(found, "__all__", ()))):
            texts.append(f"## {name}\n\n{first_sentence(found)}\n\n{text}")
    return "\n".join(texts)


def claimed() -> set[str]:
    """Return the modules whose names the pages of the reference describe."""
    found = set()
    for page in REFERENCE.glob("*.md"):
        for mark in MARK.finditer(page.read_text(encoding="utf-8")):
            if mark["writer"] == "names":
                found |= {*mark["words"].split()} - {OTHERS, "members"}
    return found


def described(home: str, found: list[str], *, members: bool = True) -> str:
    """Return a table of names with the first sentence of each, then their full descriptions."""
    objects = {name: getattr(import_module(home), name) for name in found}
    objects = {name: one for name, one in objects.items() if callable(one)}
    if not objects:
        return ""
    rows = [
        f"| {{py:obj}}`{name} <{home}.{name}>` | {_cell(first_sentence(one))} |"
        for name, one in objects.items()
    ]
    blocks = []
    for name, one in objects.items():
        kind, options = (
            ("class", _class_options(members)) if inspect.isclass(one) else ("function", "")
        )
        blocks.append(f"```{{eval-rst}}\n.. auto{kind}:: {home}.{name}\n{options}```\n")
    return "\n".join(["| name | |", "| --- | --- |", *rows, "", *blocks])


def _class_options(members: bool) -> str:
    return "   :members:\n   :inherited-members:\n" if members else ""


def first_sentence(one: Any) -> str:
    """Return the first sentence of a docstring, without the roles of reStructuredText."""
    text = " ".join((inspect.getdoc(one) or "").partition("\n\n")[0].split())
    text = re.sub(r":\w+:`~?\.?([^`]*)`", r"`\1`", text).replace("``", "`")
    return re.split(r"(?<=[.]) (?=[A-Z`])", text)[0]


# Settings, commands, models -----------------------------------------------------------------------


def settings(words: str) -> str:
    """Return the table of the settings of fit, from their one definition."""
    from aevb.cli.options import FILE_ONLY
    from aevb.training.settings import Settings, default_of, documentation

    rows = [
        f"| `{one.name}`{' (no option)' if one.name in FILE_ONLY else ''} "
        f"| `{_cell(repr(default_of(one)))}` "
        f"| {_cell(documentation(one))} *{_cell(str(one.type))}* |"
        for one in fields(Settings)
    ]
    return "\n".join(["| setting | default | |", "| --- | --- | --- |", *rows, ""])


def commands(words: str) -> str:
    """Return every command with its arguments and options, from the command line's own parser."""
    import typer

    from aevb.cli import app

    group: Any = typer.main.get_command(app)
    return "\n".join(
        text
        for name, one in group.commands.items()
        if not one.hidden
        for text in _command(name, one)
    )


def _command(name: str, command: Any) -> Iterator[str]:
    yield f"## aevb {name}\n"
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(command.help or ""))
    for kind, text in _merged(paragraphs):
        yield f"```sh\n{text}\n```\n" if kind == "sh" else f"{text}\n"
    shown = [one for one in command.params if not getattr(one, "hidden", False)]
    panels: dict[str, list[Any]] = {}
    for one in shown:
        argument = one.param_type_name == "argument"
        panels.setdefault("Arguments" if argument else one.rich_help_panel or "Options", []).append(
            one
        )
    for panel, group in panels.items():
        yield f"| {panel} | | |\n| --- | --- | --- |"
        for one in group:
            yield f"| {_cell(_spelled(one))} | {_value(one)} | {_cell(_help(one))} |"
        yield ""


def _merged(paragraphs: list[str]) -> Iterator[tuple[str, str]]:
    """Return paragraphs in order; those that are commands are joined into one block of code."""
    code: list[str] = []
    for one in paragraphs:
        if one.startswith("aevb "):
            code.append(" ".join(one.split()))
            continue
        if code:
            yield "sh", "\n".join(code)
            code = []
        inline, example, command = one.partition("Example: aevb ")
        if inline.strip():
            yield "text", _escaped(inline.strip())
        if example:
            code.append(f"aevb {' '.join(command.split())}")
    if code:
        yield "sh", "\n".join(code)


def _spelled(one: Any) -> str:
    if one.param_type_name == "argument":
        return f"`{one.metavar or one.name}`"
    return ", ".join(f"`{word}`" for word in [*one.opts, *one.secondary_opts])


def _value(one: Any) -> str:
    """Return what an option takes: its own word, or that of its type; nothing for a flag."""
    if getattr(one, "is_flag", False):
        return ""
    if one.metavar:
        return "" if one.param_type_name == "argument" else f"`{_cell(one.metavar)}`"
    annotation = one.type_descriptor.annotation
    name = getattr(annotation, "__name__", str(annotation))
    return {"str": "text", "int": "whole number", "float": "number", "Path": "path"}.get(name, name)


def _help(one: Any) -> str:
    text = _escaped(" ".join((one.help or "").split()))
    shown = one.show_default
    default = shown if isinstance(shown, str) else one.default if shown else None
    if one.required:
        return f"{text} Required."
    if default in (None, False, "", [], ()) or callable(default):
        return text
    return f"{text} Default: `{default}`."


def models(words: str) -> str:
    """Return the models of the zoo with their arguments."""
    from aevb.zoo import zoo

    rows = [
        f"| {{py:obj}}`{name} <aevb.zoo.{name}>` | {_cell(first_sentence(build))} |"
        for name, build in zoo.items()
    ]
    return "\n".join(["| name | |", "| --- | --- |", *rows, ""])


def pages(words: str) -> str:
    """List pages of the site with their titles and first sentences, and put them into the toctree.

    ``howto/*`` stands for all pages of a folder that no other mark names.
    """
    found = [
        path.relative_to(DOCS).with_suffix("").as_posix()
        for word in words.split()
        for path in sorted(DOCS.glob(f"{word}.md"))
    ]
    if "*" in words:
        found = [one for one in found if one not in named()]
    if not found:
        return ""
    titled = [
        f"- [{title}]({one}.md): {sentence}" for one in found for title, sentence in [opening(one)]
    ]
    return "\n".join([*titled, "", "```{toctree}", ":hidden:", "", *found, "```", ""])


def opening(page: str) -> tuple[str, str]:
    """Return the title of a page and the first sentence below it."""
    path = DOCS / f"{page}.md"
    text = path.read_text(encoding="utf-8")
    if shown := INCLUDE.match(text):
        text = (path.parent / shown["path"]).read_text(encoding="utf-8")
    text = re.sub(r"\A---\n.*?^---\n", "", text, flags=re.DOTALL | re.MULTILINE)
    found = re.search(r"^# (?P<title>.+)\n\s*\n(?P<text>(?:.+\n)+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"docs/{page}.md must start with a title and a sentence about the page.")
    return found["title"], re.split(r"(?<=[.]) ", " ".join(found["text"].split()))[0]


def named() -> set[str]:
    """Return the pages that marks of other pages name one by one."""
    return {
        word
        for page in DOCS.glob("*.md")
        for mark in MARK.finditer(page.read_text(encoding="utf-8"))
        if mark["writer"] == "pages"
        for word in mark["words"].split()
    }


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Return text of a terminal as Markdown: no emphasis, no HTML, options as code."""
    parts = re.split(r"(`[^`]*`|(?<![\w-])--[a-z][\w-]*)", text)
    return "".join(
        part
        if part.startswith("`")
        else f"`{part}`"
        if part.startswith("--")
        else re.sub(r"([*_<>\[\]])", r"\\\1", part)
        for part in parts
    )


WRITERS: dict[str, Callable[[str], str]] = {
    "names": names,
    "module": module,
    "modules": modules,
    "settings": settings,
    "commands": commands,
    "models": models,
    "pages": pages,
}


def filled(text: str) -> str:
    """Return a page with the text of its marks."""
    return MARK.sub(lambda mark: WRITERS[mark["writer"]](mark["words"]), text)


# Sphinx -------------------------------------------------------------------------------------------


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = filled(source[0])


def escape(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with ``literals`` and examples: escape what markup would read."""
    example = False
    for i, line in enumerate(lines):
        example = bool(line.strip()) and (example or line.lstrip().startswith(">>>"))
        if example or re.match(r"\s*\*{1,2}\w+( \(.*\))?:", line):  # an argument **settings:
            continue
        lines[i] = "".join(
            part if part.startswith(("`", ":")) else re.sub(r"([*|]|(?<=\w)_(?!\w))", r"\\\1", part)
            for part in re.split(r"(``.*?``|:[\w:]+:`[^`]*`|`[^`]*`_*)", line)
        )


def foreign(
    app: Sphinx, what: str, name: str, member: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out what a class inherits from another library, such as torch's ``Module``."""
    found = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", member))
    home = getattr(found, "__module__", None)
    return None if isinstance(home, str) and home.startswith("aevb") else True


def public(
    app: Sphinx, env: BuildEnvironment, node: nodes.Element, content: nodes.TextElement
) -> nodes.Element | None:
    """Resolve a name by its last parts: ``Schema.fit``, or the module that a class comes from."""
    if node.get("refdomain") != "py":
        return None
    domain = env.get_domain("py")
    target = node["reftarget"]
    tails = {target, ".".join(target.split(".")[-1:])} if target.startswith("aevb.") else {target}
    names = [
        name
        for name, *_ in domain.get_objects()  # type: ignore[attr-defined]
        if any(name.endswith(f".{tail}") for tail in tails)
    ]
    if not names:
        return None
    node["reftarget"] = min(names, key=lambda name: (name.count("."), len(name)))
    return domain.resolve_xref(
        env, node["refdoc"], app.builder, "obj", node["reftarget"], node, content
    )


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", fill)
    app.connect("missing-reference", public)
    app.connect("autodoc-skip-member", foreign)
    app.connect("autodoc-process-docstring", escape, priority=400)  # before sections are read
    return {"parallel_read_safe": True, "parallel_write_safe": True}
