"""What each warp of the Blackwell decode kernel does for the whole life of its CTA."""
