"""Version of the installed package, defined in the pyproject.toml of this folder."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("ptxemu")
except PackageNotFoundError:
    __version__ = "0+checkout"  # on the path of a process, and not installed
