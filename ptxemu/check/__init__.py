"""Listeners that observe a launch without affecting it: the checker and the timeline."""
