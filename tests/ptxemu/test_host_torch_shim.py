"""torch and cuda-bindings as on a machine with a GPU, temporarily and without a trace."""

from __future__ import annotations

import copy

import cuda.bindings.driver as driver
import cuda.bindings.runtime as runtime
import cutlass.cute as cute
import cutlass.testing
import cutlass.utils as utils
import numpy as np
import pytest
import torch

import ptxemu
from ptxemu import load
from ptxemu.host import gpus
from ptxemu.host.allocations import LIVE
from ptxemu.host.cuda_stubs import stubbed_cuda
from ptxemu.host.emulator import Emulator
from ptxemu.host.launch_config import LaunchAttributes, LaunchRequest
from ptxemu.host.marks import Marks
from ptxemu.host.patching import environment, patched
from ptxemu.host.torch_shim import BLOCK_BYTES, torch_without_gpu
from tests.ptxemu.kernels import kernel, launch


@pytest.fixture
def gpu():
    with torch_without_gpu(), stubbed_cuda():
        yield


@pytest.mark.usefixtures("gpu")
class TestDevices:
    def test_tensors_for_the_device_say_so(self):
        for device in ("cuda", "cuda:0", torch.device("cuda"), 0):
            x = torch.ones(2, device=device)
            assert x.device == torch.device("cuda", 0)
            assert x.is_cuda
            assert not x.is_cpu
            assert x.get_device() == 0
        assert torch.device("cuda").type == "cuda"
        assert repr(x.half()) == "tensor([1., 1.], device='cuda:0', dtype=torch.float16)"
        assert x.type() == "torch.cuda.FloatTensor"
        assert torch.ones(2, pin_memory=True).pin_memory().sum() == 2

    def test_other_tensors_say_cpu(self):
        for x in (torch.ones(2), torch.ones(2, device="cpu"), torch.ones(2, device="cuda").cpu()):
            assert x.device.type == "cpu"
            assert not x.is_cuda
            assert x.is_cpu
            assert repr(x) == "tensor([1., 1.])"

    @pytest.mark.parametrize(
        "make",
        [
            lambda x, y: x[0],
            lambda x, y: x.t().detach().data,
            lambda x, y: y + x,
            lambda x, y: torch.stack([y, x]),
            lambda x, y: x.half(),
            lambda x, y: torch.empty_like(x),
            lambda x, y: torch.empty(3, device=x.device),
            lambda x, y: x.new_zeros(3),
            lambda x, y: y.to(x),
            lambda x, y: copy.deepcopy(x),
            lambda x, y: torch.from_dlpack(x),
            lambda x, y: torch.nn.Linear(2, 2).cuda()(y),
            lambda x, y: torch.nn.Linear(2, 2, device="cuda").weight,
        ],
    )
    def test_what_is_made_of_them_says_so_too(self, make):
        x, y = torch.ones(2, 2, device="cuda"), torch.ones(2, 2)
        assert make(x, y).device == x.device

    def test_where_a_device_is_named(self):
        x = torch.ones(2, device="cuda")
        assert torch.zeros_like(x, device="cpu").is_cpu
        assert x.to(torch.ones(1)).is_cpu
        assert torch.empty_like(x, device="meta").is_meta
        assert x.to(x.device) is x
        assert x.cuda() is x
        assert x.to("cuda", torch.float32) is x
        with pytest.raises(RuntimeError, match="invalid device ordinal 1"):
            torch.ones(2, device="cuda:1")
        with pytest.raises(RuntimeError, match="invalid device ordinal 1"):
            torch.ones(2).cuda(1)

    def test_default_devices(self):
        with torch.device("cuda"):
            assert torch.zeros(3).is_cuda
            assert torch.zeros(3, device="cpu").is_cpu
        torch.set_default_device("cuda")
        try:
            assert torch.arange(3).is_cuda
        finally:
            torch.set_default_device(None)
        assert torch.arange(3).is_cpu

    def test_memory_of_the_host_is_copied_to_the_device(self):
        array = np.zeros(4)
        tensor = torch.as_tensor(array, device="cuda")
        tensor += 1
        assert tensor.is_cuda
        assert array.sum() == 0

    def test_marks_leave_with_their_storages(self):
        marks = Marks()
        for _ in range(3000):
            marks.add_tensors(torch.empty(1))
        kept = torch.empty(1)
        marks.add_tensors(kept)
        assert len(marks._marked) < 2000
        assert marks.holds(kept)

    @pytest.mark.parametrize(
        ("source", "move"),
        [
            ("cpu", torch.Tensor.cuda),
            ("cpu", lambda t: t.to(device="cuda")),
            ("cuda", torch.Tensor.cpu),
            ("cuda", lambda t: t.to("cpu")),
        ],
    )
    def test_transfers_copy(self, source, move):
        first = torch.zeros(4, device=source)
        moved = move(first)
        moved += 1
        assert first.sum() == 0
        assert moved.device.type != first.device.type

    def test_conversions_do_not_copy_needlessly(self):
        tensor = torch.zeros(4)
        assert tensor.to(torch.float32) is tensor

    def test_device_questions(self):
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_capability() == gpus.current().capability == (10, 0)
        assert torch.cuda.get_device_properties(0).multi_processor_count == 148
        assert torch.cuda.get_arch_list() == ["sm_100a"]
        assert not torch.cuda.is_current_stream_capturing()
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
        assert torch.cuda.current_stream().cuda_stream == 0
        with torch.cuda.stream(torch.cuda.Stream()):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event()
            start.record()
            assert start.elapsed_time(end) > 0

    def test_operators_for_cuda_devices(self):
        def half(x: torch.Tensor) -> torch.Tensor:
            assert x.is_cuda
            assert torch.empty(1, device=x.device).is_cuda
            return x / 2

        operator = torch.library.custom_op(
            "ptxemu_tests::half", half, mutates_args=(), device_types="cuda"
        )
        result = operator(torch.ones(2, device="cuda"))
        assert result.tolist() == [0.5, 0.5]
        assert result.is_cuda

    def test_operators_of_a_library_for_cuda(self):
        library = torch.library.Library("ptxemu_library", "DEF")
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: torch.empty(1, device="cuda") + 2 * x, "CUDA")
        assert torch.ops.ptxemu_library.twice(torch.ones(3, device="cuda")).is_cuda

    def test_backward_functions_see_the_device(self):
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return 2 * x

            @staticmethod
            def backward(ctx, gradient):
                assert gradient.is_cuda
                assert torch.empty(1, device="cuda").is_cuda
                return 2 * gradient

        x = torch.ones(3, device="cuda", requires_grad=True)
        Double.apply(x).sum().backward()
        assert x.grad.tolist() == [2, 2, 2]
        assert x.grad.is_cuda

    def test_generators(self):
        drawn = [
            torch.randn(2, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
            for _ in range(2)
        ]
        assert drawn[0].is_cuda
        assert drawn[0].equal(drawn[1])

    def test_files(self, tmp_path):
        torch.save(torch.ones(2), tmp_path / "ones.pt")
        assert torch.load(tmp_path / "ones.pt", map_location="cuda").is_cuda
        assert torch.load(tmp_path / "ones.pt").is_cpu

    def test_there_is_nothing_to_profile(self):
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
            profiler.step()
        assert profiler.key_averages().table(sort_by="cuda_time_total", row_limit=3) == ""

    def test_gradients(self):
        x = torch.ones(3, device="cuda", requires_grad=True)
        (x.cuda() * 2).sum().backward()
        assert x.grad.tolist() == [2, 2, 2]


@pytest.mark.usefixtures("gpu")
class TestGraphs:
    def captured(self):
        graph, x = torch.cuda.CUDAGraph(), torch.zeros(3, device="cuda")
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing()
            x += 1
            y = 2 * x
        return graph, x, y

    def test_captured_work_is_done_at_each_replay(self):
        graph, x, y = self.captured()
        assert x.tolist() == [0, 0, 0]
        graph.replay()
        graph.replay()
        assert x.tolist() == [2, 2, 2]
        assert y.tolist() == [4, 4, 4]
        x.fill_(10)
        graph.replay()
        assert y.tolist() == [22, 22, 22]

    def test_what_waits_for_the_device_is_refused(self):
        x = torch.zeros(3, device="cuda")
        with (
            pytest.raises(RuntimeError, match="capturing"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            x.sum().item()
        with pytest.raises(RuntimeError, match="without a finished capture"):
            torch.cuda.CUDAGraph().replay()

    def test_launches_are_recorded(self):
        emulator = Emulator(whole_process=True)
        x = torch.zeros(1, dtype=torch.int32, device="cuda")
        text = kernel("ld.param.u64 %rd1, [d];\nred.global.add.u32 [%rd1], 1;", ".param .u64 d")
        request = LaunchRequest(
            text, load(text).entries[0], (1, 1, 1), (1, 1, 1), None, 0,
            (x.data_ptr().to_bytes(8, "little"),), LaunchAttributes(),
        )  # fmt: skip
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
            assert emulator(request).warp_instructions == 0
            z = x + y
        assert x.item() == 0
        assert not emulator.report.launches
        graph.replay()
        graph.replay()
        assert [x.item(), y.item(), z.item()] == [2, 2, 4]
        assert len(emulator.report.launches) == 2


@pytest.mark.usefixtures("gpu")
class TestBlocks:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.empty(3, 5, dtype=torch.int8),
            lambda: torch.randn(7, device="cuda").to(torch.bfloat16),
            lambda: torch.arange(6).reshape(2, 3).t().contiguous(),
            lambda: torch.zeros(9).cuda(),
        ],
    )
    def test_new_tensors_are_whole_blocks(self, make):
        tensors = [make() for _ in range(8)]
        assert {tensor.data_ptr() % BLOCK_BYTES for tensor in tensors} == {0}
        blocks = {block.start: block for block in LIVE.known()}
        for tensor in tensors:
            block = blocks[tensor.data_ptr()]
            assert block.end - block.start == tensor.untyped_storage().nbytes() == tensor.nbytes
            assert block.last - block.start == BLOCK_BYTES

    def test_values_and_strides_survive(self):
        tensor = torch.arange(12).reshape(3, 4)
        assert tensor.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert torch.empty_strided((2, 3), (1, 2)).stride() == (1, 2)

    def test_views_stay_views(self):
        base = torch.zeros(4, 4)
        base.view(16)[5:7].fill_(1)
        torch.split(base, 2)[1].add_(2)
        assert base.sum() == 2 + 16

    def test_shared_memory_stays_shared(self):
        array = torch.zeros(5).numpy()
        torch.from_numpy(array).add_(1)
        assert array.sum() == 5


@pytest.mark.usefixtures("gpu")
class TestRedZones:
    """A requested size ends before its block does."""

    def launched(self, tensor, offset: int, line: str, **how):
        text = kernel(
            f"ld.param.u64 %rd1, [d];\nadd.u64 %rd1, %rd1, {offset};\n{line}", ".param .u64 d"
        )
        params = [tensor.data_ptr().to_bytes(8, "little")]
        return launch(text, params=params, allocated=LIVE, **how)

    STORE = "st.global.b32 [%rd1], 7;"
    LOAD = "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];"

    @pytest.mark.parametrize(
        ("offset", "line", "found"),
        [
            (396, STORE, []),
            (400, STORE, ["error"]),
            (508, STORE, ["error"]),
            (512, STORE, ["error"]),
            (-4, STORE, ["error"]),
            (384, LOAD, []),
            (400, LOAD, ["note"]),
            (496, LOAD, ["note"]),
        ],
    )
    def test_an_overrun_of_the_rounding_is_found(self, offset, line, found):
        tensor = torch.zeros(100, device="cuda")
        report = self.launched(tensor, offset, line, check=True)
        assert [finding.severity for finding in report.findings] == found
        assert tensor.count_nonzero() == (offset == 396)

    def test_without_a_check_the_block_is_the_allocation(self):
        tensor = torch.zeros(100, device="cuda")
        self.launched(tensor, 508, self.STORE)
        with pytest.raises(ptxemu.OutOfBounds, match="line"):
            self.launched(tensor, -4, self.STORE)

    def test_a_tensor_that_is_gone_is_nobodys(self):
        tensor = torch.zeros(1 << 22, device="cuda")
        self.launched(tensor, 0, self.STORE)
        address = tensor.data_ptr()
        del tensor

        class Gone:
            data_ptr = staticmethod(lambda: address)

        report = self.launched(Gone, 0, self.STORE, check=True)
        assert [finding.check for finding in report.errors] == ["out-of-bounds"]

    def test_what_cuda_malloc_gave(self):
        _, address = runtime.cudaMalloc(100)

        class Given:
            data_ptr = staticmethod(lambda: address)

        assert not self.launched(Given, 96, self.STORE, check=True).findings
        assert self.launched(Given, 100, self.STORE, check=True).errors
        runtime.cudaFree(address)
        assert self.launched(Given, 96, self.STORE, check=True).errors


@pytest.mark.usefixtures("gpu")
def test_cuda_answers():
    success = driver.CUresult.CUDA_SUCCESS
    assert driver.cuInit(0) == (success,)
    assert driver.cuDeviceGetCount() == (success, 1)
    warp_size = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_WARP_SIZE
    assert driver.cuDeviceGetAttribute(warp_size, 0) == (success, 32)
    _, address = runtime.cudaMalloc(100)
    assert address % 256 == 0
    assert runtime.cudaFree(address) == (runtime.cudaError_t.cudaSuccess,)
    assert utils.HardwareInfo().get_max_active_clusters(2) == 74
    assert cute.testing.benchmark(None) == cutlass.testing.benchmark(None) > 0


def test_nothing_stays():
    of_torch = (torch, torch._C, torch.cuda, torch.library, torch.profiler, torch.Tensor)
    owners = (*of_torch, driver, runtime, cutlass.testing, utils.HardwareInfo)
    before = [dict(vars(owner)) for owner in owners]
    with pytest.raises(KeyError), torch_without_gpu(), stubbed_cuda():
        raise KeyError
    assert [dict(vars(owner)) for owner in owners] == before
    assert not torch.ones(1).is_cuda


class Base:
    inherited = 1


class Target(Base):
    own = staticmethod(len)


def test_patched_restores_own_inherited_and_absent_attributes():
    before = dict(vars(Target))
    with patched(Target, {"own": 1, "inherited": 2, "absent": 3}):
        assert (Target.own, Target.inherited, Target.absent) == (1, 2, 3)
    assert dict(vars(Target)) == before
    assert Target.inherited == 1


def test_environment(monkeypatch):
    import os

    monkeypatch.setenv("PTXEMU_TEST_A", "old")
    with environment({"PTXEMU_TEST_A": "new", "PTXEMU_TEST_B": "b"}):
        assert (os.environ["PTXEMU_TEST_A"], os.environ["PTXEMU_TEST_B"]) == ("new", "b")
    assert os.environ["PTXEMU_TEST_A"] == "old"
    assert "PTXEMU_TEST_B" not in os.environ
