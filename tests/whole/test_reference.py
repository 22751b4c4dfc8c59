"""The reference of the site, which is written from the package: nothing public is left out."""

import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import typer

import aevb
from aevb.cli import app
from aevb.training.settings import Settings

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def from_source() -> ModuleType:
    spec = importlib.util.spec_from_file_location("s", DOCS / "extensions" / "from_source.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_described_on_one_page(from_source):
    described = re.findall(
        r"^\.\. auto(?:class|function):: aevb\.(\w+)$",
        "\n".join(
            from_source.filled(page.read_text(encoding="utf-8"))
            for page in sorted((DOCS / "reference").glob("*.md"))
        ),
        re.MULTILINE,
    )
    # The zoo has a page of its own.
    assert sorted(described) == sorted(set(aevb.__all__) - {"__version__", "zoo"})


def test_every_name_has_a_sentence(from_source):
    for name in set(aevb.__all__) - {"__version__"}:
        assert from_source.first_sentence(getattr(aevb, name)).endswith("."), name


def test_the_table_of_settings_has_every_field(from_source):
    table = from_source.settings("")
    for one in fields(Settings):
        assert f"\n| `{one.name}` " in table
        assert one.metadata["documentation"].replace("|", "\\|") in table


def test_every_command_is_there_with_its_options(from_source):
    text = from_source.commands("")
    group = typer.main.get_command(app)
    parts = dict(re.findall(r"^## aevb (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(parts) == [name for name, one in group.commands.items() if not one.hidden]
    for name, part in parts.items():
        for one in group.commands[name].params:
            if one.hidden:
                continue
            word = one.opts[0] if one.param_type_name == "option" else one.metavar or one.name
            assert f"`{word}`" in part.replace("\\|", "|"), f"{name} {word}"


def test_lists_of_pages_have_every_page_once(from_source):
    """A new how-to page appears by itself, with its title and its first sentence."""
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.glob("howto/*.md")]
    text = from_source.filled((DOCS / "howto.md").read_text(encoding="utf-8"))
    assert sorted(re.findall(r"\]\((howto/[^)]+)\):", text)) == sorted(pages)
    for page in DOCS.glob("howto/*.md"):
        title, sentence = from_source.opening(page.relative_to(DOCS).with_suffix("").as_posix())
        assert title, page
        assert sentence, page


def test_the_check_of_the_site_finds_broken_links(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("check", DOCS / "check.py")
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    (tmp_path / "a.html").write_text(
        '<p id="here"></p><a href="#here"></a><a href="b.html#there"></a><a href="c.html"></a>'
        '<a href="https://example.org"></a><script src="https://example.org/x.js"></script>'
    )
    (tmp_path / "b.html").write_text("<p></p>")
    with pytest.raises(SystemExit) as stop:
        check.main(tmp_path)
    assert stop.value.code == 1
    printed = capsys.readouterr().out
    for line in ("b.html#there, but", "c.html, which is no file", "loads https://example.org/x.js"):
        assert line in printed
    assert "2 pages, 3 broken" in printed
