"""The site of `make docs`: what its link checker finds, and that every package has a page."""

from __future__ import annotations

import importlib
import re

import pytest

from lab.house.links import Site
from lab.house.source import PACKAGES, ROOT

PAGE = '<a name="top"></a><h1 id="title">T</h1><a href="{link}">x</a>'


@pytest.fixture
def site(tmp_path):
    def made(link: str) -> Site:
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder/index.html").write_text(PAGE.format(link="../index.html#top"))
        (tmp_path / "index.html").write_text(PAGE.format(link=link))
        return Site(tmp_path)

    return made


LEADING = [
    *("#title", "#top", "folder/", "folder/index.html#title", "/folder/#title", "index.html?x#"),
    *("https://example.org/#x", "mailto:a@b"),
]


@pytest.mark.parametrize("link", LEADING)
def test_a_link_that_leads_somewhere(link, site):
    assert not [*site(link).broken()]


@pytest.mark.parametrize("link", ["#lost", "folder/#lost", "lost.html", "../index.html", "/lost"])
def test_a_link_that_leads_nowhere_is_found(link, site):
    assert [*site(link).broken()] == [f"index.html: {link}"]


def test_what_is_loaded_from_another_host_is_found(site, tmp_path):
    built = site("#top")
    (tmp_path / "x.html").write_text('<script src="https://example.org/x.js"></script>')
    assert [*built.broken()] == ["x.html: https://example.org/x.js"]


API = {page.stem: page.read_text(encoding="utf-8") for page in ROOT.glob("docs/api/*.md")}
MEMBERS = re.compile(r"^::: (\S+)(?:\n    options: \{members: \[(.*?)\])?", re.MULTILINE)


def test_every_package_that_users_import_has_an_api_page():
    assert set(API) == set(PACKAGES) - {"blackwell_engines"}


@pytest.mark.parametrize("page", API)
def test_names_of_an_api_page_exist_and_are_documented(page):
    """A name without a docstring would be left out of the page in silence."""
    listed = MEMBERS.findall(API[page])
    assert listed
    for module_name, names in listed:
        module = importlib.import_module(module_name)
        for name in names.split(", ") if names else module.__all__:
            member = getattr(module, name)
            assert member.__doc__ or not callable(member), f"{module_name}.{name}"
