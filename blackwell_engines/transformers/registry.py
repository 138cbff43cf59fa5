"""`register`: the names under which transformers knows these kernels."""

from __future__ import annotations

import inspect

NAME = "blackwell_kernels"
ARGUMENTS = {"q_length", "q_offset", "kv_length", "kv_offset", "mask_function"}  # of a mask
EXTRA = "pip install 'blackwell-kernels[transformers]'"


def register(name: str = NAME) -> str:
    """Make attention and experts known to transformers, which is imported here.

    `from_pretrained(..., attn_implementation=name)`, or `set_attn_implementation(name)` of a model
    that is loaded, then computes attention by `fmha.attention` and `gqa_lowlatency.decode`, on a
    GPU or, tensors of the CPU, in the emulator. Of experts it is `experts_implementation=name`,
    for which `pack_experts` packs the weights. Calling it again changes nothing.

    Args:
        name: of the implementation; none that transformers knows already.

    Returns:
        name.

    Raises:
        ImportError: transformers is not installed, or lacks the interfaces.
        ValueError: name belongs to another implementation.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as error:
        raise ImportError(
            f"blackwell_engines.transformers needs transformers 5: {EXTRA}"
        ) from error
    if not {*inspect.signature(masking_utils.sdpa_mask).parameters} >= ARGUMENTS:
        wanted = ", ".join(sorted(ARGUMENTS))
        raise ImportError(
            f"this version of transformers does not make masks from {wanted}: {EXTRA}"
        )
    from blackwell_engines.transformers.attention import attention_forward
    from blackwell_engines.transformers.experts import experts_forward
    from blackwell_engines.transformers.masks import keys_in_sight

    attention, masks, experts = AttentionInterface(), AttentionMaskInterface(), ExpertsInterface()
    known = {"eager", *attention, *masks, *experts}
    if name in known and attention.get(name) is not attention_forward:
        raise ValueError(f"{name!r} is registered for another implementation; choose another name")
    attention.register(name, attention_forward)
    masks.register(name, keys_in_sight)
    experts.register(name, experts_forward)
    return name
