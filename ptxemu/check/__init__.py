"""What listens to a launch without taking part in it: the checker, and the timeline."""
