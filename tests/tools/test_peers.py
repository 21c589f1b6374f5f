"""tools/peers: its table, its changes of text, and what it makes of how tests ended. No checkout of
a peer is needed, and no network."""

import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from support.waiting import until
from tinsmith.demo import demo

from tools.peers import ROOT, models, run, table
from tools.peers import __main__ as peers
from tools.peers.run import Ended
from tools.peers.table import Change, Known, Suite

SUITES = {suite.name: suite for peer in table.PEERS for suite in peer.suites}
PAGE = re.sub(r"\s+", " ", (ROOT / "docs/peers.md").read_text())
README = (ROOT / "tools/peers/README.md").read_text()
SUITE = Suite(
    name="some",
    files=("tests/test_a.py",),
    serves={"a/b": "demo"},
    tests=2,
    changes=(Change("test_a", "their_server()", "ours()", "it would start theirs"),),
    known={"test_a::test_theirs": Known("theirs", "it is theirs")},
)
GOOD = [Ended("test_a::test_ours", "passed"), Ended("test_a::test_theirs", "failed", "is theirs")]


@pytest.mark.parametrize("peer", table.PEERS, ids=lambda peer: peer.name)
def test_each_peer_has_its_rows(peer: table.Peer) -> None:
    row = next(line for line in README.splitlines() if line.startswith(f"| `{peer.name}` |"))
    assert f"| {peer.repository} | {peer.revision} | {peer.needs} |" in row.replace("`", "")
    assert f"`python -m tools.peers {peer.name} CHECKOUT`" in PAGE and peer.revision in PAGE
    for suite in peer.suites:
        assert suite.scripts or suite.known.keys() == {
            name for name in suite.known if f"{name.partition('::')[0]}.py" in str(suite.files)
        }
        assert set(suite.serves.values()) <= models.MODELS.keys()


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_the_page_says_how_many_pass_and_why_the_others_do_not(suite: Suite) -> None:
    passing = f"{suite.tests - len(suite.known)} of {suite.tests}"
    assert suite.prints or f"| {passing} |" in PAGE
    for name, known in suite.known.items():
        assert known.why in PAGE, known.why
        assert name.rpartition("::")[2] in PAGE, name


def test_a_copy_has_the_changes_and_the_checkout_has_not(tmp_path: Path) -> None:
    theirs = tmp_path / "checkout/tests/test_a.py"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("with their_server() as server:\n    pass\n")
    run.copy(SUITE, tmp_path / "checkout", tmp_path / "copy")
    assert (tmp_path / "copy/tests/test_a.py").read_text().startswith("with ours() as")
    assert "their_server" in theirs.read_text()
    theirs.write_text("with another_server():\n")
    with pytest.raises(table.AnotherRevision, match=r"test_a has no 'their_server\(\)'.*start"):
        run.copy(SUITE, tmp_path / "checkout", tmp_path / "again")
    theirs.unlink()
    with pytest.raises(table.AnotherRevision, match=r"has no tests/test_a\.py"):
        run.copy(SUITE, tmp_path / "checkout", tmp_path / "third")


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.deep.test_a.TestClass" name="test_ours[1]"/>
<testcase classname="tests.test_a" name="test_theirs"><failure message="bad">E is theirs</failure>
</testcase>
<testcase classname="tests.test_a" name="test_broken"><error message="no fixture"/></testcase>
<testcase classname="tests.test_a" name="test_gpu"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_pytests_report_is_read() -> None:
    assert run.read_junit(JUNIT) == [
        Ended("test_a::TestClass::test_ours[1]", "passed"),
        Ended("test_a::test_theirs", "failed", "bad\nE is theirs"),
        Ended("test_a::test_broken", "failed", "no fixture\n"),
        Ended("test_a::test_gpu", "skipped", "no GPU\n"),
    ]


