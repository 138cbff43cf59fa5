"""What scripts/dump.py does: PTX, registers, spills and SASS."""
