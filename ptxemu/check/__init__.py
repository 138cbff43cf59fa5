"""What listens to a launch without taking part in it."""