WRONG = {
    "one fails that should pass": ([Ended("test_a::test_ours", "failed", "no"), GOOD[1]], "no"),
    "one is skipped": ([Ended("test_a::test_ours", "skipped", "no GPU"), GOOD[1]], "no GPU"),
    "one passes that should fail": (
        [GOOD[0], Ended("test_a::test_theirs", "passed")],
        "the table says that it fails: it is theirs",
    ),
    "one fails otherwise": (
        [GOOD[0], Ended("test_a::test_theirs", "failed", "connection lost\nmore")],
        "not as known: connection lost",
    ),
    "one is missing": (GOOD[:1], "the table has 2 tests; is it another revision?"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_end_that_is_not_as_known_is_told(case: str) -> None:
    ends, why = WRONG[case]
    rows = run.judge(SUITE, ends, whole=True)
    assert [row.why for row in rows if not row.as_known] == [why]
    assert f"| **{why}** |" in run.markdown(SUITE, rows)


def exit_code(monkeypatch: pytest.MonkeyPatch, ends: list[Ended], *arguments: str) -> int:
    peer = replace(table.PEERS[0], name="some", suites=(SUITE,))
    monkeypatch.setattr(table, "PEERS", (peer,))
    monkeypatch.setattr(run, "run", lambda *_: ends)
    monkeypatch.setattr(peers.signal, "signal", lambda *_: None)
    return peers.main(["some", str(ROOT), *arguments])


def test_the_exit_code_is_that_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_code(monkeypatch, GOOD) == 0
    assert exit_code(monkeypatch, [GOOD[0], Ended("test_a::test_theirs", "passed")]) == 1
    assert exit_code(monkeypatch, GOOD[:1]) == 1  # half of the tests
    assert exit_code(monkeypatch, GOOD[:1], "--only", "ours") == 0
    assert exit_code(monkeypatch, [], "--only", "nothing") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["some", "nowhere"], "there is no folder nowhere"),
        (["some", str(ROOT), "--model", "a/b"], "NAME=FOLDER was expected"),
        (["some", str(ROOT), "--model", "a/b=nowhere"], "a folder that is there"),
        (["some", str(ROOT), "--model", f"b/a={ROOT}"], "SkyRL asks for no b/a; for a/b"),
    ],
)
def test_a_bad_command_line_is_refused(
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    peer = replace(table.PEERS[0], name="some", suites=(SUITE,))
    monkeypatch.setattr(table, "PEERS", (peer,))
    with pytest.raises(SystemExit) as ended:
        peers.main(arguments)
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


PRINTS = replace(
    SUITE, scripts=True, files=("program.py",), changes=(), prints=r"off by (\S+)$", most=1e-5
)
PROGRAMS = {
    "print('off by 1e-6')": Ended("program", "passed", "at most 1.0e-06"),
    "print('off by 2e-5')": Ended("program", "failed", "it printed 2e-05, more than 1e-05"),
    "print('off by nan')": Ended("program", "failed", "it printed nan, more than 1e-05"),
    "print('done')": Ended(
        "program", "failed", r"nothing that it printed is like 'off by (\\S+)$'"
    ),
    "print('off by 1e-6'); raise ValueError('a sentence')": Ended(
        "program", "failed", "exit code 1: ValueError: a sentence"
    ),
    "import os; os.environ['TINKER_API_KEY'] == 'tml-local' or exit('no key')": Ended(
        "program", "failed", r"nothing that it printed is like 'off by (\\S+)$'"
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_programs_end_and_numbers_are_looked_at(program: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    settings = run.environment("http://127.0.0.1:9", PRINTS, {}, tmp_path)
    options = Namespace(logs=tmp_path / "logs", seconds=60)
    assert run.script(PRINTS, ("program.py",), tmp_path, settings, options) == PROGRAMS[program]
    assert (tmp_path / "logs/program.log").is_file()


def runs(process: int) -> bool:
    try:
        said = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return said.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(("after", "code"), [("child.wait()", 124), ("sys.exit(3)", 3)])
def test_a_programs_processes_end_with_it_if_it_takes_too_long_or_not(
    after: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(
        "import subprocess, sys\nchild = subprocess.Popen(['sleep', '120'])\n"
        f"open('child', 'w').write(str(child.pid))\n{after}\n"
    )
    settings = run.environment("http://127.0.0.1:9", PRINTS, {}, tmp_path)
    options = Namespace(logs=None, seconds=10)
    ended = run.script(PRINTS, ("program.py",), tmp_path / ".", settings, options)
    assert ended.ended == "failed" and f"exit code {code}" in ended.said
    child = int((tmp_path / "child").read_text())
    until(lambda: not runs(child))  # a signal takes its time


def test_the_untied_model_is_the_demonstrations(tmp_path: Path) -> None:
    """With a head of its own, and for longer texts."""
    import numpy as np
    import tinsmith

    folder, tokens = models.folder("untied", tmp_path), list(range(20))
    ours, theirs = (tinsmith.Model(one).logprobs(tokens) for one in (folder, demo.MODEL))
    np.testing.assert_array_equal(ours, theirs)
    assert models.folder("untied", tmp_path) == folder
