"""Machine code as another compiler might have written it, with the paths of warps through it."""
