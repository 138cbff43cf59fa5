"""The attention kernel for every GPU that has mma.sync."""
