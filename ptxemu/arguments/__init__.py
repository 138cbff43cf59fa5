"""Arguments of a launch: arrays of any library, numbers and structures as bytes of parameters."""
