"""Attacks on the engine, the server and the folder of checkpoints; common.py says how."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
for folder in (ROOT, ROOT / "tests"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
