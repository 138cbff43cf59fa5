"""Line information: the `.file` and `.loc` directives of PTX that was compiled with it.

See the PTX ISA's "Debugging Directives". A `.loc` holds from where it stands to the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Place = tuple[int, ...]  # file number, line, column


@dataclass(frozen=True)
class Location:
    """A place in a source file; `caller` is the place of the call that was inlined there.

    `files` is the module's table, which a compiler writes behind the code.
    """

    place: Place
    files: dict[int, str] = field(repr=False, compare=False)
    caller: Location | None = None

    def __str__(self) -> str:
        """ "path:line", the path as the compiler wrote it."""
        file, line, *_ = self.place
        return f"{self.files.get(file, f'file {file}')}:{line}"

    def frames(self) -> list[str]:
        """This place, then the calls around it, from the inside out."""
        return [str(self), *(self.caller.frames() if self.caller else ())]


class LineInfo:
    """Keeps the location that holds where the parser is."""

    def __init__(self, files: dict[int, str]) -> None:
        self._files = files
        self._known: dict[Place, Location] = {}
        self.here: Location | None = None

    def enter_function(self) -> None:
        """No location reaches from one function into the next."""
        self._known.clear()
        self.here = None

    def loc(self, words: Sequence[str]) -> None:
        """`.loc file line column[, function_name label[, inlined_at file line column]]`.

        The place of a call names its own caller where it was a location before. Line 0 is code
        that the compiler made up; it counts as belonging to the place before. So does column 0,
        where no statement of a function is: the DSL gives it, with the line of the function or the
        one behind it, to stores whose own place it has lost.
        """
        caller = None
        if "inlined_at" in words:
            at = words.index("inlined_at") + 1
            place = _place(words[at : at + 3])
            caller = self._known.get(place) or Location(place, self._files)
        place = _place(words[1:4])
        lost = len(place) > 2 and not place[2] and self.here is not None
        if place[1] and not (lost and caller is None):
            self.here = self._known[place] = Location(place, self._files, caller)


def _place(words: Sequence[str]) -> Place:
    return tuple(int(word) for word in words)
