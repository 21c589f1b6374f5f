"""The program that runs lm-evaluation-harness beside a server, with a stand-in for the harness that
asks as it does."""

import json
import sys
from pathlib import Path

import pytest
from tinsmith.demo import demo

from tools.peers import lm_eval

# As `hf` it says what the file beside it says; as `local-completions` it asks, and notes what it
# got. OFF is added to the first choice's log-probability.
STAND_IN = """
import argparse, json, pathlib, sys
import httpx, tokenizers
OFF = 0.0
HERE = pathlib.Path(__file__).parent
parser = argparse.ArgumentParser()
for name in ("model", "model_args", "include_path", "tasks", "batch_size", "output_path"):
    parser.add_argument(f"--{name}")
parser.add_argument("--log_samples", action="store_true")
given = parser.parse_args()
folder = pathlib.Path(given.include_path)
task = json.loads((folder / f"{given.tasks}.yaml").read_text())
lines = pathlib.Path(task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
settings = dict(pair.split("=", 1) for pair in given.model_args.split(","))
place = settings.get("tokenizer", settings.get("pretrained"))
tokenizer = tokenizers.Tokenizer.from_file(f"{place}/tokenizer.json")
samples = []
for number, doc in enumerate(map(json.loads, lines)):
    texts = [f"{doc['question']} {choice}" for choice in doc["choices"]]
    if given.model == "hf":
        resps = json.loads((HERE / "hf.json").read_text())[number]
    else:
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        first = len(tokenizer.encode(doc["question"], add_special_tokens=False).ids)
        body = {"prompt": ids if settings["tokenized_requests"] == "True" else texts, "seed": 1234,
                "model": settings["model"], "temperature": 0, "max_tokens": 1, "logprobs": 1,
                "echo": True}
        reply = httpx.post(settings["base_url"], json=body, timeout=60).raise_for_status().json()
        resps = [[[sum(c["logprobs"]["token_logprobs"][first:-1]), "False"]]
                 for c in reply["choices"]]
    samples.append({"doc_id": number, "resps": resps})
if given.model != "hf":
    (HERE / "hf.json").write_text(json.dumps([one["resps"] for one in samples]))
    samples[0]["resps"][0][0][0] += OFF
out = pathlib.Path(given.output_path) / "model"
out.mkdir()
found = {"results": {given.tasks: {"acc,none": 0.5, "acc_norm,none": 0.25}}}
(out / "results_now.json").write_text(json.dumps(found))
lines = [json.dumps(sample) for sample in reversed(samples)]
(out / "samples_now.jsonl").write_text("\\n".join(lines))
"""


@pytest.fixture
def harness(tmp_path: Path) -> Path:
    """A program in the harness's place. Its hf says what transformers has computed."""
    program = tmp_path / "harness"
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.argv[1:3] = []\n{STAND_IN}")
    program.chmod(0o755)
    return program


def reference() -> list[list[list[list[float | str]]]]:
    """Of each question's choices, transformers' log-probabilities in float64."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(demo.MODEL, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)

    def score(question: str, choice: str) -> float:
        first = len(tokenizer.encode(question, add_special_tokens=False))
        ids = tokenizer.encode(f"{question} {choice}", add_special_tokens=False)
        with torch.inference_mode():
            found = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
        return sum(found[row - 1, ids[row]].item() for row in range(first, len(ids)))

    return [
        [[[score(question, choice), "False"]] for choice in choices]
        for question, choices, _ in lm_eval.QUESTIONS
    ]


def test_a_server_has_transformers_scores(harness: Path, capsys: pytest.CaptureFixture) -> None:
    (harness.parent / "hf.json").write_text(json.dumps(reference()))
    assert lm_eval.main(["--harness", str(harness)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| hf | 0.500 | 0.250 |  |"
    rows = [line.strip("| ").split(" | ") for line in lines[3:]]
    assert [row[0] for row in rows] == ["tinsmith, ids", "tinsmith, texts"]
    assert all(0 < float(row[3]) < lm_eval.MOST for row in rows)
    harness.write_text(harness.read_text().replace("OFF = 0.0", "OFF = 1e-3"))
    assert lm_eval.main(["--harness", str(harness)]) == 1
    assert "1.0e-03" in capsys.readouterr().out


def test_accuracies_and_flags_are_compared() -> None:
    one = lm_eval.Scored(0.5, 0.25, [[(-1.0, True), (-2.5, False)]])
    near = lm_eval.Scored(0.5, 0.25, [[(-1.0, True), (-2.25, False)]])
    assert lm_eval.agree(one, near) and lm_eval.difference(one, near) == 0.25
    for other in (
        lm_eval.Scored(0.6, 0.25, one.choices),
        lm_eval.Scored(0.5, 0.2, one.choices),
        lm_eval.Scored(0.5, 0.25, [[(-1.0, True), (-2.5, True)]]),
    ):
        assert not lm_eval.agree(one, other)


def test_what_can_not_be_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        lm_eval.main(["--model", str(tmp_path)])
    assert ended.value.code == 2
    assert f"{tmp_path} is no folder with a config.json" in capsys.readouterr().err
    program = tmp_path / "broken"
    program.write_text(f"#!{sys.executable}\nraise SystemExit('no such task')")
    program.chmod(0o755)
    with pytest.raises(SystemExit, match="lm_eval as hf ended with 1:\nno such task"):
        lm_eval.main(["--harness", str(program)])
