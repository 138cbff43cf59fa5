"""Device code that the score kernels of Hopper and Blackwell share: keys by TMA, tile by tile."""
