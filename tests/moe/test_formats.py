"""The formats, the sizes of their scale factors, and refusals of a quantised tensor."""

from __future__ import annotations

import pytest
import torch

from moe.formats import FORMATS, format_of, row_blocks, scale_atoms, scale_blocks, scale_bytes
from moe.quantized import Quantized


def test_formats():
    facts = {
        name: (form.block, form.largest, form.per_byte, form.scale, form.has_global)
        for name, form in FORMATS.items()
    }
    assert facts == {
        "nvfp4": (16, 6, 2, "e4m3", True),
        "mxfp4": (32, 6, 2, "ue8m0", False),
        "mxfp8": (32, 448, 1, "ue8m0", False),
    }
    for name, form in FORMATS.items():
        assert form is format_of(form.name) is FORMATS[name]
        assert form.columns(6 * form.block) == 6


def test_only_nvfp4_has_a_global_scale():
    assert FORMATS["nvfp4"].amax_target == 2688
    with pytest.raises(ValueError, match="mxfp8 has no global scale"):
        _ = FORMATS["mxfp8"].amax_target


def test_unknown_format_names_the_known_ones():
    with pytest.raises(ValueError, match="'int4': one of nvfp4, mxfp4, mxfp8"):
        format_of("int4")


@pytest.mark.parametrize("k", [0, 8, 24, -16])
def test_blocks_divide_a_row(k):
    with pytest.raises(ValueError, match=f"K = {k} in nvfp4: a positive multiple of 16"):
        FORMATS["nvfp4"].columns(k)


def test_sizes_of_scale_factors():
    assert [scale_atoms(columns) for columns in (1, 4, 5)] == [1, 1, 2]
    assert [row_blocks(rows) for rows in (0, 1, 128, 129)] == [0, 1, 1, 2]
    assert scale_bytes(3, 5) == 3 * 2 * 512


@pytest.mark.parametrize(
    "counts", [[0, 0], [1, 1, 1], [128, 128], [127, 129], [1, 0, 255], [129, 257, 1, 385]]
)
def test_room_for_rows_by_expert_suffices(counts):
    needed = sum(row_blocks(count) for count in counts)
    assert needed <= scale_blocks(sum(counts), len(counts)) <= needed + len(counts)


def bytes_of(*shape, dtype=torch.uint8):
    return torch.zeros(shape, dtype=torch.uint8).view(dtype)


def codes_of(*shape):
    """Scale factors of nvfp4."""
    return bytes_of(*shape, dtype=torch.float8_e4m3fn)


def fields(**changes):
    """Fields of a matrix [130, 64] in nvfp4, some of them changed."""
    return {
        "data": bytes_of(130, 32, dtype=torch.float4_e2m1fn_x2),
        "scales": codes_of(2 * 512),
        "encode_scale": torch.ones(1),
        "decode_scale": torch.ones(1),
        "fmt": "nvfp4",
    } | changes


EXPERTS = bytes_of(3, 130, 32, dtype=torch.float4_e2m1fn_x2)


def test_sizes_of_a_quantised_tensor():
    matrix = Quantized(**fields())
    assert (matrix.rows, matrix.k, matrix.nbytes) == (130, 64, 130 * 32 + 1024 + 8)
    experts = Quantized(**fields(data=EXPERTS, scales=codes_of(6 * 512)))
    assert (experts.rows, experts.k) == (130, 64)


def test_rows_by_expert_may_have_more_blocks():
    assert Quantized(**fields(scales=codes_of(5 * 512)))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"fmt": "fp4"}, ValueError, "format 'fp4'"),
        ({"data": None}, TypeError, "data is NoneType"),
        ({"data": bytes_of(130, 32)}, ValueError, "data is torch.uint8, expected .*float4"),
        ({"scales": bytes_of(1024)}, ValueError, "scales is torch.uint8, expected .*e4m3"),
        ({"data": EXPERTS[0, 0]}, ValueError, r"data has shape \(32,\)"),
        ({"scales": codes_of(512)}, ValueError, r"scales have shape \(512,\): 1-D, 1024 bytes"),
        ({"scales": codes_of(1025)}, ValueError, "512 for every 128 rows of K = 64"),
        ({"scales": codes_of(2, 512)}, ValueError, r"scales have shape \(2, 512\)"),
        ({"data": EXPERTS, "scales": codes_of(7 * 512)}, ValueError, "1-D, 3072 bytes"),
        ({"decode_scale": None}, ValueError, "nvfp4 has both global scales, not encode"),
        ({"encode_scale": torch.ones(2)}, ValueError, r"encode_.* has shape \(2,\), .* \(130,\)"),
        ({"encode_scale": torch.ones(130)}, ValueError, r"decode_.* \(1,\), .* encode_.* \(130,\)"),
        ({"decode_scale": torch.ones(1).half()}, ValueError, "decode_scale is torch.float16"),
        ({"decode_scale": torch.ones(1, device="meta")}, ValueError, "different devices"),
    ],
)
def test_what_a_quantised_tensor_refuses(changes, error, message):
    with pytest.raises(error, match=message):
        Quantized(**fields(**changes))


def test_no_global_scale_where_the_format_has_none():
    plain = {
        "data": bytes_of(130, 64, dtype=torch.float8_e4m3fn),
        "scales": bytes_of(1024, dtype=torch.float8_e8m0fnu),
        "fmt": "mxfp8",
    }
    assert Quantized(**fields(**plain, encode_scale=None, decode_scale=None)).k == 64
    with pytest.raises(ValueError, match="mxfp8 has no global scale, not decode_scale"):
        Quantized(**fields(**plain, encode_scale=None))
