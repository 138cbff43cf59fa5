"""The house rules hold: limits, import direction, the DSL's silent traps, prose.

`lab.house` has the rules, tests/test_house_probes.py shows that each of them can fail, and ruff
checks the rest.
"""

from __future__ import annotations

import gc

import pytest

from lab.house import dsl, imports, map, prose, repository, size
from lab.house.graph import house
from lab.house.perform import EXCEPTIONS
from lab.house.source import PACKAGES, ROOT, Finding, Source, files, sources
from lab.tools import style

EVERYWHERE = None
KEPT = (".py", ".md", ".toml", ".txt", ".ptx", ".sh", ".yml", ".yaml", ".json", ".cfg", ".ini", "")

# rule -> the top-level folders that it checks
RULES_OF_A_FILE = {
    size.file_length: EVERYWHERE,
    size.function_length: EVERYWHERE,
    size.parameter_count: EVERYWHERE,
    size.jit_signature: EVERYWHERE,
    size.module_docstring: EVERYWHERE,
    imports.direction: set(PACKAGES),
    imports.emulator_is_alone: {"ptxemu"},
    imports.plans_without_dsl: set(PACKAGES),
    dsl.advanced_state_returns: EVERYWHERE,
    dsl.no_advance_on_exit: EVERYWHERE,
    dsl.no_nested_roles: EVERYWHERE,
    dsl.no_future_annotations: EVERYWHERE,
    dsl.no_traps_imported: EVERYWHERE,
}
RULES_OF_A_TEXT = {
    repository.no_machine_paths: KEPT,
    repository.no_dumps: (".ptx", ".sass", ".mlir", ".ll", ".log", ".jsonl"),
    repository.links_resolve: (".md",),
    repository.package_readme_length: (".md",),
    repository.markdown_line_length: (".md",),
}
RULES_OF_THE_TREE = (repository.folders_are_packages, repository.kernels_have_a_matrix)
RULES = (*RULES_OF_A_FILE, *RULES_OF_A_TEXT, *RULES_OF_THE_TREE)


def _unexcused(rule: str, findings: list[Finding]) -> list[str]:
    return [str(f) for f in findings if (rule, f.subject) not in EXCEPTIONS]


def _all_findings(everything: list[Source]) -> dict[str, list[Finding]]:
    """Return every rule's findings in the repository, exceptions included."""
    found = {rule.__name__: list(rule(everything)) for rule in RULES_OF_THE_TREE}
    for rule, folders in RULES_OF_A_FILE.items():
        chosen = (s for s in everything if folders is EVERYWHERE or s.package in folders)
        found[rule.__name__] = [finding for source in chosen for finding in rule(source)]
    for rule, suffixes in RULES_OF_A_TEXT.items():
        texts = ((path, (ROOT / path).read_text(encoding="utf-8")) for path in files(*suffixes))
        found[rule.__name__] = [finding for path, text in texts for finding in rule(path, text)]
    return found


@pytest.fixture(scope="module")
def everything() -> list[Source]:
    return sources()


@pytest.fixture(scope="module")
def found(everything) -> dict[str, list[Finding]]:
    gc.disable()  # it would scan millions of nodes of trees again and again
    try:
        return _all_findings(everything)
    finally:
        gc.enable()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule, found):
    broken = _unexcused(rule.__name__, found[rule.__name__])
    assert not broken, f"{rule.__doc__}\n" + "\n".join(broken)


def test_rules_see_the_repository(everything):
    assert {"tests/test_house_rules.py", "ptxemu/errors.py"} <= {str(s.path) for s in everything}


def test_every_exception_is_needed_and_has_a_reason(found):
    needed = {(rule, finding.subject) for rule, findings in found.items() for finding in findings}
    stale = set(EXCEPTIONS) - needed
    assert not stale, f"no longer broken, so take it off the list: {sorted(stale)}"
    assert all(reason.strip() for reason in EXCEPTIONS.values())


def test_tests_of_a_file_share_a_worker(request):
    """pytest-xdist appends the group to a test's id. With pytest 9.2 it silently did not, and
    compiled every kernel in every worker (pytest-xdist #1386)."""
    grouped = request.config.getoption("loadgroup", default=False)
    assert request.node.nodeid.endswith("@tests/test_house_rules.py") == grouped


def test_no_count_of_prose_offences_rises_or_is_stale(everything):
    """`python scripts/house.py prose` shows them; `--write` stores counts that have fallen."""
    assert prose.counted([*prose.offences(everything)]) == prose.allowed()


def test_there_is_no_circle(everything):
    assert not house(everything).circles()


def test_no_arrow_goes_upwards(everything):
    assert not house(everything).upwards()


def test_the_map_is_of_the_imports_of_today(everything):
    """`python scripts/report.py --docs --only map` redraws it."""
    assert style.source_of(ROOT / "docs" / "house.png") == map.source(house(everything))
