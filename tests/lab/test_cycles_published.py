"""Published times of other people's kernels compared with the cycle model; tests need no kernel."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass

import pytest

from cycle_model import gpus
from lab import commands
from lab.cycles import peers, published
from lab.cycles.peers import Shape, peers_of
from lab.tools.command import main_of
from lab.tools.common import REFUSED

HEAD = "# a source\ntable,device_inferred,hd,causal,batch,seqlen,fa4_tflops\n"


def saved(path, *lines):
    path.write_text(HEAD + "".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_rows_without_a_time_are_left_out(tmp_path):
    file = saved(tmp_path / "rows.csv", "C,B200,64,1,2,16384,834", "C,B200,128,0,2,16384,")
    (found,) = published.published_in(file)
    assert found.group == "C hd64 causal"
    assert found.shape == Shape(64, True, 2, 16384, 32, 32)
    assert found.us == pytest.approx(2637, abs=1)  # half of 4 * 2 * 32 * 16384^2 * 64 / 834e12


def test_a_file_that_is_none_is_refused(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("hd,causal\n64,0\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no column 'batch'"):
        list(published.published_in(file))
    with pytest.raises(ValueError, match="invalid literal"):
        list(published.published_in(saved(file, "C,B200,64,no,2,16384,834")))


def test_without_flash_attention_it_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    file = saved(tmp_path / "rows.csv", "C,B200,64,1,2,16384,834")
    assert main_of(commands.CYCLES, "", ["published", str(file)]) == REFUSED
    assert "pip install flash-attn-4" in capsys.readouterr().err
    with pytest.raises(ValueError, match="has no flash_attn/cute"):
        peers.from_source(tmp_path)


def test_rows_of_two_gpus_are_refused(tmp_path, capsys):
    """Code differs by GPU, and FlashAttention-4 compiles it once per process."""
    file = saved(tmp_path / "rows.csv", "B,GB300,64,1,2,16384,1251", "C,B200,64,1,2,16384,834")
    assert main_of(commands.CYCLES, "", ["published", str(file)]) == REFUSED
    assert "rows of 2 GPUs, B200, GB300: name those of one, --only" in capsys.readouterr().err


def test_flash_attention_sees_the_gpu_that_is_modelled(monkeypatch):
    cute = types.ModuleType("flash_attn.cute")
    cute.flash_attn_func = lambda: None
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    from cutlass import cutlass_dsl
    from cutlass.utils import HardwareInfo

    with peers.flash_attention(gpus.named("GB300")):
        assert cutlass_dsl.CuTeDSL._get_dsl().envar._arch == "sm_103a"
        assert HardwareInfo().get_device_multiprocessor_count() == 152
    with peers.flash_attention():
        assert cutlass_dsl.CuTeDSL._get_dsl().envar._arch == "sm_100a"
        assert HardwareInfo().get_device_multiprocessor_count() == 148


def test_more_than_three_fitted_scalars_are_refused(tmp_path, capsys):
    file = saved(tmp_path / "rows.csv", "C,B200,64,1,2,16384,834")
    words = [word for k in range(4) for word in ("--fit", f"launch={k},3")]
    assert main_of(commands.CYCLES, "", ["published", str(file), *words]) == REFUSED
    assert "at most 3" in capsys.readouterr().err


def test_clusters_are_spread_over_a_grid_without_its_period():
    """The grid has 8 sections of 64 blocks of 8 heads, the longest first: the sample's mean is that
    of all."""
    total, blocks = 4096, 64
    work = [blocks - number % 512 // 8 for number in range(total)]
    first, beside, *others = peers.spread(total, 24)
    assert beside == first + 1
    chosen = {first, *others}
    assert len(chosen) == 24
    assert sum(work[each] for each in chosen) / 24 == pytest.approx(sum(work) / total, rel=0.06)
    assert peers.spread(3, 24) == [0, 1, 2]


@dataclass(frozen=True)
class _Timed:
    """A launch that takes a parameter's value per head dimension."""

    head_dim: int

    def microseconds(self, gpu):
        return gpu.value("launch") * self.head_dim


def test_scalars_are_chosen_on_one_head_dimension_and_tested_on_the_others():
    shapes = {head_dim: Shape(head_dim, False, 1, 1024, 1, 1) for head_dim in (64, 128)}
    rows = [
        published.Published("", "B200", shape, shape.flops / (4.0 * head_dim) * 1e-6)
        for head_dim, shape in shapes.items()
    ]  # published times equal the model's for launch=4
    timed = [(row, _Timed(row.shape.head_dim)) for row in rows]
    found = published.fitted(timed, [published._values("launch=3,4,5")])
    assert (found["what"], found["rows"]) == ("launch=4", "1 and 1")
    assert found["trained"] == pytest.approx(0)
    assert found["tested"] == pytest.approx(0)
    with pytest.raises(ValueError, match="rows of head dimension 128 and others"):
        published.fitted(timed[:1], [])
    with pytest.raises(ValueError, match="no parameter 'lunch'"):
        published._values("lunch=3")


def test_peers_of_what_has_none_are_refused():
    with pytest.raises(ValueError, match="there are none for 'moe'"):
        peers_of("moe")
