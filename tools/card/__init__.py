"""Programs for the minutes in which there is a card: on the tests' op_devices.py, which knows the
ops and their arguments, and on the benchmarks."""

from tools import ROOT as ROOT
