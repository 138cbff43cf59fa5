"""Path of a Python call to a launch: operators, plans, tapes, checks of tensors."""
