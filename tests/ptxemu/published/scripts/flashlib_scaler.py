"""flashlib: columns scaled to mean 0 and deviation 1, and the 8 nearest of 256 points."""

import torch
from flashlib import flash_knn, flash_standard_scaler
from judged import report

torch.manual_seed(0)
points = torch.randn(256, 32, device="cuda") * 3 + 1
scaled, _ = flash_standard_scaler(points)
wide = points.double()
right = (wide - wide.mean(0)) / wide.std(0, unbiased=False)

queries = torch.randn(64, 32, device="cuda")
found = flash_knn(queries, points, 8)
distances = torch.cdist(queries.double(), wide).square()
indices = next(part for part in found if not part.is_floating_point())
nearest = distances.gather(-1, indices.long().view(64, 8)).sort(-1).values
report((scaled, right), (nearest, distances.topk(8, largest=False).values))
