"""Version of the installed package, defined in pyproject.toml."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("blackwell-kernels")
except PackageNotFoundError:
    __version__ = "0+checkout"  # on the path of a process, and not installed
