"""Times and accuracies, and the rounds in which they are taken."""
