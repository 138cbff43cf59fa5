"""Pictures and one page of everything in results/."""
