"""The first step: `python -m kernelkit doctor`, and what a GPU's driver says of its limits."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kernelkit import doctor
from kernelkit.compile.arch import ARCH_OF_CAPABILITY
from kernelkit.plan import hw
from lab.bringup import gpu
from lab.bringup.steps import ANY

# CUdevice_attribute -> what we call it, and what `kernelkit.plan.hw` says of the architecture.
LIMITS = {
    "sms": 16, "l2_bytes": 38, "smem_bytes_per_sm": 81, "registers_per_sm": 82,
    "threads_per_sm": 39, "smem_bytes_per_cta": 97, "clock_khz": 13,
}  # fmt: skip
CLUSTERS = (1, 2, 4, 8, 16)


def limits() -> dict[str, Any]:
    """Limits of device 0, with how many clusters of each size run at the same time; empty without
    one."""
    from lab.silicon.units.launch import DriverError, Gpu

    try:
        device = Gpu()
    except DriverError:
        return {}
    found: dict[str, Any] = {name: device.attribute(number) for name, number in LIMITS.items()}
    found["clusters"] = {str(size): _clusters(size) for size in CLUSTERS}
    return found


def _clusters(size: int) -> int | str:
    """Return how many clusters of `size` CTAs fit at one CTA per SM, or why that is unknown."""
    import torch

    from kernelkit.compile.cuda import most_clusters

    try:
        with torch.cuda.device(0):
            return most_clusters(size)
    except Exception as error:  # noqa: BLE001  of the driver: the step goes on without
        return f"{type(error).__name__}: {error}"


def surprises(found: dict[str, Any], arch: str | None) -> list[str]:
    """List where the driver disagrees with `kernelkit.plan.hw`, which plans the kernels."""
    if not found or arch not in hw.SMS_OF:
        return []
    wanted = {"smem_bytes_per_cta": hw.smem_bytes_per_cta(arch),
              "smem_bytes_per_sm": hw.smem_bytes_per_sm(arch),
              "registers_per_sm": hw.REGISTERS_PER_SM}  # fmt: skip
    return [
        f"{name} is {found[name]}, kernelkit.plan.hw has {value}"
        for name, value in wanted.items()
        if found[name] != value
    ]


def main() -> int:
    """Print the report; exit code 1 where something is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = doctor.report()
    found["limits"] = limits()
    first = next(iter(found.get("gpus", ())), None)
    arch = first and first["arch"]
    found["surprises"] = surprises(found["limits"], arch)
    found["state"] = gpu.state(ANY)
    found["compiled_for"] = sorted(set(ARCH_OF_CAPABILITY.values()))
    print("\n".join(doctor.lines(found)))
    print("\n".join(f"UNEXPECTED: {words}" for words in found["surprises"]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if found["problems"] or found["surprises"] else 0


if __name__ == "__main__":
    sys.exit(main())
