"""Named shared-memory buffers in order, with alignment and aliases, checked against a limit."""

from __future__ import annotations

from dataclasses import dataclass

from kernelkit.plan import hw


@dataclass(frozen=True)
class SmemBuffer:
    """`stages` copies of `stage_bytes` bytes, aligned to `align` bytes.

    over: the buffer at whose start it lies; that one and those behind it are dead when it is
    written, so it may reach into them, but not beyond the last.
    """

    name: str
    stage_bytes: int
    stages: int = 1
    align: int = hw.SMEM_SWIZZLE_ALIGN
    over: str | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all stages."""
        return self.stage_bytes * self.stages


@dataclass(frozen=True)
class SmemPlan:
    """Buffers in the order in which the kernel allocates them. limit: bytes that a CTA may have."""

    buffers: tuple[SmemBuffer, ...]
    limit: int = hw.SMEM_BYTES_PER_CTA

    def offsets(self) -> dict[str, tuple[int, int]]:
        """name -> [begin, end) in bytes from the start of the CTA's dynamic shared memory."""
        ranges: dict[str, tuple[int, int]] = {}
        cursor = 0
        for buffer in self.buffers:
            if buffer.over is not None:
                begin = ranges[buffer.over][0]
                ranges[buffer.name] = (begin, begin + buffer.bytes)
                continue
            begin = -(-cursor // buffer.align) * buffer.align
            cursor = begin + buffer.bytes
            ranges[buffer.name] = (begin, cursor)
        return ranges

    @property
    def bytes(self) -> int:
        """Bytes in all, with the gaps that alignment leaves."""
        return max((end for _, end in self.offsets().values()), default=0)

    def check(self) -> None:
        """Raise ValueError for what exceeds a CTA's shared memory or the buffers it aliases."""
        if self.bytes > self.limit:
            sizes = ", ".join(f"{b.name} {b.stages} x {b.stage_bytes}" for b in self.buffers)
            raise ValueError(f"{self.bytes} bytes of shared memory ({sizes}), limit {self.limit}")
        ranges = self.offsets()
        own = max((ranges[b.name][1] for b in self.buffers if b.over is None), default=0)
        for buffer in self.buffers:
            if ranges[buffer.name][1] > own:
                raise ValueError(
                    f"{buffer.name} over {buffer.over} ends at {ranges[buffer.name][1]}, "
                    f"after the last buffer at {own}"
                )
