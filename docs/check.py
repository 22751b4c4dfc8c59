"""Check the built site: every link and anchor leads somewhere, and nothing comes from elsewhere.

python docs/check.py docs/_build/html
"""

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes with an address that a browser loads by itself; links are followed by a reader only.
LOADED = {
    ("script", "src"),
    ("img", "src"),
    ("link", "href"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
}


class Page(HTMLParser):
    """The anchors of a page, its links, and the addresses that a browser loads for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links, self.loaded = {"", "top"}, list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value)
            if tag == "a" and name == "href":
                self.links.append(value)
            if (tag, name) in LOADED:
                self.loaded.append(value)


def broken(root: Path) -> Iterator[str]:
    """Yield a sentence for every link without a target, and every address of another host."""
    pages = {
        path: Page(path.read_text(encoding="utf-8"))
        for path in sorted(root.rglob("*.html"))
        if "_static" not in path.relative_to(root).parts
    }
    for path, page in pages.items():
        name = path.relative_to(root)
        for address in (*page.links, *page.loaded):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if address in page.loaded and parts.scheme != "data":
                    yield f"{name} loads {address}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                yield f"{name} links to {address}, which is no file"
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{name} links to {address}, but there is no such anchor"
    for style in root.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        if "url(http" in text or 'url("http' in text or "@import url(" in text or "url(//" in text:
            yield f"{style.relative_to(root)} loads something from another host"


def main(root: Path) -> None:
    found = list(broken(root))
    for one in found:
        print(one)
    count = sum(1 for path in root.rglob("*.html"))
    print(f"{count} pages, {len(found)} broken links or addresses of other hosts")
    sys.exit(bool(found) or not count)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
