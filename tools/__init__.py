"""Programs for maintainers, run as `python -m tools.NAME`. They use the tests' helpers and the
benchmarks, which are found from here on."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
for folder in ("benchmarks", "tests"):
    if str(ROOT / folder) not in sys.path:
        sys.path.insert(0, str(ROOT / folder))
