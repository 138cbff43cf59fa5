"""What every public function accepts: asked of its own checks, and printed as docs/support.md."""
