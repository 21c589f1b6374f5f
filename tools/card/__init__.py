"""Programs for the minutes in which there is a card. They use the tests' engine.py, which knows the
ops and their arguments, and the benchmarks."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
for folder in ("benchmarks", "tests"):
    if str(ROOT / folder) not in sys.path:
        sys.path.insert(0, str(ROOT / folder))
