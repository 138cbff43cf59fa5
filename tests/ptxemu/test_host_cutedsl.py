"""Launch capture: small DSL kernels, with their host code run into a recording launcher."""

import gc
import struct
import weakref

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream, make_ptr

from ptxemu.host import cutedsl, engine
from ptxemu.host.device_view import DeviceView, cpu_as_device
from ptxemu.host.interception import intercepted
from ptxemu.host.runtime_symbols import UnsupportedRuntimeCall

THREADS = 128
FFI = "--enable-tvm-ffi"


@cute.kernel
def scale_kernel(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32):
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if i < cute.size(x):
        y[i] = x[i] * factor


@cute.jit
def scale(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, stream):
    grid = (cute.ceil_div(cute.size(x), THREADS), 1, 1)
    scale_kernel(x, y, factor).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


@cute.jit
def scale_twice(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, stream):
    scale_kernel(x, y, factor).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)
    scale_kernel(y, x, factor).launch(
        grid=(2, 1, 1), block=(THREADS, 1, 1), cluster=(2, 1, 1), smem=2048, use_pdl=True
    )


@cute.kernel
def describe_kernel(atom: cute.CopyAtom, source: cute.Tensor):
    cpasync.prefetch_descriptor(atom)


@cute.jit
def describe(source: cute.Tensor):
    layout = cute.make_layout((32, 64), stride=(64, 1))
    atom, tensor = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), source, layout, (32, 64)
    )
    describe_kernel(atom, tensor).launch(grid=(1, 1, 1), block=(32, 1, 1))


@cute.kernel
def read_kernel(pointer: cute.Pointer, count: cutlass.Int32):
    values = cute.make_tensor(pointer, cute.make_layout(count))
    values[0] = count


@cute.jit
def read(pointer: cute.Pointer, count: cutlass.Int32):
    read_kernel(pointer, count).launch(grid=(1, 1, 1), block=(32, 1, 1))


@cute.jit
def only_host(number: cutlass.Int32):
    cute.printf("")


def arguments():
    """Arguments of `scale`: vectors of any length, a factor, a stream."""
    n = cute.sym_int()
    x, y = (make_fake_compact_tensor(cutlass.Float32, (n,)) for _ in range(2))
    return x, y, 1.0, make_fake_stream()


def compile_scale(options="", function=scale):
    return cutedsl.compile(function, *arguments(), options=options)


@pytest.fixture(scope="module")
def plain():
    return compile_scale()


@pytest.fixture(scope="module")
def ffi():
    pytest.importorskip("tvm_ffi")
    return compile_scale(FFI)


@pytest.fixture
def vectors():
    return torch.arange(300.0), torch.zeros(300)


STREAM = driver.CUstream(0)


def record(compiled, *args):
    return cutedsl.run(compiled, *args, launcher=lambda request: request)


def pointer_of(parameter):
    return struct.unpack_from("<Q", parameter)[0]


def check_scale(request, x, y, factor):
    assert request.grid == (3, 1, 1)
    assert request.block == (THREADS, 1, 1)
    assert request.cluster is None
    assert f".entry {request.entry}(" in request.ptx
    assert ".target sm_100a" in request.ptx
    source, target, scalar = request.params
    assert pointer_of(source) == x.data_ptr()
    assert pointer_of(target) == y.data_ptr()
    assert struct.unpack("<f", scalar) == (factor,)


def test_tensors_passed_directly(plain, vectors):
    (request,) = record(plain, *vectors, 2.5, STREAM)
    check_scale(request, *vectors, 2.5)


def test_dsl_tensors(plain, vectors):
    x, y = (from_dlpack(vector).mark_layout_dynamic() for vector in vectors)
    (request,) = record(plain, x, y, 0.5, STREAM)
    check_scale(request, *vectors, 0.5)


def test_pointers_and_integers():
    buffer = np.zeros(8, np.int32)
    gmem = cute.AddressSpace.gmem
    compiled = cutedsl.compile(read, make_ptr(cutlass.Int32, 0, gmem), 1)
    (request,) = record(compiled, make_ptr(cutlass.Int32, buffer.ctypes.data, gmem), 7)
    assert pointer_of(request.params[0]) == buffer.ctypes.data
    assert struct.unpack("<i", request.params[1]) == (7,)


def test_several_launches_and_their_attributes(vectors):
    compiled = compile_scale(function=scale_twice)
    first, second = record(compiled, *vectors, 1.0, STREAM)
    assert pointer_of(first.params[0]) == pointer_of(second.params[1]) == vectors[0].data_ptr()
    assert (first.grid, second.grid) == ((1, 1, 1), (2, 1, 1))
    assert (first.cluster, second.cluster) == (None, (2, 1, 1))
    assert (first.smem_bytes, second.smem_bytes) == (0, 2048)
    assert (first.attributes.pdl, second.attributes.pdl) == (False, True)


def test_host_code_without_kernels():
    assert record(cutedsl.compile(only_host, 3), 4) == []


def test_tensor_maps():
    source = torch.zeros(96, 128, dtype=torch.float16)
    compiled = cutedsl.compile(describe, from_dlpack(source, assumed_align=16))
    (request,) = record(compiled, from_dlpack(source, assumed_align=16))
    (tensor_map,) = (p for p in request.params if len(p) == 128)
    words = struct.unpack("<32I", tensor_map)
    assert pointer_of(tensor_map) == source.data_ptr()
    assert words[8:10] == (128 - 1, 96 - 1)


