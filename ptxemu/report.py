"""Report of a launch, with its recording and its inspection, as text, HTML and JSON values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from html import escape
from typing import TYPE_CHECKING, Any

from ptxemu.findings import Launch, Launches
from ptxemu.mangled import short

if TYPE_CHECKING:  # numpy comes with them, and `--help` does without
    from ptxemu.inspect.inspection import Inspection
    from ptxemu.record.recording import Recording

_LISTED = 20  # launches that a report lists one by one
_NOT_JSON = ("recording", "inspection")


@dataclass
class LaunchReport(Launch):
    """Report of a kernel launch: counts, findings, trace, and what options asked to keep.

    `print(report)` shows it for people, `to_json` for programs.
    """

    recording: Recording | None = None  # of `Options.record`
    inspection: Inspection | None = None  # what `Options.inspect` asked to see

    @classmethod
    def of(cls, launch: Launch, **more: Any) -> LaunchReport:
        """A launch with more that is known of it; counts and findings are shared."""
        known = {field.name: getattr(launch, field.name) for field in fields(launch)}
        return cls(**known | more)

    def __str__(self) -> str:
        """Geometry, counts, bytes of each path, then the findings grouped by cause."""
        return "\n".join(_told([self]))

    def _repr_html_(self) -> str:
        """Show the same text in a notebook."""
        return _html(str(self))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values by field name, with the findings; no timeline or recording."""
        launch: dict[str, Any] = Report([self]).to_json()["launches"][0]
        return launch


@dataclass
class Report(Launches[LaunchReport]):
    """All launches of one host call, in order. `print(report)` shows it, `to_json` exports it."""

    def __str__(self) -> str:
        """Each launch in a few lines, then all findings grouped by kernel and cause."""
        return "\n".join(_told(self.launches))

    def _repr_html_(self) -> str:
        """Show the same text in a notebook."""
        return _html(str(self))

    def to_json(self) -> dict[str, Any]:
        """Return the numbers of errors and notes, and every launch, as plain JSON values."""
        from ptxemu.check.text import document

        found = document(self)
        for launch in found["launches"]:
            for name in _NOT_JSON:
                launch.pop(name, None)
        return found


def _html(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _told(launches: list[LaunchReport]) -> Iterator[str]:
    from ptxemu.check.text import count, render

    for launch in launches[:_LISTED]:
        yield from _counts(launch)
    if len(launches) > _LISTED:
        yield f"and {count(len(launches) - _LISTED, 'more launch', 'more launches')}"
    if any(launch.options.check or launch.findings or launch.stopped for launch in launches):
        yield render(Report(launches))
    else:
        yield "not checked: Options(check=True) looks for races, overruns and the like"


def _counts(launch: LaunchReport) -> Iterator[str]:
    """Yield the geometry and what was counted, such as "  12 warp-instructions, 0.1 s"."""
    from ptxemu.check.text import count, cut

    dims = (f"{name} {_dims(getattr(launch, name))}" for name in ("grid", "block", "cluster"))
    yield f"{cut(short(launch.entry))}: {', '.join(dims)}"
    issued = f"{launch.warp_instructions:,} warp-instructions"
    yield f"  {issued} of {count(len(launch.by_warp), 'warp')} per CTA, {launch.seconds:.3g} s"
    moved = Counter({path: size for path, size in launch.bytes.items() if size})
    if moved:
        yield f"  bytes: {', '.join(f'{path} {size:,}' for path, size in moved.most_common())}"


def _dims(dims: tuple[int, int, int]) -> str:
    """ "64" or "(8, 4)": without trailing ones."""
    shown = dims[: max(index + 1 for index, side in enumerate(dims) if side > 1 or not index)]
    return str(shown[0]) if len(shown) == 1 else str(shown)
