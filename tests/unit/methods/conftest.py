"""Methods are held against the same checks as the laws."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "laws"))
