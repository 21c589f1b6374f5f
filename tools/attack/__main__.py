"""Runs the attack programs: python -m tools.attack [NAME ...] [options]; common.py says more."""

import sys
from importlib import import_module

from tools.attack import common

sys.exit(common.main(lambda name: import_module(f"tools.attack.{name}"), sys.argv[1:]))
