"""A kernel's plan as data: hardware limits, roles, edges, memory maps."""
