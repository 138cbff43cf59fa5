"""The score kernel of Hopper: e4m3 by e4m3 with wgmma."""
