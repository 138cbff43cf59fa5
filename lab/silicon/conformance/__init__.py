"""Instructions on a GPU beside the emulator."""
