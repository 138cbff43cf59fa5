#!/usr/bin/env bash
# SGLang 0.5.23 reads the scales of an FP8 cache from --quantization-param-path into one of two fields; kernels read both.
#
# A layer of attention keeps a scale twice: k_scale, by which K is divided when it is written to the pool, and
# k_scale_float, which attention multiplies by when it reads. Checkpoints with scales set k_scale to a tensor and
# k_scale_float to a number. The function behind --quantization-param-path (LlamaModel.load_kv_cache_scales) sets k_scale
# to a float and leaves k_scale_float at None. Backends that read k_scale_float treat None as 1, so that a cache is
# written with the file's scale and read without it; a backend that expands k_scale to a tensor of heads gets an
# AttributeError. A file that does not exist is only logged, and the scales stay as they were.
#
# sglang-kernel has no build for CPUs; a module with its name, whose functions are never called here, replaces it.
#
# Output seen on 2026-11-29:
#   0.5.23 k_scale 0.03 (float), k_scale_float None; expand: 'float' object has no attribute 'expand'
#   after a file that does not exist: k_scale 0.03
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip() {
    "$work/env/bin/python" -m pip install --quiet --no-compile "$@" 2>"$work/pip.log" || { cat "$work/pip.log"; exit 2; }
}
pip torch==2.13.0 transformers==5.20.2 numpy==2.3.5 compressed-tensors==0.17.0 gguf==0.19.0 soundfile==0.14.0 \
    mistral_common==1.13.1 aiohttp==3.14.5 starlette==1.10.0 python-multipart==0.0.34 IPython==9.18.1 orjson==3.13.0 \
    msgspec==0.23.0 psutil==7.2.2 pybase64==1.5.1 pyzmq==27.3.0 sentencepiece==0.2.3 tiktoken==0.14.0 zstandard==0.25.0 \
    dill==0.4.1 triton==3.9.0 apache-tvm-ffi==0.1.11 pillow==13.0.0 requests==2.34.2 einops==0.8.2 fastapi==0.136.3 \
    openai==3.57.0 partial-json-parser==0.2.1.1.post7 prometheus_client==0.26.0 setproctitle==1.3.8 loguru==0.7.3 torch==2.13.0
pip --no-deps sglang==0.5.23
site=$("$work/env/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
cat > "$site/sgl_kernel.py" <<'PY'
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__, __path__ = "0.4.10", []


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *rest, **named: None


class Finder:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def create_module(self, spec):
        made = ModuleType(spec.name)
        made.__getattr__ = __getattr__
        return made

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())
PY
cat > "$work/scales.py" <<'PY'
import json, sys
from importlib.metadata import version
from types import SimpleNamespace
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.models.llama import LlamaModel

layer = RadixAttention(4, 64, 0.125, num_kv_heads=2, layer_id=0)
scales = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.03}}}
with open(sys.argv[1], "w") as file:
    json.dump({"model_type": "llama", "kv_cache": scales}, file)
config = type("Config", (), {"model_type": "llama", "num_hidden_layers": 1})()
attention = SimpleNamespace(self_attn=SimpleNamespace(attn=layer))
model = SimpleNamespace(_kv_cache_parallel_layout=(0, 1), config=config, layers=[attention])
LlamaModel.load_kv_cache_scales(model, sys.argv[1])
try:
    layer.k_scale.expand((1, 2))
    said = "no error"
except AttributeError as error:
    said = str(error)
kind = type(layer.k_scale).__name__
print(f"{version('sglang')} k_scale {layer.k_scale} ({kind}), k_scale_float {layer.k_scale_float}; expand: {said}")
LlamaModel.load_kv_cache_scales(model, "absent.json")
print("after a file that does not exist: k_scale", layer.k_scale)
raise SystemExit(not (layer.k_scale == 0.03 and layer.k_scale_float is None and "expand" in said))
PY
SGLANG_USE_CPU_ENGINE=1 "$work/env/bin/python" "$work/scales.py" "$work/scales.json" 2>"$work/log" \
    || { code=$?; tail -5 "$work/log"; exit $code; }
