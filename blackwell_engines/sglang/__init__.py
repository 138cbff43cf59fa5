"""SGLang on these kernels; `register()` is the entry point of the plugin.

Written for the interface of SGLang 0.5.23. Nothing of it is imported before it calls `register`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAME = "blackwell_kernels"  # --attention-backend

# SGLang serves these with the backends of a list in its source; the masks and sinks that they need
# are those of these kernels, too.
LISTED = (
    "GptOssForCausalLM",
    "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration",
    "Exaone4ForCausalLM",
    "ExaoneMoEForCausalLM",
    "ExaoneMoeForCausalLM",
)
FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def register() -> None:
    """Tell SGLang of the backend `NAME`, which is then chosen by that name alone, for models of
    `LISTED`, too. Processes call it more than once.

    Raises:
        ImportError: where sglang is not installed, or has no registry of attention backends or no
            hooks for the steps that resolve its arguments.
    """
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in ATTENTION_BACKEND_CHOICES:
        ATTENTION_BACKEND_CHOICES.append(NAME)
        register_attention_backend(NAME)(create)
        register_resolution_hook("handle_model_specific_adjustments")(pass_lists)


def create(runner: Any) -> Any:
    """The backend of a `ModelRunner`; what it raises is `backend.BlackwellKernelsBackend`'s."""
    from blackwell_engines.sglang.backend import BlackwellKernelsBackend

    return BlackwellKernelsBackend(runner)


def pass_lists(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Run a step of SGLang that asks whether a list names the backend of a model; for a model of
    `LISTED` with this backend, that step finds 'triton', which all lists name.

    Steps before and after it find `NAME`.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolved_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    view = resolved_view(server_args)
    own = [name for name in FIELDS if getattr(view, name) == NAME]
    # The weights of an instance come from another server, and its configuration is not read here.
    listed = own and not str(view.model_path).startswith("instance://")
    listed = listed and model_config_of(server_args).hf_config.architectures[0] in LISTED
    if listed:
        declare_resolution(server_args, NAME, **dict.fromkeys(own, "triton"))
    previous(server_args)
    if listed:
        declare_resolution(server_args, NAME, **dict.fromkeys(own, NAME))
