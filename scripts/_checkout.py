"""Put the checkout on the path, after installed packages: `lab` is not part of any package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
