"""lm-evaluation-harness against a tinsmith server, beside its own transformers on the same folder.

    python -m venv harness && harness/bin/pip install torch==2.13.0 'lm-eval[api,hf]==0.4.13'
    python -m tools.peers.lm_eval --harness harness/bin/python --model FOLDER

Its tasks of several choices need the log-probability of each choice behind the question, which
local-completions asks for with `echo`. The harness runs three times on one task of local questions:
as `hf`, and as `local-completions` with requests of ids and of texts. hf takes its softmax in
float64, as torch's in float32 is off by 1e-5 a token. Nothing is fetched.

Prints a table: accuracies, and how far the choices' log-probabilities are from hf's. Exits 0 if
accuracies and greedy flags are hf's and, at float32, no log-probability differs by more than 5e-5;
1 if not; 2 if the command line is wrong."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TASK = "tinsmith_choices"
MOST = 5e-5  # between two float32 computations of a choice of some ten tokens
QUESTIONS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("The capital of France is", ("Berlin", "Paris", "the city of Madrid", "Rome"), 1),
    ("Two plus three is", ("four", "six", "five", "twenty-two and a half"), 2),
    ("Snow is usually", ("white and cold", "black", "hot", "made of stone"), 0),
    ("The opposite of large is", ("huge", "big", "very tall", "small"), 3),
    ("A dog has four", ("wings", "legs", "wheels and an engine", "horns"), 1),
    ("The sun rises in the", ("east", "west", "middle of the night", "north"), 0),
    ("Water freezes at zero degrees", ("Fahrenheit", "of arc", "Celsius", "per second"), 2),
    ("Bread is made of", ("iron", "flour and water", "glass", "sand"), 1),
    ("A week has seven", ("months", "days", "hours", "years and a day"), 1),
    ("In Zürich people speak", ("Japanese", "no language at all", "German", "Latin"), 2),
    ("Fish live in", ("water", "trees", "the clouds above us", "books"), 0),
    ("The first letter of the alphabet is", ("Z", "Q", "the letter M", "A"), 3),
)


@dataclass(frozen=True)
class Scored:
    """What the harness found: accuracies, and by question each choice's log-probability, and
    whether it is the likeliest text."""

    accuracy: float
    normed: float
    choices: list[list[tuple[float, bool]]]


def write_task(folder: Path) -> None:
    """The task and its questions, as the harness reads them."""
    rows = [
        {"question": question, "choices": choices, "answer": answer}
        for question, choices, answer in QUESTIONS
    ]
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (folder / f"{TASK}.yaml").write_text(json.dumps(task))  # JSON is YAML


def read(folder: Path) -> Scored:
    """What a run of the harness has written."""
    [file] = folder.rglob("results_*.json")
    found = json.loads(file.read_text())["results"][TASK]
    [file] = folder.rglob("samples_*.jsonl")
    rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["doc_id"])
    choices = [
        [(float(value), str(greedy) == "True") for [value, greedy] in map(unwrapped, row["resps"])]
        for row in rows
    ]
    return Scored(found["acc,none"], found["acc_norm,none"], choices)


def unwrapped(answer: Any) -> Any:
    """An answer that the harness may have put into a list of its repeats."""
    return answer[0] if len(answer) == 1 else answer


def difference(own: Scored, other: Scored) -> float:
    """The largest difference of a choice's log-probability."""
    pairs = [
        (one[0], two[0])
        for row, wanted in zip(own.choices, other.choices, strict=True)
        for one, two in zip(row, wanted, strict=True)
    ]
    return max(abs(one - two) for one, two in pairs)


def agree(own: Scored, other: Scored) -> bool:
    """Whether nothing but the digits of log-probabilities differs."""

    def flags(scored: Scored) -> list[list[bool]]:
        return [[greedy for _, greedy in row] for row in scored.choices]

    found = own.accuracy, own.normed, flags(own)
    return found == (other.accuracy, other.normed, flags(other))


def table(found: Mapping[str, Scored]) -> str:
    """The comparison in Markdown."""
    lines = ["| backend | acc | acc_norm | largest difference from hf |", "|---|---|---|---|"]
    for name, scored in found.items():
        apart = "" if name == "hf" else f"{difference(scored, found['hf']):.1e}"
        lines.append(f"| {name} | {scored.accuracy:.3f} | {scored.normed:.3f} | {apart} |")
    return "\n".join(lines)


def harness(options: argparse.Namespace, folder: Path, kind: str, **arguments: Any) -> Scored:
    """A run of the harness, in an environment that reaches no hub."""
    out = Path(tempfile.mkdtemp(dir=folder))
    given = ",".join(f"{key}={value}" for key, value in arguments.items())
    command = [options.harness, "-m", "lm_eval", "--model", kind, "--model_args", given]
    command += ["--include_path", str(folder), "--tasks", TASK, "--batch_size", "8"]
    command += ["--log_samples", "--output_path", str(out)]
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    offline["HF_DATASETS_CACHE"] = str(folder / "cache")
    done = subprocess.run(
        command, env={**os.environ, **offline}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"lm_eval as {kind} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return read(out)


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Scored]:
    from tinsmith.server.backend import Backend
    from tinsmith.server.service.config import ServerConfig

    write_task(folder)
    given = {"pretrained": options.model, "dtype": options.dtype, "softmax_dtype": "float64"}
    found = {"hf": harness(options, folder, "hf", **given)}
    with Backend(
        ServerConfig(
            {"model": options.model},
            checkpoints=folder / "checkpoints",
            device=options.device,
            dtype=options.dtype,
        )
    ) as backend:
        for name, ids in (("ids", True), ("texts", False)):
            found[f"tinsmith, {name}"] = harness(
                options,
                folder,
                "local-completions",
                model="model",
                base_url=f"{backend.url}/v1/completions",
                tokenizer=options.model,
                tokenized_requests=ids,
            )
    return found


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.peers.lm_eval",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="a folder as transformers writes it; by default the demonstration's model",
    )
    parser.add_argument("--harness", default=sys.executable, help="the Python that has lm_eval")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu", help="of the server; hf chooses its own")
    options = parser.parse_args(arguments)
    if options.model is None:
        from tinsmith.demo.demo import MODEL

        options.model = MODEL
    if not (options.model / "config.json").is_file():
        parser.error(f"--model: {options.model} is no folder with a config.json")
    options.model = options.model.resolve()
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    with tempfile.TemporaryDirectory(prefix="tinsmith-lm-eval-") as folder:
        found = compare(options, Path(folder))
    print(table(found))
    own = [scored for name, scored in found.items() if name != "hf"]
    right = all(agree(scored, found["hf"]) for scored in own)
    near = max(difference(scored, found["hf"]) for scored in own) <= MOST
    return 0 if right and (near or options.dtype != "float32") else 1


if __name__ == "__main__":
    sys.exit(main())
