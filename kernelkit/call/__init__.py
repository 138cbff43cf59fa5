"""From a call in Python to a launch: operators, plans, tapes, checks of tensors."""
