"""`pack_experts`: the weights of a model's experts in four bits, as our kernels read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from blackwell_engines.transformers.experts import PACKED, Experts
from blackwell_engines.transformers.registry import register
from moe import ArrangedExperts, SwiGLU, arrange, pack
from moe.huggingface import tracked
from moe.reference import swiglu

FORMATS = ("mxfp4", "nvfp4")
PROBE = 24.0  # largest magnitude of gate and up that activations are compared at


def pack_experts(
    model: nn.Module, fmt: str = "mxfp4", *, keep: bool = False, progress: bool = False
) -> nn.Module:
    """Pack the experts of every layer and have the model use them, `experts_implementation`
    'blackwell_kernels' from here on.

    Quantising loses what four bits do not hold, about a fifth of a weight in the norm, unless the
    weights came from that format: those of gpt-oss, loaded with `Mxfp4Config(dequantize=True)`,
    stay as they are in 'mxfp4'.

    Args:
        model: a model of transformers whose classes of experts `experts_implementation` is for, on
            the device where it is to run; its gate is SiLU or that of gpt-oss, its tokens bf16.
        fmt: 'mxfp4' or 'nvfp4'.
        keep: whether the weights stay beside the packed ones, for another implementation.
        progress: whether a bar shows how far it is; needs rich.

    Returns:
        model.

    Raises:
        ValueError: the model has no such experts, or another format is wanted.
        NotImplementedError: naming the class of experts that the kernels cannot compute, and why;
            nothing has changed then.
    """
    if fmt not in FORMATS:
        raise ValueError(f"fmt {fmt!r}: one of {FORMATS}")
    layers = [(name, each) for name, each in model.named_modules() if _are_experts(each)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no experts that can be replaced")
    forms = {name: form_of(experts) for name, experts in layers}
    for name, experts in tracked(layers, progress):
        experts.add_module(PACKED, Experts(_arranged(experts, fmt), forms[name]))
        for weight in () if keep else [*experts._parameters]:
            experts.register_parameter(weight, None)
    model.set_experts_implementation(register())  # type: ignore[operator]
    return model


def form_of(experts: nn.Module) -> SwiGLU:
    """The activation of a class of experts, found by what it makes of numbers.

    Raises:
        NotImplementedError: naming the class, and what it has that no kernel does.
    """
    name, facts = type(experts).__name__, vars(experts)
    for wrong, words in (
        (not facts["has_gate"], "no gate next to up"),
        # Versions of transformers without such a norm, or such ranks, say nothing of them.
        (facts.get("has_post_expert_norm"), "a norm after every expert"),
        (facts.get("_is_expert_parallel"), "experts on other ranks"),
    ):
        if wrong:
            raise NotImplementedError(f"{name} has {words}")
    alpha, limit = (facts.get(fact) for fact in ("alpha", "limit"))
    forms = (SwiGLU(), SwiGLU(limit=limit), SwiGLU(alpha or 1.0, 1.0, limit))
    numbers = torch.linspace(-PROBE, PROBE, 97)
    gate, up = torch.cartesian_prod(numbers, numbers).unbind(1)
    both = torch.stack((gate, up), 1) if not facts["is_concatenated"] else torch.cat((gate, up))
    try:
        theirs = experts._apply_gate(both.reshape(1, -1)).flatten()  # type: ignore[operator]
    except (AttributeError, TypeError) as error:  # no alpha, no limit, or None for one
        raise NotImplementedError(f"{name} lacks a part of its activation: {error}") from error
    for form in forms:
        if torch.allclose(swiglu(gate, up, **vars(form)), theirs, rtol=1e-5, atol=1e-6):
            return form
    lacking = [fact for fact in ("alpha", "limit") if facts.get(fact) is None]
    words = f"{name} has another activation than {', '.join(map(str, dict.fromkeys(forms)))}"
    if lacking:
        words += f"; it has no {' and no '.join(lacking)}, which that of gpt-oss needs"
    raise NotImplementedError(words)


def _are_experts(module: nn.Module) -> bool:
    """Whether transformers dispatches them, and nobody packed or quantised their weights."""
    stacked = isinstance(module._parameters.get("gate_up_proj"), nn.Parameter)
    return "is_concatenated" in vars(module) and (stacked or not vars(module)["has_gate"])


def _arranged(experts: Any, fmt: str) -> ArrangedExperts:
    w13, w2 = experts.gate_up_proj, experts.down_proj
    if experts.is_transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    biases = (experts.gate_up_proj_bias, experts.down_proj_bias) if experts.has_bias else None
    order = "gate_up" if experts.is_concatenated else "alternating"
    return arrange(pack(w13, w2, fmt, order=order, biases=biases))
