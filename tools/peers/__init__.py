"""Other projects' tests and programs against a tinsmith server, from checkouts that the user
brings. Nothing of theirs is here: table.py says what is changed in a temporary copy, and why."""

from tools import ROOT as ROOT
