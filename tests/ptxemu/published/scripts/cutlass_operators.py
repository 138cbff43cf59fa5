"""CUTLASS Operator API: the first operator found for a product of 128 x 128 x 128, fp16."""

import sys

import cutlass.operators as operators
import torch
from judged import report

torch.manual_seed(0)
a, b = (torch.randn(128, 128, device="cuda", dtype=torch.float16) for _ in range(2))
out = torch.empty(128, 128, device="cuda", dtype=torch.float16)
problem = operators.GemmArguments(a, b, out, accumulator_type=torch.float32)
found = operators.get_operators(problem, target_sm=sys.argv[1])
found[0].run(problem)
report((out, a.double() @ b.double()))
