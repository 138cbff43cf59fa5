"""Recordings of what every warp of a launch did, in order, for models of its time."""
