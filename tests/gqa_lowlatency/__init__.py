"""Tests of the decode attention kernels."""
