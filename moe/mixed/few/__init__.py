"""A whole layer of experts for few rows, with four-bit weights: both products and the sum."""