def test_tvm_ffi(ffi, vectors):
    for _ in range(2):
        (request,) = record(ffi, *vectors, 1.5, 0)
        check_scale(request, *vectors, 1.5)


def test_tvm_ffi_with_numpy_and_dsl_tensors(ffi, vectors):
    x, y = vectors
    (request,) = record(ffi, x.numpy(), from_dlpack(y, enable_tvm_ffi=True), 1.5, 0)
    check_scale(request, x, y, 1.5)


def test_tvm_ffi_checks_its_arguments(ffi, vectors):
    with pytest.raises(TypeError, match="float"):
        record(ffi, *vectors, "two", 0)
    assert len(record(ffi, *vectors, 2.0, 0)) == 1


def test_tvm_ffi_by_its_handle(ffi, vectors, tmp_path):
    """Other languages call it this way; libraries that keep their exports work without it."""
    import tvm_ffi

    requests = []
    with intercepted(requests.append):
        compiled = compile_scale(FFI)
        tvm_ffi.convert(compiled)(*(DeviceView(each) for each in vectors), 1.5, 0)
        with pytest.raises(RuntimeError, match="has no PTX"):
            compiled.export_to_c(str(tmp_path / "kernel.o"), "scale")
        with pytest.raises(RuntimeError, match="has no PTX"):
            compile_scale("").export_to_c(str(tmp_path / "plain.o"), "scale")
        with pytest.raises(RuntimeError, match=r"kernel\.o cannot be loaded"):
            cute.runtime.load_module(str(tmp_path / "kernel.o"))
    check_scale(requests[0], *vectors, 1.5)


class LaunchFailed(Exception):
    """Raised by the failing launcher."""


@pytest.mark.parametrize("options", ["plain", "ffi"])
def test_an_exception_of_the_launcher_leaves_unchanged(options, vectors, request):
    compiled = request.getfixturevalue(options)
    error = LaunchFailed("mine")

    def fail(_):
        raise error

    stream = STREAM if options == "plain" else 0
    for _ in range(2):
        with pytest.raises(LaunchFailed) as caught:
            cutedsl.run(compiled, *vectors, 1.0, stream, launcher=fail)
        assert caught.value is error
    assert len(record(compiled, *vectors, 1.0, stream)) == 1


def test_nothing_is_launched_after_an_exception(vectors):
    compiled = compile_scale(function=scale_twice)
    seen = []

    def fail(request):
        seen.append(request)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cutedsl.run(compiled, *vectors, 1.0, STREAM, launcher=fail)
    assert len(seen) == 1


def test_missing_ptx(vectors):
    compiled = cute.compile(scale, *arguments())
    with pytest.raises(ValueError, match="--keep-ptx"):
        record(compiled, *vectors, 1.0, STREAM)


def test_ptx_that_is_a_path(plain, vectors, tmp_path, monkeypatch):
    dump = tmp_path / "kernel.ptx"
    dump.write_text(plain.artifacts.PTX)
    monkeypatch.setattr(plain.artifacts, "PTX", str(dump))
    assert engine.ptx_of(plain) == dump.read_text()


def test_compiled_by_the_dsl_itself(vectors, tmp_path):
    options = f"--gpu-arch sm_100a --keep-ptx --dump-dir {tmp_path}"
    compiled = cute.compile(scale, *arguments(), options=options)
    (request,) = record(compiled, *vectors, 1.0, STREAM)
    check_scale(request, *vectors, 1.0)


def test_options_of_the_caller_win(vectors, tmp_path):
    compiled = compile_scale(f"--opt-level 1 --dump-dir {tmp_path}")
    assert [path.suffix for path in tmp_path.iterdir()] == [".ptx"]
    assert len(record(compiled, *vectors, 1.0, STREAM)) == 1


def test_programs_are_cached_and_do_not_keep_the_function_alive(vectors):
    compiled = compile_scale()
    record(compiled, *vectors, 1.0, STREAM)
    assert engine.host_program(compiled) is engine.host_program(compiled)
    references = weakref.ref(compiled), weakref.ref(engine.host_program(compiled))
    del compiled
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_a_runtime_symbol_that_is_not_emulated():
    from ptxemu.host.runtime_symbols import Run, RuntimeSymbols

    symbols = RuntimeSymbols("")
    symbols.bind(["_cudaStreamAddCallback", "printf"])
    assert list(symbols._callbacks) == ["_cudaStreamAddCallback"]
    with pytest.raises(UnsupportedRuntimeCall, match="_cudaStreamAddCallback"), Run(print):
        assert symbols._callbacks["_cudaStreamAddCallback"]() != 0


def attributes_of_the_dsl():
    from cutlass.cute.runtime import _Tensor
    from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

    return [dict(vars(owner)) for owner in (_Tensor, CutlassBaseDSL, cute.runtime)]


def test_nothing_stays_patched(vectors):
    before = attributes_of_the_dsl()
    x, y = map(from_dlpack, vectors)
    compiled = cutedsl.compile(scale, x, y, 1.0, STREAM)
    assert "gmem" in compiled.artifacts.PTX
    assert x.memspace == from_dlpack(vectors[0]).memspace == cute.AddressSpace.generic
    with pytest.raises(Exception, match="argument `y` is missing"):
        cutedsl.compile(scale, x)
    assert attributes_of_the_dsl() == before


def test_cpu_as_device(vectors):
    with cpu_as_device():
        x = from_dlpack(vectors[0])
    assert x.memspace == cute.AddressSpace.gmem
    assert x.iterator._pointer == vectors[0].data_ptr()
