"""First differences: where two runs, or a run and a reference, part, and who wrote there."""

from __future__ import annotations

import numpy as np
import pytest

from ptxemu.host_tensor import HostTensor
from ptxemu.inspect import Region, Stop, first_difference, first_tile_difference
from tests.ptxemu.kernels import POINTER, kernel, launch

CELLS = ".shared .align 4 .b8 cells[256];\n"


def doubled(factor: int, odd: int | None = None) -> str:
    """d[i] = factor * d[i], but for element `odd`, which gets one more; through shared memory."""
    wrong = "" if odd is None else f"setp.eq.u32 %p0, %r0, {odd}; @%p0 add.u32 %r1, %r1, 1;"
    return (
        kernel(
            POINTER
            + f"""ld.global.u32 %r1, [%rd2]; mul.lo.u32 %r1, %r1, {factor}; {wrong}
        mov.u32 %r2, cells; mad.lo.u32 %r2, %r0, 4, %r2;
        .loc 1 11 1
        st.shared.u32 [%r2], %r1;
        .loc 1 12 1
        ld.shared.u32 %r3, [%r2];
        st.global.u32 [%rd2], %r3;""",
            ".param .u64 d",
            CELLS,
        )
        + '\n.file 1 "kernel.py"\n'
    )


RACE = kernel(  # under the adversarial policy the load of warp 0 may come before warp 1's store
    POINTER
    + """setp.lt.u32 %p0, %r0, 32; @%p0 bra READ;
    st.global.u32 [%rd1+128], %r0; bra END;
    READ: ld.global.u32 %r4, [%rd1+128]; st.global.u32 [%rd2], %r4;
    END:""",
    ".param .u64 d",
)


def test_two_functions_differ_in_one_element():
    d = np.arange(32, dtype=np.uint32)
    found = first_difference(
        lambda: launch(doubled(2), d), {"d": d}, other=lambda: launch(doubled(2, odd=9), d)
    )
    assert (found.name, found.index, found.first, found.second) == ("d", (9,), 18, 19)
    assert (found.different, found.size) == (1, 32)
    first, second = found.writes
    assert [write.value.view(np.uint32)[0] for write in (*first, *second)] == [18, 19]
    assert second[-1].lanes == (9,)
    assert second[-1].source == "kernel.py:12"
    assert "d[9] differs: 18 and 19" in str(found)
    np.testing.assert_array_equal(d, 2 * np.arange(32))  # what the first run left


def test_equal_runs_have_no_difference():
    d = np.arange(32, dtype=np.uint32)
    for policy in ("random", "adversarial"):
        found = first_difference(lambda: launch(doubled(3), d), {"d": d}, second={"policy": policy})
        assert found is None


def test_policies_that_differ():
    d = np.zeros(64, np.uint32)
    seeds = [
        first_difference(
            lambda: launch(RACE, d, block=(64,)),
            {"d": d},
            second={"policy": "random", "seed": seed},
        )
        for seed in range(8)
    ]
    found = next(filter(None, seeds))
    assert found.index == (0,)
    assert {int(found.first), int(found.second)} == {0, 63}


def test_a_reference_and_a_tolerance():
    d = np.arange(32, dtype=np.uint32)

    def reference() -> dict[str, np.ndarray]:
        return {"d": 2 * d}

    assert first_difference(lambda: launch(doubled(2), d), {"d": d}, reference=reference) is None
    d[:] = np.arange(32)
    run = lambda: launch(doubled(2, odd=5), d)  # noqa: E731
    found = first_difference(run, {"d": d}, reference=reference)
    assert (found.index, found.first, found.second, found.writes[1]) == ((5,), 11, 10, ())
    d[:] = np.arange(32)
    assert first_difference(run, {"d": d}, reference=reference, tolerance=1.0) is None
    with pytest.raises(ValueError, match="shape"):
        first_difference(run, {"d": d}, reference={"d": d[:3]})
    with pytest.raises(ValueError, match="the tensors are d"):
        first_difference(run, {"d": d}, reference={"e": d})


def test_tiles_differ_at_a_line():
    d = np.arange(32, dtype=np.uint32)
    stop = Stop("kernel.py:12", dump=("smem",), regions=(Region("cells", 1024, 2, 16, "u32"),))
    found = first_tile_difference(
        lambda: launch(doubled(2), d),
        stop,
        {"d": d},
        other=lambda: launch(doubled(2, odd=20), d),
    )
    assert (found.name, found.index, found.first, found.second) == ("cells", (1, 4), 40, 41)
    assert found.moment == (0, 0, 0)
    assert found.writes[1][-1].source == "kernel.py:11"
    assert "at step 0, CTA 0, warp 0" in str(found)
    assert first_tile_difference(lambda: launch(doubled(2), d), stop, {"d": d}) is None
    with pytest.raises(ValueError, match=r"no moment at kernel\.py:99 in both runs: 0"):
        first_tile_difference(lambda: launch(doubled(2), d), Stop("kernel.py:99"), {"d": d})


def test_tensors_of_torch_and_views_of_numpy():
    torch = pytest.importorskip("torch")
    x = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    for tensor, values in ((x, x.float()), (x.T, x.T.float()), (x[1:, ::2], x[1:, ::2].float())):
        held = HostTensor(tensor)
        np.testing.assert_array_equal(held.values(held.bits), values.numpy())
    held = HostTensor(x[1:, ::2])
    assert held.address_of((1, 1)) == x[2, 2:].data_ptr()
    assert held.extent == 2 * 7
    y = np.arange(12, dtype=np.int16).reshape(3, 4)[1:, 1::2]
    held = HostTensor(y)
    np.testing.assert_array_equal(held.values(held.bits), y)
    held.bits[0, 0] = 77
    assert y[0, 0] == 77
    with pytest.raises(ValueError, match="complex"):
        HostTensor(np.zeros(3, np.complex64))
