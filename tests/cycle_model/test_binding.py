"""Every warp finds its path, and what does not fit is noticed."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from cycle_model.binding.bound import BoundLaunch
from cycle_model.binding.search import Unbound
from cycle_model.binding.symbols import of_sass
from cycle_model.launch import bind
from kernelkit.call.launch import emulation
from kvcache.movement.api import checksum
from ptxemu.options import Options
from ptxemu.record import recording as r
from ptxemu.watch import watched


def test_all_warps_have_a_path(decoded):
    bound = bind(decoded)
    warps = [warp for cluster in bound.clusters for warp in bound.cluster(cluster)]
    assert len(warps) == len(decoded.warps)
    for warp in warps:
        items = [bound.function.instructions[at] for at in warp.path[warp.at].tolist()]
        assert [of_sass(item).landmark for item in items] == [x.name for x in warp.landmarks]
        assert bound.function.instructions[warp.path[-1]].word == "EXIT"


def test_work_on_the_path_is_what_was_recorded(decoded):
    """Of a warp that works: as many products, copies and exponentials."""
    bound = bind(decoded)
    warp = bound.cluster(0)[0]
    words = [bound.function.instructions[at].word for at in warp.path.tolist()]
    executed = [decoded.sites[site] for block in warp.record.path for site in decoded.blocks[block]]
    for word, opcode in (("HMMA", "mma"), ("LDSM", "ldmatrix"), ("MUFU", "ex2")):
        assert words.count(word) >= sum(site.root == opcode for site in executed) > 0


@pytest.mark.parametrize("kind", [r.BARRIER, r.WAIT, r.SEND])
def test_a_dropped_event_is_noticed(decoded, kind):
    changed = deepcopy(decoded)
    warp = next(w for w in changed.warps if any(event.what == kind for event in w.events))
    gone = next(event for event in warp.events if event.what == kind)
    warp.events.remove(gone)
    with pytest.raises(ValueError, match=f"warp {warp.index} of CTA {warp.rank}"):
        bind(changed).cluster(warp.cluster)


def test_a_dropped_atomic_is_noticed():
    """It is no landmark: the path says that it was executed, and nothing what it did."""
    memory = torch.zeros(2, 4096, dtype=torch.uint8)
    with emulation(Options(limit=None), arch="sm_90a"), watched(record=True) as report:
        checksum(memory, torch.tensor([1]), 0, 4096)
    recording = report.launches[0].recording
    bind(recording).cluster(0)
    warp = next(w for w in recording.warps if any(event.what == r.ATOMIC for event in w.events))
    warp.events = [event for event in warp.events if event.what != r.ATOMIC]
    with pytest.raises(ValueError, match=r"'atom.*not what that did"):
        bind(recording).cluster(warp.cluster)


def test_swapped_instructions_are_noticed(decoded):
    """Two landmarks of different kinds change places in the machine code."""
    function = bind(decoded).function
    items = list(function.instructions)
    names = [of_sass(item).landmark for item in items]
    first = names.index("init")
    second = next(k for k in range(first, len(names)) if names[k] in ("cluster arrive", "barrier"))
    items[first], items[second] = items[second], items[first]
    broken = BoundLaunch(type(function)(function.name, items, function.labels), decoded)
    with pytest.raises(Unbound, match="does not follow"):
        broken.cluster(0)


def test_the_error_names_what_can_come_next(decoded):
    function = bind(decoded).function
    rest = type(function)(function.name, function.instructions[-40:], {})
    with pytest.raises(Unbound, match=r"from 0x\w+ come"):
        BoundLaunch(rest, decoded).cluster(0)


def test_no_machine_code_no_binding(decoded):
    with pytest.raises(ValueError, match="no machine code"):
        bind(replace(decoded, cubin=b""))
    with pytest.raises(ValueError, match="is not in the machine code"):
        bind(replace(decoded, entry="another"))
