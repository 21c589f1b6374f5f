"""Other projects' tests and programs against a tinsmith server, from checkouts that the user
brings. Nothing of theirs is here: table.py says what is changed in a temporary copy, and why."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
if str(ROOT / "tests") not in sys.path:  # recipe_data.py, the data sets of the recipes' tests
    sys.path.insert(0, str(ROOT / "tests"))
