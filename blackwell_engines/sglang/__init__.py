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
DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def register() -> None:
    """Tell SGLang of the backend `NAME`, which is then chosen by that name alone, for models of
    `LISTED` and for draft models, too. Processes call it more than once.

    Raises:
        ImportError: where sglang is not installed, or has no registry of attention backends or no
            hooks for the steps that resolve its arguments.
    """
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from blackwell_engines.sglang import quantization

    if NAME not in ATTENTION_BACKEND_CHOICES:
        ATTENTION_BACKEND_CHOICES.append(NAME)
        register_attention_backend(NAME)(create)
        register_resolution_hook("handle_model_specific_adjustments")(pass_lists)
        HookRegistry.register(DRAFTS, with_drafts, HookType.AROUND)
    quantization.register()


def create(runner: Any) -> Any:
    """The backend of a `ModelRunner`; what it raises is `backend.BlackwellKernelsBackend`'s."""
    from blackwell_engines.sglang.backend import BlackwellKernelsBackend

    return BlackwellKernelsBackend(runner)


def with_drafts(
    original: Callable[..., Any], factory: Any, name: str, made: dict[str, Any], *rest: Any,
    **named: Any,
) -> Any:  # fmt: skip
    """Make a backend of a draft model, of `NAME` or of those that SGLang lists in `made`."""

    def own() -> tuple[str, Any]:
        from blackwell_engines.sglang.drafts import Chain

        runner = factory.draft_model_runner
        if named.get("stamps_children"):  # a backend of all steps of a chain
            return NAME, Chain(runner, factory.topk, factory.speculative_num_steps)
        return NAME, create(runner)

    return original(factory, name, {**made, NAME: own}, *rest, **named)


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
