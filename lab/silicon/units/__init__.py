"""Unit costs of a Hopper GPU: small PTX kernels, and what they measure for the cycle model."""
