"""Data for the cookbook's recipes: small sets of our own, in the formats that the recipes read.

A recipe that loads "openai/gsm8k" finds a folder of that name in the current one before it asks the
hub, so that `write` makes such a folder for each name. The questions are sums and the demonstration
model's tool calls: what is tested is the server, and what a recipe makes of its answers.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinsmith.demo import data

Row = dict[str, Any]


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_hub(folder: Path, config: str | None, **splits: Sequence[Row]) -> None:
    """A dataset as `load_dataset` reads it from a folder, under a configuration's name."""
    for split, rows in splits.items():
        write_rows(folder / f"{split}.jsonl", rows)
    if config:
        files = "".join(f"  - split: {s}\n    path: {s}.jsonl\n" for s in splits)
        card = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n"
        (folder / "README.md").write_text(card)


def turns(question: str, answer: str) -> list[Row]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def sums(count: int, seed: int) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    pairs = [(rng.randint(0, 99), rng.randint(0, 99)) for _ in range(count)]
    return [(f"What is {a} + {b}?", str(a + b)) for a, b in pairs]


def calls(count: int, seed: int) -> list[tuple[str, str]]:
    return [(e.question, e.answer) for e in data.sdft_examples(count, seed)]


def comparisons(count: int, seed: int) -> list[Row]:
    """Preferences in hh-rlhf's transcripts: the right call, and another question's."""
    pairs = calls(count, seed)
    others = [*pairs[1:], pairs[0]]
    text = "\n\nHuman: {}\n\nAssistant: {}".format
    return [
        {"chosen": text(question, right), "rejected": text(question, wrong)}
        for (question, right), (_, wrong) in zip(pairs, others, strict=True)
    ]


def feedback(count: int) -> list[Row]:
    rows = []
    for question, answer in sums(count, 6):
        row = {"orig_instruction": question, "orig_criteria": "Is the sum right?"}
        row |= {f"orig_score{i}_description": f"{i} of 5" for i in range(1, 6)}
        rows.append(row | {"orig_reference_answer": answer})
    return rows


def multiple_choice(count: int) -> list[Row]:
    """Questions in SciKnowEval's form."""
    rows = []
    for index, (question, answer) in enumerate(sums(count, 5)):
        place, wrong = index % 4, [str(int(answer) + step) for step in (1, 2, 3)]
        texts = [*wrong[:place], answer, *wrong[place:]]
        rows.append(
            {
                "question": question,
                "choices": {"label": list("ABCD"), "text": texts},
                "answerKey": "ABCD"[place],
                "type": "mcq-4-choices",
                "domain": "Chemistry",
                "details": {"level": "L3", "task": "sums", "subtask": "sums", "source": "ours"},
            }
        )
    return rows


def markets(count: int) -> list[Row]:
    """Prophet Arena's columns: half of the events before the recipes' split date, half after."""
    rows = []
    for index, (question, answer) in enumerate(sums(count, 7)):
        month = "09" if index % 2 else "11"
        claim = f"{question} {int(answer) + index % 3}"
        rows.append(
            {
                "submission_id": f"s{index}",
                "event_ticker": f"E{index}",
                "title": question,
                "snapshot_time": f"2025-{month}-01T00:00:00Z",
                "close_time": f"2025-{month}-02T00:00:00Z",
                "market_outcome": json.dumps({claim: int(index % 3 == 0)}),
                "category": "sums",
                "markets": json.dumps([claim]),
                "sources": json.dumps([{"ranking": 1, "title": "A book", "summary": answer}]),
            }
        )
    return rows


def write_csv(file: Path, rows: Sequence[Mapping[str, str]]) -> None:
    import csv

    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def science(count: int) -> dict[str, list[Any]]:
    """The continual learning recipe's second task."""
    pairs = sums(count, 8)
    asked = [{"role": "system", "content": "Add."}]
    return {
        "train": [
            {
                "messages": [*asked, {"role": "user", "content": question}],
                "output_text": f"<reasoning>\nI add.\n</reasoning>\n<answer>\n{answer}\n</answer>",
            }
            for question, answer in pairs
        ],
        "eval": [
            {"prompt": [*asked, {"role": "user", "content": question}], "answer": answer}
            for question, answer in pairs[:1]
        ],
    }


