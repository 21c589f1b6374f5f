"""Runs the attack programs: python tests/attack [NAME ...] [options]; common.py says more."""

import sys
from importlib import import_module
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent)  # tests/, as in pytest
common = import_module("attack.common")
sys.exit(common.main(lambda name: import_module(f"attack.{name}"), sys.argv[1:]))
