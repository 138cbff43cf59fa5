"""cuDNN's FP8 attention through the graph API of nvidia-cudnn-frontend (`sdpa_fp8`).

torch's `scaled_dot_product_attention` has no FP8, so this is the only way to it from Python. All
tensors keep the layout of the other peers, [batch, tokens, heads, columns]; the graph gets their
strides. Q, K and V have a decode scale of 1, as for the other peers. P is multiplied by P_SCALE
before it is rounded, which cuDNN's documentation advises for e4m3 without dropout.

cuDNN writes O in e4m3, or, in versions that can, in bf16. O in e4m3 is multiplied by O_SCALE first:
means of many values are small, and would fall below the normal numbers of e4m3.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lab.bench.peers.run import Run, missing

DISTRIBUTIONS = ("nvidia-cudnn-frontend", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
P_SCALE = 448.0  # P is at most 1 before its row is divided by its sum
O_SCALE = 64.0  # |V| below 7, and O with it, fits into e4m3
SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
OUTPUTS = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


def available() -> str:
    """Return why it cannot run here, "" if it can."""
    return missing("cudnn") or ("" if torch.cuda.is_available() else "there is no GPU")


def scales_of(out: str) -> dict[str, float]:
    """Return the factors of the graph by name; out: bf16 or e4m3."""
    found = dict.fromkeys(SCALES, 1.0)
    found |= {"scale_s": P_SCALE, "descale_s": 1 / P_SCALE}
    return found | {"scale_o": O_SCALE if out == "e4m3" else 1.0}


def check(problem: Any) -> None:
    """NotImplementedError for a problem that this graph does not describe."""
    if problem.dtype != "e4m3" or problem.kv_dtype not in ("", "e4m3"):
        raise NotImplementedError("q, k and v in e4m3 only")
    for option in ("window", "sinks"):
        if getattr(problem, option) not in (None, False):
            raise NotImplementedError(f"it takes no {option}")


def prepare(problem: Any, inputs: Any, out: str = "bf16") -> Run:
    """Build the graph of a problem of `bench.py fmha`; out: dtype of O.

    Raises NotImplementedError for other dtypes and masks, and cuDNN's own error where this version
    has no kernel for it.
    """
    check(problem)
    import cudnn

    q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
    shape = (problem.batch, problem.sq, problem.q_heads, problem.v_dim)
    o = torch.empty(shape, dtype=OUTPUTS[out], device=q.device).transpose(1, 2)
    scales = scales_of(out)
    factors = {
        name: torch.full((1, 1, 1, 1), factor, device=q.device) for name, factor in scales.items()
    }
    handle = cudnn.create_handle()
    tensors = {"q": q, "k": k, "v": v, **factors}
    graph, pack = described(cudnn, handle, problem, tensors, o)
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)

    def launch() -> torch.Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        cudnn.set_stream(handle=handle, stream=stream)
        graph.execute(pack, workspace, handle=handle)
        return o

    finish = partial(decoded, scale=scales["scale_o"])
    return Run(launch, finish, (graph, pack, workspace))


def decoded(o: torch.Tensor, scale: float) -> torch.Tensor:
    """Return O as [batch, tokens, heads, columns] in fp32."""
    return o.transpose(1, 2).float() / scale


def described(
    cudnn: Any, handle: Any, problem: Any, tensors: dict[str, torch.Tensor], o: torch.Tensor
) -> tuple[Any, dict[Any, torch.Tensor]]:
    """Return the graph with its plan, and the tensor of each of its nodes."""
    types = cudnn.data_type
    kinds = {torch.float8_e4m3fn: types.FP8_E4M3, torch.bfloat16: types.BFLOAT16,
             torch.float32: types.FLOAT}  # fmt: skip
    graph = cudnn.pygraph(
        io_data_type=types.FP8_E4M3,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=handle,
    )
    nodes = {}
    for name, tensor in tensors.items():
        dims = {"dim": [*tensor.shape], "stride": [*tensor.stride()]}
        nodes[name] = graph.tensor(name=name, data_type=kinds[tensor.dtype], **dims)
    mask = {}
    if problem.causal:
        square = problem.sq == problem.skv
        mask["use_causal_mask" if square else "use_causal_mask_bottom_right"] = True
    found = graph.sdpa_fp8(
        **nodes, is_inference=True, attn_scale=problem.head_dim**-0.5, name="attention", **mask
    )
    # O, and the largest values of P and of O, which some engines ask for.
    outputs = {found[0]: o}
    outputs |= {node: torch.empty((1, 1, 1, 1), device=o.device) for node in (found[2], found[3])}
    for node, tensor in outputs.items():
        node.set_output(True).set_dim([*tensor.shape]).set_stride([*tensor.stride()])
        node.set_data_type(kinds[tensor.dtype])
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph, {nodes[name]: tensor for name, tensor in tensors.items()} | outputs
