"""A compiled kernel as bytes: host code with the cubin in it, PTX, signature.

The bytes are eight letters, the SHA-256 of the rest, and a zip archive of three members (which
`unzip` can read despite the prefix). It loads without the DSL.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from typing import Any

from kernelkit.compile.outside import json_of, require_fields

FORMAT = 2  # another one is not read
_MAGIC = b"BWKERNEL"
_HEADER = len(_MAGIC) + hashlib.sha256().digest_size
_MANIFEST, _HOST, _PTX = "manifest.json", "host.o", "kernel.ptx"
_FATBIN_MAGIC = b"\x50\xed\x55\xba"
_ELF_MAGIC = b"\x7fELF"


MOST_BYTES = 256 << 20  # of a member
_FIELDS = {"function": str, "arch": str, "signature": list, "about": dict}
# What zipfile raises for archives that are damaged on purpose.
_FAILURES = (ValueError, LookupError, EOFError, OSError, RuntimeError, ArithmeticError)


class ArtifactError(ValueError):
    """Bytes that are no artefact, are damaged, or are of another format."""


@dataclass(frozen=True)
class Artifact:
    """Result of compiling one kernel for one architecture.

    function: name of the host function
    host: its code, a relocatable x86-64 object that holds the cubin
    signature: signature of `kernelkit.compile.signature`, as JSON
    about: origin, for people and for `kernelkit.compile.aot`
    """

    function: str
    arch: str
    ptx: str
    host: bytes
    signature: list[dict[str, Any]]
    about: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Equal artefacts give equal bytes."""
        manifest = {
            "format": FORMAT,
            "function": self.function,
            "arch": self.arch,
            "signature": self.signature,
            "about": self.about,
        }
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=3) as archive:
            for name, content in (
                (_MANIFEST, json.dumps(manifest, indent=1).encode()),
                (_HOST, self.host),
                (_PTX, self.ptx.encode()),
            ):
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
        content = stream.getvalue()
        return _MAGIC + hashlib.sha256(content).digest() + content

    @classmethod
    def from_bytes(cls, data: bytes) -> Artifact:
        """Raises ArtifactError where the bytes are not what `to_bytes` wrote."""
        content = data[_HEADER:]
        if data[:_HEADER] != _MAGIC + hashlib.sha256(content).digest():
            raise ArtifactError("damaged, or not an artefact")
        try:
            manifest, host, ptx = _members(content)
        except ArtifactError:
            raise
        except (*_FAILURES, zipfile.BadZipFile, zlib.error, struct.error) as error:
            raise ArtifactError(f"damaged: {type(error).__name__} {error}") from error
        return cls(ptx=ptx, host=host, **{name: manifest[name] for name in _FIELDS})


def _members(content: bytes) -> tuple[dict[str, Any], bytes, str]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        manifest = json_of(_member(archive, _MANIFEST), _MANIFEST)
        require_fields(_MANIFEST, manifest, {"format": int})
        if manifest["format"] != FORMAT:
            raise ArtifactError(f"of format {manifest['format']}, this version reads {FORMAT}")
        require_fields(_MANIFEST, manifest, _FIELDS)
        return manifest, _member(archive, _HOST), _member(archive, _PTX).decode()


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a member's content; ArtifactError above MOST_BYTES, whatever size the archive
    declares."""
    with archive.open(name) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ArtifactError(f"damaged: {name} has more than {MOST_BYTES} bytes")
    return content


def cubin_in(binary: bytes) -> bytes:
    """The cubin of what the DSL embeds in host code: it, or a fatbin with it alone."""
    if not binary.startswith(_FATBIN_MAGIC):
        return binary
    start = binary.find(_ELF_MAGIC)
    # Behind a header of 16 bytes comes that of the one entry, whose size of data is at 8.
    size = int.from_bytes(binary[24:32], "little")
    return b"" if start < 0 else binary[start : start + size]
