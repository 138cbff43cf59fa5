"""What every warp of a launch did, in order: for whoever wants to know how long it takes."""
