"""The race checker, by pairs: a right kernel is not reported; the same kernel without one of its
waits, fences or barriers is, with the lines and the missing instruction.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance.ptx_program import POLICIES, aligned_copy
from ptxemu.findings import Finding
from tests.ptxemu.check_pairs.scenario import Lacks, Scenario, Written, launch, write

TOPICS = "mbarriers clusters bulk tensor scale_factors memory known_right".split()
SCENARIOS: dict[str, Scenario] = {}
for _topic in TOPICS:
    SCENARIOS |= import_module(f"tests.ptxemu.check_pairs.{_topic}").SCENARIOS
PAIRS = [(name, variant) for name, scenario in SCENARIOS.items() for variant in scenario.variants]


@cache
def _loaded(name: str) -> ptxemu.Module:
    return ptxemu.load(write(SCENARIOS[name]).text)


def _shown(findings: list[Finding], kernel: Written) -> str:
    """Text for the message of a failed test."""
    lines = []
    for found in findings:
        lines.append(f"{found.check}: {found.message}; missing: {found.missing}")
        lines += [f"    {a.what} by {a.agent}, line {a.line}: {a.text}" for a in found.accesses]
    return "\n".join([*lines, f"names: {kernel.names}"])


def _says(found: Finding, kernel: Written, lacks: Lacks) -> bool:
    """Whether the finding names the lines, and what the variant lacks."""
    lines = [kernel.names[name] for name in (lacks.earlier, lacks.later) if name]
    named = [access.line for access in found.accesses if access.line] or [found.line]
    return (
        found.check == lacks.check
        and found.severity == "error"
        and lacks.missing in (found.missing or found.message)
        and lines in (named, [])
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_right_kernel_is_not_reported(name: str, policy: str) -> None:
    scenario = SCENARIOS[name]
    found = launch(scenario, _loaded(name), policy).findings
    found = [each for each in found if "only the hardware's scoreboard" not in each.message]
    assert not found, _shown(found, write(scenario))


@pytest.mark.parametrize(("name", "variant"), PAIRS)
def test_what_a_variant_lacks_is_named(name: str, variant: str) -> None:
    """The friendliest schedule is enough, although the results are mostly right."""
    scenario = SCENARIOS[name]
    kernel = write(scenario, variant)
    assert kernel.text != write(scenario).text
    found = launch(scenario, ptxemu.load(kernel.text), "round-robin").findings
    assert any(_says(f, kernel, scenario.variants[variant]) for f in found), _shown(found, kernel)
    assert all(f.rule and f.text for f in found if f.check == "race"), "each names the manual"


def test_a_launch_comes_after_the_one_before_unless_it_is_a_dependent_one() -> None:
    scenario = SCENARIOS["griddepcontrol.wait"]
    module = ptxemu.load(write(scenario, "wait").text)
    assert launch(scenario, module, "round-robin").findings
    assert not launch(scenario, module, "round-robin", dependent=False).findings


def test_memory_that_was_freed_is_not_what_the_launch_before_has_touched() -> None:
    scenario = SCENARIOS["griddepcontrol.wait"]
    module = ptxemu.load(write(scenario, "wait").text)
    source, target = slice(0, 1), slice(1, 2)  # the kernel writes only the latter
    assert launch(scenario, module, "round-robin", freed=source).findings
    assert not launch(scenario, module, "round-robin", freed=target).findings


TOUCHES = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry touches(.param .u64 read, .param .u64 written)
{{
    .reg .b32 %r; .reg .b64 %a, %b;
    ld.param.u64 %a, [read];
    ld.param.u64 %b, [written];
    {begin}
    ld.global.b32 %r, [%a];
    st.global.b32 [%b], %r;
    {end}
    ret;
}}
"""
WAIT = "griddepcontrol.wait;"


@pytest.mark.parametrize("end", ["", WAIT], ids=["never", "at its end"])
def test_who_waits_for_a_launch_waits_for_those_that_it_waited_for(end: str) -> None:
    """The second of three launches overlaps the first; the third reads what the first wrote."""
    cells = [aligned_copy(np.zeros(4, np.uint32)) for _ in range(5)]
    found: list[Finding] = []
    launches = ((0, 1, WAIT, ""), (0, 2, "", end), (1, 3, WAIT, ""))
    for read, written, begin, behind in launches:
        module = ptxemu.load(TOUCHES.format(begin=begin, end=behind))
        params = [cells[n].ctypes.data.to_bytes(8, "little") for n in (read, written)]
        options = ptxemu.Options(check=True)
        given = {"params": params, "memory": cells, "dependent": True, "options": options}
        found += module.launch(grid=(1,), block=(32,), **given).findings
    assert [each.missing for each in found] == ["griddepcontrol.wait before it"] * (not end)


def test_a_launch_without_a_checker_is_the_one_before_the_next() -> None:
    """Accesses of such a launch are unknown; those of earlier launches have long completed."""
    scenario = SCENARIOS["griddepcontrol.wait"]
    launch(scenario, _loaded("griddepcontrol.wait"), "round-robin")
    assert ptxemu.module.memory_before.get() is not None
    launch(scenario, _loaded("griddepcontrol.wait"), "round-robin", check=False)
    assert ptxemu.module.memory_before.get() is None


@pytest.mark.parametrize(
    ("name", "variant", "why"),
    [
        ("cp.async.wait_group 1", "more", "`cp.async.wait_group 2` at PTX line"),
        ("cp.async.wait_group", "commit", "it is in no group"),
        ("wait_group of whoever issued", "here", "only for its own operations"),
        ("expect_tx", "half", "128 bytes more than were announced"),
        ("TMA load", "wait", "has not waited on"),
        ("a wait whose answer decides", "blind", "does not use what `mbarrier.try_wait"),
        ("global memory within a CTA", "barrier", "the last event of warp 0 of cta(0,0,0)"),
    ],
)
def test_what_was_done_instead_is_told(name: str, variant: str, why: str) -> None:
    kernel = write(SCENARIOS[name], variant)
    found = launch(SCENARIOS[name], ptxemu.load(kernel.text), "round-robin").findings
    assert any(why in finding.why for finding in found), [finding.why for finding in found]
