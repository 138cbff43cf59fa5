"""`python -m ptxemu`: run, check, compare, dump or mutate a CuTe DSL script without a GPU.

`python -m ptxemu script.py` runs it, as `python -m ptxemu run script.py` does.
"""

from __future__ import annotations

import sys
from importlib import import_module

PROGRAM = "python -m ptxemu"
COMMANDS = {
    "run": "run a script, with every launch emulated; this is the default command",
    "check": "find races, data never written, leaks and misused barriers in its kernels",
    "compare": "find where two runs, or a run and a reference, first differ, and what wrote there",
    "dump": "write PTX, machine code and launch shapes of its kernels",
    "mutate": "remove its synchronisation piece by piece, and test whether anything notices",
}


def main(arguments: list[str] | None = None) -> None:
    """Do what the words ask for; leaves by SystemExit unless the exit code is 0."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] in (["-h"], ["--help"]):
        print(overview())
        return
    named = words[:1] and words[0] in COMMANDS
    name, rest = (words[0], words[1:]) if named else ("run", words)
    command = import_module(f"ptxemu.commands.{name}")
    code = command.main(rest, f"{PROGRAM} {name}" if named else PROGRAM)
    if code:
        sys.exit(code)


def overview() -> str:
    """The commands, and the options of the one that may be left out."""
    from ptxemu.commands.run import parser_of

    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    _, _, options = parser_of(PROGRAM).format_help().partition("\n")
    return "\n".join((
        f"usage: {PROGRAM} [COMMAND] [options] SCRIPT [ARGUMENT ...]",
        "",
        *lines,
        "",
        f"`{PROGRAM} COMMAND --help` lists the options of a command. Give a path to a script with",
        f"the name of a command: `{PROGRAM} ./check`.",
        "",
        f"{PROGRAM} run: {options.strip()}",
    ))  # fmt: skip


if __name__ == "__main__":
    main()
