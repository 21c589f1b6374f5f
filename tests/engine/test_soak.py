"""The soak of benchmarks/soak.py for four seconds: four clients at once, and each result is what
it is alone."""

import importlib.util
import sys
from pathlib import Path

from support import ROOT

SECONDS = 4.0


def test_four_clients_at_once_get_what_each_gets_alone(tmp_path: Path) -> None:
    file = ROOT / "benchmarks" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", file)
    assert spec is not None and spec.loader is not None
    soak = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = soak
    spec.loader.exec_module(soak)
    report = soak.soak(tmp_path, SECONDS)
    assert report.differences == []
    assert len(report.rounds) == 4 and min(report.rounds.values()) >= 1
    assert report.results > 100
