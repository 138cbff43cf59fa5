"""The GPU that a process seems to have is the same for everybody who asks."""

from __future__ import annotations

import cuda.bindings.driver as driver
import cuda.bindings.runtime as runtime
import cutlass.utils as utils
import pytest
import torch

from ptxemu.host import gpus
from ptxemu.host.cuda_stubs import stubbed_cuda
from ptxemu.host.gpus import GPUS
from ptxemu.host.torch_shim import torch_without_gpu

SMEM = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


@pytest.mark.parametrize("name", GPUS)
def test_everybody_gets_the_same_answers(name):
    gpu = GPUS[name]
    with gpus.seeming(gpu), torch_without_gpu(), stubbed_cuda():
        seen = torch.cuda.get_device_properties("cuda")
        success = driver.CUresult.CUDA_SUCCESS
        assert torch.cuda.get_device_name() == seen.name == gpu.name
        assert torch.cuda.get_device_capability() == (seen.major, seen.minor) == gpu.capability
        assert driver.cuDeviceComputeCapability(0) == (success, *gpu.capability)
        assert driver.cuDeviceGetName(64, 0)[1].decode() == gpu.name
        assert torch.cuda.mem_get_info() == driver.cuMemGetInfo()[1:] == (gpu.memory_bytes,) * 2
        assert runtime.cudaMemGetInfo()[1] == seen.total_memory == gpu.memory_bytes
        hardware = utils.HardwareInfo()
        assert hardware.get_device_multiprocessor_count() == seen.multi_processor_count == gpu.sms
        assert hardware.get_l2_cache_size_in_bytes() == seen.L2_cache_size == gpu.l2_bytes
        assert driver.cuDeviceGetAttribute(SMEM, 0)[1] == seen.shared_memory_per_block_optin
        assert runtime.cudaDeviceGetAttribute(SMEM, 0)[1] == seen.shared_memory_per_block_optin
        properties = runtime.cudaGetDeviceProperties(0)[1]
        assert (properties.major, properties.minor) == gpu.capability
        assert properties.multiProcessorCount == gpu.sms


def test_shared_memory_is_that_of_the_architecture():
    wanted = {"a100": 163, "l40s": 99, "h100": 227, "b200": 227, "thor": 227, "rtx-5090": 99}
    assert {name: GPUS[name].attribute(97) for name in wanted} == {
        name: kib << 10 for name, kib in wanted.items()
    }
    assert GPUS["b200"].attribute(97, "sm_89") == 99 << 10
    assert GPUS["b200"].attribute(12345) is None


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("sm_80", "a100"),
        ("sm_89", "rtx-4090"),
        ("sm_90a", "h100"),
        ("sm_100a", "b200"),
        ("sm_100f", "b200"),
        ("sm_103a", "b300"),
        ("sm_110a", "thor"),
        ("sm_120a", "rtx-5090"),
        ("sm_121a", "spark"),
    ],
)
def test_an_architecture_stands_for_a_gpu(arch, name):
    assert gpus.chosen(None, {"CUTE_DSL_ARCH": arch}) == GPUS[name]
    assert gpus.chosen(GPUS[name], {"CUTE_DSL_ARCH": arch}) == GPUS[name]


def test_what_contradicts_itself_is_refused():
    assert gpus.chosen(None, {}) == GPUS["b200"]
    assert gpus.chosen(GPUS["b300"], {"CUTE_DSL_ARCH": "sm_100f"}) == GPUS["b300"]
    assert gpus.of_arch("sm_107a").capability == (10, 7)
    for gpu, arch in ((GPUS["b300"], "sm_100a"), (GPUS["h100"], "sm_80"), (None, "hopper")):
        with pytest.raises(ValueError, match="CUTE_DSL_ARCH"):
            gpus.chosen(gpu, {"CUTE_DSL_ARCH": arch})
    with pytest.raises(ValueError, match="must be one of a100, "):
        gpus.named("b100")
