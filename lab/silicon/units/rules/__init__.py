"""From measured rows to parameters of the cycle model: plans as data, and what runs them."""
