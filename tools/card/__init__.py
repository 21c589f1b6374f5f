"""Programs for the minutes in which there is a card. They use op_devices.py of the tests, which knows the
ops and their arguments, and the benchmarks."""

from tools import ROOT as ROOT
