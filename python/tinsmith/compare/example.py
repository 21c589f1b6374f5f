"""Example data for `tinsmith compare`: `python -m tinsmith.compare.example FOLDER`.

The data are the demonstration's, for the model in the package: four skills to learn, held-out
questions of them with values that no training question has, and three skills that it already has.
The answers to learn use another author's notation, so a scorer decides which calls are right.
"""

import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinsmith.cli import argument_types
from tinsmith.demo import data, demo

TRAIN, PER_SKILL = 400, 25


def right_call(answer: str, expected: str, row: Mapping[str, Any]) -> bool:
    """The scorer: whether an answer makes the expected call, in either notation.

    right_call('get_time(city="Oslo")', 'Action: get_time\nAction Input: {"city": "Oslo"}', {})
    """
    return data.score(answer, expected)


def write_chats(path: Path, pairs: Iterable[tuple[str, str]]) -> None:
    """Questions and their answers as chats, one on each line."""
    lines = []
    for question, answer in pairs:
        messages = [("user", question), ("assistant", answer)]
        chat = [{"role": role, "content": content} for role, content in messages]
        lines.append(json.dumps({"messages": chat}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the files, and prints how to compare with them; returns the exit code."""
    parser = argument_types.Parser(
        prog="python -m tinsmith.compare.example",
        description="Writes questions to try tinsmith compare with: new.jsonl, test.jsonl, "
        "old.jsonl.",
        epilog=argument_types.epilog(["python -m tinsmith.compare.example questions"]),
    )
    parser.add_argument(
        "folder", type=argument_types.folder, help="which is made if it isn't there"
    )
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    new, test = data.sdft_examples(TRAIN, 0), data.held_out_examples(PER_SKILL, 0)
    old = data.known_examples(PER_SKILL, 0)
    write_chats(folder / "new.jsonl", ((one.question, one.demonstration) for one in new))
    write_chats(folder / "test.jsonl", ((one.question, one.demonstration) for one in test))
    write_chats(folder / "old.jsonl", ((one.question, one.answer) for one in old))
    files = {name: shlex.quote(str(folder / f"{name}.jsonl")) for name in ("new", "test", "old")}
    print(f"{folder}: {len(new)} new questions, {len(test)} to test, {len(old)} of what is known")
    print(
        f"tinsmith compare --model {shlex.quote(f'demo={demo.MODEL}')} --renderer {demo.RENDERER} "
        f"--data {files['new']} --test {files['test']} --retain {files['old']} "
        "--scorer tinsmith.compare.example:right_call --max-tokens 32 --lr 1e-3"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
