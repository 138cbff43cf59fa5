"""Opcode matching: the longest prefix wins, flags and types are all known, nothing is guessed."""

from __future__ import annotations

import pytest

import ptxemu  # noqa: F401  (fills the registry)
from ptxemu.errors import UnsupportedPtx
from ptxemu.ops import registry
from ptxemu.syntax.tree import Instr


def instr(opcode: str) -> Instr:
    return Instr(opcode, (), None, 7, f"{opcode};")


@pytest.mark.parametrize(
    ("opcode", "name", "flags", "types"),
    [
        ("add.s32", "add", set(), ("s32",)),
        ("add.rn.ftz.f32", "add", {"rn", "ftz"}, ("f32",)),
        ("add.cc.u32", "add.cc", set(), ("u32",)),
        ("fma.rn.f32.bf16", "fma", {"rn"}, ("f32", "bf16")),
        ("cvt.rn.satfinite.e4m3x2.f32", "cvt", {"rn", "satfinite"}, ("e4m3x2", "f32")),
        (
            "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group",
            "cp.async.bulk.tensor",
            {"2d", "global", "shared::cta", "tile", "bulk_group"},
            (),
        ),
        ("bar.sync", "bar.sync", set(), ()),
        ("mad.hi.sat.s32", "mad", {"hi", "sat"}, ("s32",)),
        ("prmt.b32.f4e", "prmt.b32.f4e", set(), ()),
    ],
)
def test_forms(opcode: str, name: str, flags: set[str], types: tuple[str, ...]) -> None:
    found = registry.match(instr(opcode))
    assert (found.form.name, set(found.flags), found.types) == (name, flags, types)


UNKNOWN = "frobnicate add add.wonder.s32 add.rn.s32 add.f128 mul.wide.f32 cvt.f32 bar"

NOT_OF_HALF = (
    "add.relu.f16 sub.rn.relu.f16x2 mul.relu.bf16 add.ftz.bf16 mul.sat.bf16x2 fma.rn.ftz.bf16 "
    "fma.rn.sat.relu.f16 neg.ftz.bf16 abs.ftz.bf16x2 min.ftz.bf16 ex2.approx.ftz.f16 "
    "tanh.approx.ftz.bf16"
)


@pytest.mark.parametrize(
    "opcode", [*UNKNOWN.split(), *NOT_OF_HALF.split(), "tcgen05.mma.cta_group::3.kind::f16"]
)
def test_what_is_not_known_is_refused_with_its_line(opcode: str) -> None:
    with pytest.raises(UnsupportedPtx, match="unsupported") as caught:
        registry.match(instr(opcode))
    assert (caught.value.line, caught.value.text) == (7, f"{opcode};")


def test_every_form_names_its_section_of_the_manual() -> None:
    forms = registry.supported()
    assert len(forms) > 100
    assert all(form.section for form in forms)


def test_forms_of_one_name_do_not_hide_each_other() -> None:
    """Of two forms of one name, neither accepts everything that the other does."""
    by_name: dict[str, list[registry.Form]] = {}
    for form in registry.supported():
        by_name.setdefault(form.name, []).append(form)
    for name, forms in by_name.items():
        for k, later in enumerate(forms):
            for earlier in forms[:k]:
                hidden = (
                    len(earlier.types) == len(later.types)
                    and later.flags <= earlier.flags
                    and all(a <= b for a, b in zip(later.types, earlier.types, strict=True))
                )
                assert not hidden, f"{name}: {later.types} is hidden"
