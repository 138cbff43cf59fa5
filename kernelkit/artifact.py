"""One compiled kernel as bytes: host code with the cubin in it, PTX, how to call it.

Eight letters, the SHA-256 of what follows, and a zip archive of three members (which `unzip` reads
in spite of what is before it). It loads without the DSL.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass, field
from typing import Any

FORMAT = 2  # another one is not read
_MAGIC = b"BWKERNEL"
_HEADER = len(_MAGIC) + hashlib.sha256().digest_size
_MANIFEST, _HOST, _PTX = "manifest.json", "host.o", "kernel.ptx"
_FATBIN_MAGIC = b"\x50\xed\x55\xba"
_ELF_MAGIC = b"\x7fELF"


class ArtifactError(ValueError):
    """Bytes that are no artefact, are damaged, or are of another format."""


@dataclass(frozen=True)
class Artifact:
    """What compiling one kernel for one architecture gave.

    function: name of the host function. host: its code, a relocatable x86-64 object that holds the
    cubin. signature: of `kernelkit.signature`, as JSON. about: where it came from, for people and
    for `kernelkit.aot`.
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
            raise ArtifactError("damaged, or no artefact")
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            manifest = json.loads(archive.read(_MANIFEST))
            if manifest["format"] != FORMAT:
                raise ArtifactError(f"of format {manifest['format']}, this version reads {FORMAT}")
            host, ptx = archive.read(_HOST), archive.read(_PTX).decode()
        names = ("function", "arch", "signature", "about")
        function, arch, signature, about = (manifest[name] for name in names)
        return cls(function, arch, ptx, host, signature, about)


def cubin_in(binary: bytes) -> bytes:
    """The cubin of what the DSL embeds in host code: it, or a fatbin with it alone."""
    if not binary.startswith(_FATBIN_MAGIC):
        return binary
    start = binary.find(_ELF_MAGIC)
    # Behind a header of 16 bytes comes that of the one entry, whose size of data is at 8.
    size = int.from_bytes(binary[24:32], "little")
    return b"" if start < 0 else binary[start : start + size]
