"""PTX whose operands make no sense: a syntax error with its line, not an error of ours."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

import ptxemu
from tests.ptxemu.kernels import kernel, launch

SHARED = ".shared .align 8 .b8 fixed[64];\n"


@pytest.mark.parametrize(
    "line",
    [
        "mov.u32 %r1, !%p1;",
        "mov.b64 %rd1, !%p1;",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [fixed], {!%p1};",
        "add.u32 %r1, !%r2, %r3;",
        "@%r1 mov.u32 %r1, %r2;",
        "@!%p99 mov.u32 %r1, %r2;",
        "st.shared.b32 [fixed], {};",
        "match.any.sync.b32 %r1, %r2;",
        "shfl.sync.idx.b32 %r3, 0, 31, -1;",
        "st.shared.b32 fixed, %r1;",
        "ld.shared.b32 %r1, %r2;",
        "cp.async.wait_group %r1;",
    ],
)
def test_the_line_is_named(line: str) -> None:
    text = kernel(line, before=SHARED)
    with pytest.raises(ptxemu.PtxSyntaxError) as caught:
        launch(text)
    number = text.splitlines().index(line) + 1
    assert caught.value.line == number
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("st.shared.v2.b32 [fixed], {%r1};", "2 elements; its operand has 1"),
        ("st.shared.v2.b32 [fixed], {%r1, %r2, %r3};", "2 elements; its operand has 3"),
        ("st.shared.b32 [fixed], {%r1, %r2};", "1 element; its operand has 2"),
        ("ld.shared.v4.b32 {%r1, %r2}, [fixed];", "4 elements; its operand has 2"),
        ("ld.global.nc.v2.b32 %r1, [%rd1];", "2 elements; its operand has 1"),
        ("ldu.global.b32 {%r1, %r2}, [%rd1];", "1 element; its operand has 2"),
        ("red.global.add.v4.f32 [%rd1], {%f1, %f2};", "4 elements; its operand has 2"),
        ("atom.global.add.v2.f32 {%f1}, [%rd1], {%f1, %f2};", "2 elements; its operand has 1"),
        (
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [fixed], {%r1}, [fixed];",
            "2 elements; its operand has 1",
        ),
    ],
)
def test_vectors_have_as_many_items_as_the_opcode_says(line: str, counts: str) -> None:
    with pytest.raises(ptxemu.PtxSyntaxError) as caught:
        launch(kernel(line, before=SHARED))
    assert f"{line.split()[0]} moves {counts}" in str(caught.value)


OPCODES = """mov.u32 mov.b64 mov.pred add.s32 add.f32 mad.lo.s32 fma.rn.f32 setp.lt.u32 selp.b32
ld.shared.b32 st.shared.v2.b32 ld.global.b64 st.global.b16 atom.shared.add.u32 red.global.add.f32
cvt.u32.u64 cvt.rn.f32.s32 shl.b32 prmt.b32 bfe.u32 lop3.b32 vote.sync.ballot.b32 shfl.sync.idx.b32
redux.sync.add.s32 bar.sync mbarrier.init.shared.b64 mbarrier.try_wait.parity.shared.b64
cp.async.ca.shared.global cp.async.bulk.commit_group elect.sync cvta.to.global.u64 mapa.u64
ldmatrix.sync.aligned.m8n8.x1.shared.b16 tcgen05.alloc.cta_group::1.sync.aligned.b32""".split()
OPERANDS = """%r1 %r2 %p1 !%p1 %rd1 %f1 %fd1 %h1 5 -1 1.5 0f3F800000 0d3FF0000000000000 [%rd1] [%r1]
[fixed] {%r1,%r2} {%p1,%r1} {} _ %tid.x fixed nobody %r1|%p1 [%rd1,{%r1,%r2}] 99999999999999999999
""".split()


def attempt(seed: int) -> None:
    chance = random.Random(seed)
    operands = ", ".join(chance.choices(OPERANDS, k=chance.randrange(5)))
    text = kernel(f"{chance.choice(OPCODES)} {operands};", before=SHARED)
    with suppress(ptxemu.PtxEmuError):
        launch(text, memory=[], check=chance.random() < 0.5)


@pytest.mark.parametrize("block", range(20))
def test_only_errors_with_a_name(block: int) -> None:
    for seed in range(100 * block, 100 * block + 100):
        attempt(seed)
