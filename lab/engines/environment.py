"""`Environment`: a virtual environment with the Python files of vLLM and of SGLang.

The engines come without their compiled extensions; `harness` has Python in place of the few
operators that a CPU worker needs. `requirements.txt` pins every package, also where an engine asks
for another version: `OVERRIDDEN` lists these.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from zipfile import ZipFile

from lab.house.source import ROOT

HERE = Path(__file__).parent
FOLDER = ROOT / "out" / "engines"
VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}
# What the engines pin, and what is installed instead, with the reason.
OVERRIDDEN = {
    "torch==2.14.0": "2.13.0: the newest version with which all kernels were tested on a CPU",
    "torchvision==0.29.0": "0.28.0: the one for this torch",
    "flashinfer-python, tilelang, quack-kernels, humming-kernels, tokenspeed-mla, sgl-kernel": (
        "absent: kernels of others for GPUs"
    ),
    "torchaudio, torchcodec, opencv-python-headless, PyNvVideoCodec": "absent: sound and pictures",
    "instanttensor, fastsafetensors, nvidia-cudnn-frontend": "absent: they load weights to GPUs",
}
ENTRY_POINTS = """\
[vllm.platform_plugins]
emulated = lab.engines.harness.vllm_plugin:platform

[vllm.general_plugins]
blackwell_harness = lab.engines.harness.observe:install
emulated_operators = lab.engines.harness.vllm_plugin:operators

[sglang.srt.plugins]
blackwell_harness = lab.engines.harness.observe:install
"""
# part of the environment -> what it is made from
PARTS = {"venv": ("requirements.txt",), "models": ("models.py", "quantised.py")}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Environment:
    """An environment of engines.

    folder: holds the environment, models, caches and logs
    versions: version of each engine
    """

    folder: Path = FOLDER
    versions: dict[str, str] = field(default_factory=lambda: dict(VERSIONS))

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def models(self) -> Path:
        return self.folder / "models"

    @cached_property
    def site(self) -> Path:
        """The folder of installed packages."""
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return Path(subprocess.check_output([self.python, "-c", code], text=True).strip())

    def variables(self) -> dict[str, str]:
        """Variables of a process there: caches of its own, no network, one thread."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        folders = {
            "BLACKWELL_KERNELS_CACHE": "kernels", "PTXEMU_CACHE": "programs",
            "VLLM_CACHE_ROOT": "vllm/cache", "VLLM_CONFIG_ROOT": "vllm/config",
            "XDG_CACHE_HOME": "cache", "HF_HOME": "huggingface",
        }  # fmt: skip
        kept |= {name: str(self.folder / place) for name, place in folders.items()}
        once = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "DO_NOT_TRACK",
                "VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # fmt: skip
        kept |= dict.fromkeys(once, "1")
        return kept | {"TOKENIZERS_PARALLELISM": "false"}

    def is_built(self) -> bool:
        """Whether `build` finished with the same versions, requirements and models."""
        return self.stamps() == {name: self._written(name) for name in PARTS}

    def stamps(self) -> dict[str, str]:
        """A digest of what each part is made from."""
        texts = {
            name: [(HERE / file).read_text(encoding="utf-8") for file in files]
            for name, files in PARTS.items()
        }
        texts["venv"] += [ENTRY_POINTS, *map(str, self.versions.items())]
        return {
            name: hashlib.sha256("\n".join(text).encode()).hexdigest()
            for name, text in texts.items()
        }

    def _written(self, part: str) -> str:
        stamp = self.folder / f"{part}.stamp"
        return stamp.read_text(encoding="utf-8") if stamp.exists() else ""

    def build(self, say: Say = print) -> None:
        """Create the environment and the models, each unless it is there.

        Raises:
            subprocess.CalledProcessError: if pip fails; its output is on the terminal.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        makers = {"venv": self._make_venv, "models": self._make_models}
        for part, stamp in self.stamps().items():
            if self._written(part) != stamp:
                shutil.rmtree(self.folder / part, ignore_errors=True)
                makers[part](say)
                (self.folder / f"{part}.stamp").write_text(stamp, encoding="utf-8")

    def _make_venv(self, say: Say) -> None:
        say(f"{self.folder}: an environment of its own, about 2.3 GB and some minutes")
        subprocess.run([sys.executable, "-m", "venv", self.folder / "venv"], check=True)
        self._install(say)
        self._add_harness()

    def _make_models(self, say: Say) -> None:
        say("tiny models of random weights")
        command = [self.python, "-m", "lab.engines.models", self.models]
        subprocess.run(command, check=True, env=self.variables(), cwd=ROOT)

    def _install(self, say: Say) -> None:
        pinned = HERE / "requirements.txt"
        torch = next(
            line for line in pinned.read_text("utf-8").splitlines() if line.startswith("torch=")
        )
        say(torch)
        self._pip("install", torch)
        say("what the engines import")
        self._pip("install", "--no-deps", "--requirement", pinned)
        self._pip("install", "--no-deps", "--editable", ROOT / "ptxemu", "--editable", ROOT)
        for name, version in self.versions.items():
            say(f"{name} {version}: its Python files")
            with tempfile.TemporaryDirectory() as place:
                self._pip("download", "--no-deps", "--dest", place, f"{name}=={version}")
                unpack(next(Path(place).glob("*.whl")), self.site)

    def _pip(self, *words: object) -> None:
        command = [self.python, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
        command[5:5] = ["--quiet", "--no-compile"] if words[0] == "install" else ["--quiet"]
        subprocess.run(command, check=True, cwd=ROOT)

    def _add_harness(self) -> None:
        """Add the entry points of `harness`, a module in place of sgl_kernel, and empty the one
        file of torchvision that wants its CUDA operators."""
        about = self.site / "blackwell_harness-1.dist-info"
        about.mkdir()
        metadata = "Metadata-Version: 2.1\nName: blackwell-harness\nVersion: 1\n"
        (about / "METADATA").write_text(metadata, encoding="utf-8")
        (about / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
        (self.site / "torchvision" / "_meta_registrations.py").write_text("", encoding="utf-8")


def unpack(wheel: Path, site: Path) -> None:
    """Unpack a wheel into `site`, except for vLLM's compiled extensions (1 GB of CUDA)."""
    with ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not (name.startswith("vllm/") and name.endswith(".so")):
                archive.extract(name, site)
