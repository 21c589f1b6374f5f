"""Runs another project's tests against a tinsmith server, and says what passes.

    python -m tools.peers skyrl CHECKOUT
    python -m tools.peers tuft CHECKOUT
    python -m tools.peers tutorials CHECKOUT
    python -m tools.peers cookbook-tests CHECKOUT

Prints a table in Markdown: each test, how it ended, and why it does not pass where that is known.
Exits 0 if every test ended as the peer's row in table.py says, 1 if one did not, and 2 if the
command line or the checkout is wrong. tools/peers/README.md says what to install."""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import run, table


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("peer", choices=[peer.name for peer in table.PEERS])
    parser.add_argument("checkout", type=Path, help="the folder of the peer's repository")
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME=FOLDER",
        help="serve this model under a name that the tests ask for; by default it is the "
        "demonstration's",
    )  # fmt: skip
    parser.add_argument("--only", default="", help="the tests whose names have this")
    parser.add_argument("--seconds", type=int, default=900, help="after which a test has failed")
    parser.add_argument("--logs", type=Path, help="a folder for what the tests print")
    options = parser.parse_args(arguments)
    options.peer = next(peer for peer in table.PEERS if peer.name == options.peer)
    options.models = {}
    for pair in options.model:
        name, equals, folder = pair.partition("=")
        if not equals or not Path(folder).is_dir():
            parser.error(f"--model {pair}: NAME=FOLDER was expected, a folder that is there")
        options.models[name] = Path(folder).resolve()
    asked = {name for suite in options.peer.suites for name in suite.serves}
    if unknown := sorted(options.models.keys() - asked):
        parser.error(
            f"{options.peer.title} asks for no {unknown[0]}; for {', '.join(sorted(asked))}"
        )
    if not options.checkout.is_dir():
        parser.error(f"there is no folder {options.checkout}")
    options.checkout = options.checkout.resolve()
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the tests' process is ended too
    results = []
    print(run.heading(options.peer, options.checkout))
    for suite in options.peer.suites:
        with tempfile.TemporaryDirectory(prefix="tinsmith-peers-") as work:
            try:
                found = run.run(options, suite, Path(work))
            except table.AnotherRevision as error:
                print(f"{suite.name}: {error}", file=sys.stderr)
                return 2
        rows = run.judge(suite, found, whole=not options.only)
        if rows:
            print(run.markdown(suite, rows), flush=True)
        results += rows
    good = sum(row.as_known for row in results)
    passed = sum(row.ended == "passed" for row in results)
    print(f"{passed} of {len(results)} passed; {good} ended as the table says")
    return 0 if results and good == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
