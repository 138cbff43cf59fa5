"""`Chain`: the backends of a draft model that decodes a few tokens in a row, as EAGLE's does. Only
SGLang imports this file.
"""

from __future__ import annotations

from typing import Any

from blackwell_engines.sglang.backend import BlackwellKernelsBackend


class Chain:
    """A backend for each step but the last, whose logits are not needed.

    attn_backends: that of step n has n + 1 keys more than the batch counts
    """

    needs_cpu_seq_lens = True
    forward_metadata = None

    def __init__(self, runner: Any, branches: int, steps: int) -> None:
        """Create the backends of a draft model's `ModelRunner`.

        Raises:
            NotImplementedError: for several branches of a request, and what a backend refuses.
        """
        if branches != 1:
            raise NotImplementedError(
                f"{branches} branches of a draft model: only --speculative-eagle-topk 1"
            )
        self.kv_index_translator = runner.kv_index_translator
        self.attn_backends = [
            BlackwellKernelsBackend(runner, ahead=step + 1) for step in range(steps - 1)
        ]
        self.attn_backend_list = self.attn_backends

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Eager: of all steps."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Tables that a graph of all steps reads."""
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Views of those tables."""
        for backend in self.attn_backends:
            backend.init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Fill the tables, within the graph."""
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)
