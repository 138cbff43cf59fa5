"""Released data agree everywhere: versions, packages that are installed and typed."""

from __future__ import annotations

import importlib
import importlib.metadata
import re

import pytest

from lab.house.source import APART, LINK, OLD_NAMES, PACKAGES, ROOT
from lab.tools.common import EXTRA_OF

PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
NOT_INSTALLED = {"examples", "lab", "tests"}


def version_of(project: str) -> str:
    (version,) = re.findall(r'^version = "(.*)"$', project, re.M)
    return version


@pytest.mark.parametrize("package", APART)
def test_a_package_apart_has_the_version_of_the_others(package):
    """The whole depends on it, and has no copy of it."""
    own = (ROOT / package / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nname = "{package}"\nversion = "{version_of(PROJECT)}"\n' in own
    assert f'\n    "{package}=={version_of(PROJECT)}",' in PROJECT
    assert '\ndependencies = ["numpy>=2"]\n' in own
    assert (ROOT / package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_build_tools_of_all_distributions_are_the_same():
    begins = [
        re.findall(r"^requires = .*\nbuild-backend = .*$", path.read_text(encoding="utf-8"), re.M)
        for path in (ROOT / "pyproject.toml", *(ROOT / name / "pyproject.toml" for name in APART))
    ]
    assert all(found == begins[0] and len(found) == 1 for found in begins)


def test_the_changelog_begins_with_the_version():
    version = version_of(PROJECT)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", changelog, re.M)
    released = [name for name in headings if name != "Unreleased"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ · \d{4}-\d\d-\d\d", name) for name in released)
    assert released[0].startswith(f"{version} ")
    assert "Unreleased" not in headings[1:]


def test_every_folder_of_python_is_installed_or_is_not_on_purpose():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    (listed,) = re.findall(r"^only-include = \[\n(.*?)^\]", PROJECT, re.M | re.DOTALL)
    included = set(re.findall(r'^    "(\w+)",', listed, re.M))
    assert included == {*PACKAGES, *OLD_NAMES} - {*APART}
    assert folders == included | {*APART} | NOT_INSTALLED


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_its_version(package):
    module = importlib.import_module(package)
    distribution = package if package in APART else "blackwell-kernels"
    assert module.__version__ == importlib.metadata.version(distribution) == version_of(PROJECT)


@pytest.mark.parametrize("home", ["kernelkit.compile.version", "ptxemu.version"])
def test_a_checkout_that_is_not_installed_says_so(home, monkeypatch):
    module = importlib.import_module(home)
    before = module.__version__

    def nowhere(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patched:
        patched.setattr(importlib.metadata, "version", nowhere)
        assert importlib.reload(module).__version__ == "0+checkout"
    assert importlib.reload(module).__version__ == before


def test_every_package_is_typed():
    assert all((ROOT / package / "py.typed").read_bytes() == b"" for package in PACKAGES)


def test_packages_are_python_and_pages():
    """And tables of what was measured. A wheel has all files of a package but its pages."""
    folders = {"kernelkit": "tune/tables", "cycle_model": "parameters"}
    assert '\n[tool.hatch.build.targets.wheel]\nexclude = ["*.md"]\n' in PROJECT
    for package, folder in folders.items():
        assert [*(ROOT / package / folder).glob("*.json")]
    for package in PACKAGES:
        tables = [*(ROOT / package).glob(f"{folders.get(package, '-')}/*.json")]
        kept = [p for p in (ROOT / package).rglob("*") if p.is_file() and p not in tables]
        names = {path.name for path in kept if path.suffix not in (".py", ".pyc")}
        more = {"LICENSE", "pyproject.toml"} if package in APART else set()
        assert names <= {"README.md", "py.typed"} | more


def test_the_description_has_no_link_into_the_checkout():
    """The description is README.md, whose links to files lead nowhere on a page of an index."""
    (pattern,) = re.findall(r"pattern = '(.*?)', replacement = '\\1'", PROJECT)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert LINK.search(text)
    described = re.sub(pattern, r"\1", text)
    assert not LINK.search(described)
    assert "[notes](https://example.org)" in re.sub(pattern, r"\1", "[notes](https://example.org)")


def test_scripts_have_an_extra_for_what_they_import():
    """Each optional package that a script names is in the extra that it tells to install."""
    for package, extra in EXTRA_OF.items():
        needed = metadata_of_extra(extra)
        assert {"PIL": "pillow"}.get(package, package) in needed, (package, extra)


def metadata_of_extra(name: str) -> set[str]:
    """Names of the packages of an extra of pyproject.toml, and of the extras within it."""
    (text,) = re.findall(rf"^{name} = \[(.*?)\]$", PROJECT, re.M | re.DOTALL)
    found = set(re.findall(r'"([\w.-]+)(?:\[([\w,]+)\])?', text))
    inner = {each for _, extras in found for each in extras.split(",") if each}
    return {package for package, _ in found}.union(*map(metadata_of_extra, inner))


def test_requirements_that_are_pinned_lie_in_their_ranges():
    """`constraints.txt` has a version of each, so that the installed packages are those
    declared."""
    from packaging.requirements import Requirement  # comes with pytest

    (declared,) = re.findall(r"^dependencies = \[\n(.*?)^\]", PROJECT, re.M | re.DOTALL)
    pins = re.findall(r"^(\S+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    found = [Requirement(text) for text in re.findall(r'^    "(.*?)",', declared, re.M)]
    found = [requirement for requirement in found if requirement.name not in APART]
    assert len(found) == 6
    for requirement in found:
        versions = [version for name, version in pins if name == requirement.name]
        assert versions
        assert all(requirement.specifier.contains(version) for version in versions)
        assert len(requirement.specifier) >= 1
