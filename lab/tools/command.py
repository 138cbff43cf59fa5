"""A command that takes a name: `run.py gqa --kv-len 8k`; one table says what each name does.

Flags are known before anything heavy is imported: the module that does the work comes afterwards.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.tools.common import lacking, refuse

# Names of packages, and words for what they compute -> names of the tables.
ALSO = {
    "attention": "fmha", "gqa_lowlatency": "gqa", "decode": "gqa", "experts": "moe",
}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command.

    module: its `perform(options)` does the work and returns the exit code.
    flags: adds the flags.
    about: the help; its first line summarises the command.
    example: flags of a call worth trying.
    """

    module: str
    flags: Callable[[argparse.ArgumentParser], None]
    about: str
    example: str = ""

    @property
    def title(self) -> str:
        return self.about.partition("\n")[0]

    def parser(self, program: str) -> argparse.ArgumentParser:
        """program: as the usage line has it, 'run.py gqa'."""
        made = argparse.ArgumentParser(
            prog=program,
            description=self.about.replace("%", "%%"),
            epilog=f"example: python scripts/{program} {self.example}" if self.example else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.flags(made)
        return made

    def perform(self, options: argparse.Namespace) -> int:
        """Do what the flags request; return the exit code. Return REFUSED if memory is not
        enough, a file cannot be read or written, an optional package is not installed, or the
        file of --show has other contents."""
        try:
            return importlib.import_module(self.module).perform(options)
        except OSError as error:
            return refuse(error)
        except ImportError as error:
            if reason := lacking(error):
                return refuse(reason)
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if getattr(options, "show", None) is None:
                raise
            words = f"{type(error).__name__}: {error}"
            return refuse(
                f"{options.show}: not a file that this command writes with --json ({words})"
            )
        except MemoryError as error:
            return refuse(f"not enough memory: {error or 'of this machine'}")
        except RuntimeError as error:  # of torch, on the CPU and on a GPU
            words = str(error).partition("\n")[0]
            if "allocate memory" not in words and "out of memory" not in words:
                raise
            return refuse(f"not enough memory: {words}")

    def main(self, program: str, argv: Sequence[str] | None = None) -> int:
        """Flags of the command line, or of `argv`, and what they ask for."""
        parser = self.parser(program)
        options = parser.parse_args(argv)
        options.given = given(parser, argv)
        for action in parser._actions:  # argparse makes no value of `--flag=--`
            value = getattr(options, action.dest, None)
            if action.nargs is None and value == [] != action.default:
                parser.error(f"argument {'/'.join(action.option_strings)}: '--' is not a value")
        return self.perform(options)


def given(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> frozenset[str]:
    """The names of the options that the command line has, by default or not."""
    blank = argparse.Namespace(**{action.dest: None for action in parser._actions})
    found = vars(parser.parse_args(argv, blank))
    return frozenset(action.dest for action in parser._actions if found[action.dest] is not None)


def main_of(
    commands: Mapping[str, Command], text: str, argv: Sequence[str] | None = None, default: str = ""
) -> int:
    """Run the command that the first word of `argv` names, with the rest as its flags. The name
    may be one of ALSO.

    text: help of the command itself.
    default: the name if flags come first.
    """
    script = Path(sys.argv[0]).name
    words = [*(sys.argv[1:] if argv is None else argv)]
    if words[:1] in (["-h"], ["--help"]) or not (words or default):
        print(overview(script, commands, text))
        return 0 if words else 2
    name = words.pop(0) if not default or (words and not words[0].startswith("-")) else default
    name = name if name in commands else ALSO.get(name, name)
    if name not in commands:
        print(f"{script}: {name!r} is not one of {', '.join(commands)}", file=sys.stderr)
        return 2
    return commands[name].main(f"{script} {name}", words)


def overview(script: str, commands: Mapping[str, Command], text: str) -> str:
    """Return the names, and what each command does."""
    width = max(map(len, commands))
    lines = [f"  {name:<{width}}  {command.title}" for name, command in commands.items()]
    if also := [f"{other} for {name}" for other, name in ALSO.items() if name in commands]:
        lines += ["", f"Also accepted: {', '.join(also)}."]
    usage = f"usage: {script} NAME [FLAGS]; `{script} NAME --help` lists the flags"
    return "\n".join((usage, "", text.strip(), "", *lines))
