"""Questions to try `tinsmith compare` with: `python -m tinsmith.compare.example FOLDER`.

They are the demonstration's, for the model that is in the package: four skills to learn, held-out
questions of them with values that no training question has, and one skill that it has already.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tinsmith import usage
from tinsmith.demo import data, demo

TRAIN, PER_SKILL, KNOWN = 400, 25, 100


def write_chats(path: Path, examples: Sequence[data.Example]) -> None:
    """Questions and answers as chats, one on each line."""
    lines = []
    for one in examples:
        messages = [("user", one.question), ("assistant", one.answer)]
        chat = [{"role": role, "content": content} for role, content in messages]
        lines.append(json.dumps({"messages": chat}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the files, and says how to compare with them; returns the exit code."""
    parser = usage.Parser(
        prog="python -m tinsmith.compare.example",
        description="Writes questions to try tinsmith compare with: new.jsonl, test.jsonl, "
        "old.jsonl.",
        epilog=usage.epilog(["python -m tinsmith.compare.example questions"]),
    )
    parser.add_argument("folder", type=usage.folder, help="which is made if it isn't there")
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    write_chats(folder / "new.jsonl", data.sdft_examples(TRAIN, 0))
    write_chats(folder / "test.jsonl", data.held_out_examples(PER_SKILL, 0))
    write_chats(folder / "old.jsonl", data.known_examples(KNOWN, 0))
    files = {name: shlex.quote(str(folder / f"{name}.jsonl")) for name in ("new", "test", "old")}
    print(f"{folder}: {TRAIN} new questions, {4 * PER_SKILL} to test, {KNOWN} of what is known")
    print(
        f"tinsmith compare --model {shlex.quote(f'demo={demo.MODEL}')} --renderer {demo.RENDERER} "
        f"--data {files['new']} --test {files['test']} --retain {files['old']} "
        "--max-tokens 32 --lr 1e-3"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
