"""Attacks on the engine, the server and the folder of checkpoints; common.py says how."""

from tools import ROOT as ROOT
