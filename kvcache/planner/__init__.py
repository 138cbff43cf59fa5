"""What fits into how much memory, and what is stranded."""
