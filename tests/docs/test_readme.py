"""README's Python runs as it stands; the model of the hub is the demonstration's here."""

import re
from pathlib import Path

import pytest
from support import ROOT
from tinsmith.demo.demo import MODEL

README = ROOT / "README.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)


def test_there_are_snippets() -> None:
    assert SNIPPETS
    assert README.read_text().count("```python") == len(SNIPPETS)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_runs_as_it_stands(
    snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    for name in set(re.findall(r'"(\w+/[\w.-]+)"', snippet)):
        folder = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("1" * 40)
        (folder / "snapshots").mkdir()
        (folder / "snapshots" / ("1" * 40)).symlink_to(MODEL)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "README.md", "exec"), {"__name__": "__main__"})
    shown = capsys.readouterr().out
    assert ("print(" in snippet) == bool(shown)
    losses = [float(loss) for loss in re.findall(r" loss=([\d.]+)", shown)]
    assert losses == sorted(losses, reverse=True), "what is trained on falls"
