"""Links of a built site: every link of a page leads to a file of the site, and to an id in it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

KINDS = {"a": "href", "link": "href", "img": "src", "script": "src"}
LOADED = {"link", "img", "script"}  # without a click


class HtmlPage(HTMLParser):
    """The links and ids of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.links, self.ids = path, list[tuple[str, str]](), {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what matters of an element."""
        found = dict(attrs)
        self.ids |= {found[name] or "" for name in ("id", "name") if name in found}
        target = found.get(KINDS.get(tag, ""))
        if target:
            self.links.append((tag, target))


class Site:
    """The pages of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    @cached_property
    def pages(self) -> dict[Path, HtmlPage]:
        return {path: HtmlPage(path) for path in sorted(self.folder.rglob("*.html"))}

    @property
    def links(self) -> int:
        """Number of links of all pages."""
        return sum(len(page.links) for page in self.pages.values())

    def broken(self) -> Iterator[str]:
        """Yield a line for each link that leads nowhere, or that loads from another host."""
        for path, page in self.pages.items():
            for tag, link in page.links:
                url = urlsplit(link)
                if url.netloc:
                    wrong = tag in LOADED
                else:
                    wrong = not url.scheme and not self._leads(path, url.path, url.fragment)
                if wrong:
                    yield f"{path.relative_to(self.folder)}: {link}"

    def _leads(self, path: Path, target: str, fragment: str) -> bool:
        start = self.folder if target.startswith("/") else path.parent
        found = (start / unquote(target).lstrip("/")).resolve() if target else path
        found = found / "index.html" if found.is_dir() else found
        if found in self.pages:
            return unquote(fragment) in self.pages[found].ids
        return found.is_file()
