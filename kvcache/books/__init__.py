"""Who owns which slot: the manager and what it is made of. No memory, no GPU."""
