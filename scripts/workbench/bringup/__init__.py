"""The first day on a new GPU: all that this repository can run there, from small to large."""