def tool_use(count: int) -> dict[str, list[Any]]:
    """The continual learning recipe's first task."""
    pairs = calls(count, 9)
    return {
        "train": [{"prompt": q, "golden_response": [a]} for q, a in pairs],
        "eval": [
            {"prompt": q, "golden_answer": [{"Action": "get_help", "Action_Input": "{}"}]}
            for q, _ in pairs[:2]
        ],
    }


def write_short_and_long(file: Path, rows: int) -> None:
    """math_rl's sums, answered with a number and with a tool call in turn."""
    shown = turns("What is 4 + 5?", "9")
    pairs = zip(sums(rows, 11), calls(rows, 11), strict=True)
    answers = [(q, (number, call)[i % 2]) for i, ((q, number), (_, call)) in enumerate(pairs)]
    write_rows(file, [{"messages": shown + turns(q, answer)} for q, answer in answers])


def write_pictures(folder: Path, rows: int) -> None:
    """Squares and discs as the classifier's sets of photos have them: files with labels."""
    import datasets
    from PIL import Image, ImageDraw

    kinds = ("a_square", "a_disc")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(kinds))}
    )
    for seed, split in enumerate(("train", "test")):
        random_gen, images = random.Random(seed), []
        for row in range(rows):
            image = Image.new("RGB", (96, 72), (255, 255, 255))
            x, y, size = (random_gen.randint(4, 30) for _ in range(3))
            draw = ImageDraw.Draw(image)
            shape = draw.ellipse if row % 2 else draw.rectangle
            shape((x, y, x + size + 8, y + size + 8), fill=(20 * row % 200, 80, 120))
            images.append(image)
        labels = [row % 2 for row in range(rows)]
        table = datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)
        file = folder / "data" / f"{split}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        table.to_parquet(str(file))


def write(folder: Path, rows: int) -> None:
    """Every data set, of `rows` rows, in a folder that is to be the recipes' current one."""
    import datasets

    datasets.disable_progress_bars()
    # sl_basic's batches of 128 are not to be changed, and it drops a batch that is not full.
    conversations = [{"messages": turns(q, a)} for q, a in calls(max(rows, 256), 1)]
    write_hub(folder / "HuggingFaceH4/no_robots", None, train=conversations, test=conversations)
    conversations = conversations[:rows]
    write_rows(folder / "conversations.jsonl", conversations)
    write_hub(folder / "allenai/tulu-3-sft-mixture", None, train=conversations)
    problems = [{"question": q, "answer": f"They add up.\n#### {a}"} for q, a in sums(rows, 2)]
    write_hub(folder / "openai/gsm8k", "main", train=problems, test=problems[:4])
    write_hub(
        folder / "zwhe99/DeepMath-103K", None, train=[{"question": q} for q, _ in sums(rows, 3)]
    )
    solved = [{"problem": q, "solution": f"It is \\boxed{{{a}}}."} for q, a in sums(4, 4)]
    write_hub(folder / "HuggingFaceH4/MATH-500", "default", test=solved)
    preferred = comparisons(rows, 4)
    write_hub(folder / "Anthropic/hh-rlhf", None, train=preferred, test=preferred[:4])
    thoughts = [
        {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}
        for q, a in calls(rows, 5)
    ]
    write_hub(folder / "open-thoughts/OpenThoughts3-1.2M", None, train=thoughts)
    write_hub(folder / "hicai-zju/SciKnowEval", None, test=multiple_choice(rows))
    text = [{"text": " ".join(a for _, a in calls(40, seed))} for seed in range(40)]
    write_hub(folder / "Salesforce/wikitext", "wikitext-103-raw-v1", train=text)
    write_hub(folder / "prometheus-eval/Feedback-Collection", None, train=feedback(rows))
    write_csv(folder / "markets.csv", markets(max(rows, 8)))
    write_pictures(folder / "dpdl-benchmark/caltech101", rows)
    questions = data.dataset_columns(data.sdft_examples(rows, 0))
    datasets.Dataset.from_dict(questions).save_to_disk(str(folder / "questions"))
    for name, task in (("tooluse_data", tool_use(rows)), ("science_data", science(rows))):
        for side in ("train", "eval"):
            table = datasets.Dataset.from_list(task[side])
            table.save_to_disk(str(folder / "continual" / name / f"{side}_data"))
    # Where the cookbook's repository has them: recipes that are run from its root read them there.
    sentences = folder / "tinker_cookbook/example_data/multilingual.txt"
    sentences.parent.mkdir(parents=True)
    sentences.write_text("".join(q + "\n" for q, _ in sums(2, 10)))
