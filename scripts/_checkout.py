"""Puts the checkout on the path, behind what is installed: `lab` is not part of any package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
