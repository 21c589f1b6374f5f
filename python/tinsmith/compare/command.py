"""`tinsmith compare`: its options, the checks before anything starts, and its outputs."""

import argparse
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tinsmith.cli import argument_types, console, pull
from tinsmith.compare import report
from tinsmith.compare.data import (
    Record,
    digest,
    hold_out,
    model_digest,
    read_records,
    refuse_known,
)
from tinsmith.compare.measure import find_scorer
from tinsmith.compare.methods import METHODS, check_skipped, check_vocabulary, with_settings
from tinsmith.compare.plan import MODEL, Plan, alone, begin, missing, read_plan
from tinsmith.models.registry import read_config
from tinsmith.server.clients import require_server
from tinsmith.system.home import checkpoints_folder
from tinsmith.system.install_hints import pip_install

EPOCHS = 3  # over the data, if --steps is not given
STEPS_MAX, BATCH_MAX = 1 << 20, 1 << 12


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    _add_questions(parser)
    _add_training(parser)
    parser.add_argument(
        "--demonstration",
        choices=("words", "turn"),
        default="words",
        help="how SDFT's and OPSD's teacher reads the answer: in the words of the cookbook's SDFT "
        "recipe, or as an earlier turn, which small models follow better (%(default)s)",
    )
    group = parser.add_argument_group("methods and their settings", _settings_help())
    group.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="METHOD.SETTING=VALUE",
        help="a method's own setting; may be given several times; they are listed here",
    )
    parser.add_argument(
        "--out",
        type=argument_types.folder,
        default=Path("tinsmith-compare"),
        metavar="FOLDER",
        help="for results; where it has some of the runs, the others are done (%(default)s)",
    )
    parser.add_argument(
        "--memory",
        type=argument_types.memory,
        metavar="SIZE",
        help="what the model, its caches and runs may take together, such as 12G",
    )
    argument_types.add_device(parser)
    argument_types.add_stages(parser)
    argument_types.add_replicas(parser)
    argument_types.add_dtype(parser)
    argument_types.add_weights(parser)
    argument_types.add_checkpoints(parser, "where the trained adapters are saved")
    console.add_options(parser)


def _add_questions(parser: argparse.ArgumentParser) -> None:
    """Adds the model, and its questions."""
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="NAME[=FOLDER]",
        help="the base model: a folder, a GGUF file, a name in the Hugging Face cache, or a name "
        "and the folder that is served under it",
    )
    argument_types.add_pull(parser)
    add(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="what is to be learned: JSONL with a question and its answer on each line, such as "
        "messages (the last one the answer), problem and solution, or prompt and golden_response",
    )
    add(
        "--test",
        type=Path,
        metavar="FILE",
        help="questions that measure what was learned, in the same forms (default: --hold-out)",
    )
    add(
        "--hold-out",
        type=argument_types.whole(1),
        metavar="N",
        help="rows of --data that are measured with and not trained on (default: a fifth, at most "
        "100)",
    )
    add(
        "--retain",
        type=Path,
        required=True,
        metavar="FILE",
        help="questions, and plain texts, that measure what is kept of what the model could do "
        "before",
    )
    add(
        "--scorer",
        metavar="MODULE:FUNCTION",
        help="a function of one's own for both measurements: of the model's answer, the file's "
        "answer and the line's object; returns a number, or a number and what to say of the answer",
    )
    add(
        "--renderer",
        metavar="NAME",
        help="the cookbook's renderer, such as qwen3 (default: by the model's name)",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    """Adds what is trained, and how."""
    add = parser.add_argument
    add(
        "--methods",
        type=_methods,
        default=["sft", "sdft", "opsd"],
        metavar="LIST",
        help=f"of {', '.join(METHODS)}, with commas between them (sft,sdft,opsd)",
    )
    add(
        "--lr",
        type=argument_types.rates,
        default=[5e-4],
        metavar="LIST",
        help="learning rates, with commas between them; each method is trained with each (5e-4)",
    )
    add(
        "--seeds",
        type=argument_types.whole(1, argument_types.SEEDS_MAX),
        default=3,
        metavar="N",
        help="trainings of each method at each rate; intervals need two (%(default)s)",
    )
    add(
        "--steps",
        type=argument_types.whole(1, STEPS_MAX),
        metavar="N",
        help="of each training (default: three times over the data)",
    )
    add(
        "--batch",
        type=argument_types.whole(1, BATCH_MAX),
        default=16,
        metavar="N",
        help="questions a step (%(default)s)",
    )
    add(
        "--rank",
        type=argument_types.whole(1, argument_types.RANK_MAX),
        default=32,
        metavar="N",
        help="of the LoRA adapters (%(default)s)",
    )
    add(
        "--max-tokens",
        type=argument_types.whole(1, argument_types.TOKENS_MAX),
        default=512,
        metavar="N",
        help="of an answer, in training and in measuring (%(default)s)",
    )


def _settings_help() -> str:
    """Each method and its settings."""
    lines = []
    for name, method in METHODS.items():
        lines += [f"{name}:"]
        lines += [
            f"  --set {name}.{key}={setting.default:g}  {setting.help}"
            for key, setting in method.settings.items()
        ] or ["  no settings of its own"]
    return "\n".join(["with their defaults", *lines])


def _methods(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in METHODS:
            known = ", ".join(METHODS)
            raise argparse.ArgumentTypeError(f"there is no method {name!r:.60}; there are {known}")
    return argument_types.once(names, text)


# ---- the command ----


def run(options: argparse.Namespace) -> int:
    """Does the missing runs of a comparison, and shows all; returns the exit code."""
    if options.test and options.hold_out:
        raise ValueError("--hold-out is for a comparison without --test: give one of the two")
    methods = with_settings(options.methods, options.changes)
    check_skipped(methods, options.max_tokens)
    files = {
        key: path.resolve()
        for key in ("data", "test", "retain")
        if (path := getattr(options, key)) is not None
    }
    train, sides = _read(options)
    if options.scorer:
        find_scorer(options.scorer)
    name, _, folder = options.model.partition("=")
    model = pull.find(folder or name, fetch=options.pull)
    shape = read_config(model)[0]
    check_vocabulary(methods, int(shape["vocab"]))
    require_server()
    require_cookbook()
    from tinsmith.compare.prompts import renderer_of

    plan = Plan(
        model=name,
        data=str(files["data"]),
        test=str(files["test"]) if "test" in files else None,
        retain=str(files["retain"]),
        hold_out=None if options.test else len(sides["learned"]),
        renderer=renderer_of(name, options.renderer),
        scorer=options.scorer,
        steps=options.steps or -(-EPOCHS * len(train) // options.batch),
        batch=options.batch,
        rank=options.rank,
        max_tokens=options.max_tokens,
        context=int(shape["context"]),
        methods=methods,
        digests={key: digest(path) for key, path in files.items()} | {MODEL: model_digest(model)},
        demonstration=options.demonstration,
        wanted=options.methods,
        learning_rates=options.lr,
        seeds=options.seeds,
        weights=options.weights,
        dtype=options.dtype,
    )
    _check_lengths(plan, model, train, sides)
    out = options.out.resolve()
    with alone(out):
        begin(out, plan)
        plan = read_plan(out)
        about = report.settings_text(plan, len(train), {k: len(v) for k, v in sides.items()})
        print(about, flush=True)
        code = _do_missing(options, plan, out, model)
        if found := report.groups(out):
            show(out, found, about)
        wanted = plan.runs()
        if left := missing(out, wanted):
            print(f"{len(left)} of the {len(wanted)} runs are missing: the same command does them")
    return code


def require_cookbook() -> None:
    """Raises ImportError with the fix if the cookbook or matplotlib is not installed."""
    for name in ("tinker_cookbook", "matplotlib"):
        if find_spec(name) is None:
            raise ImportError(f"compare needs {name}: {pip_install('cookbook')}", name=name)


def _read(options: argparse.Namespace) -> tuple[list[Record], dict[str, list[Record]]]:
    """The training data, and the questions of each side; all files are checked."""
    train, retain = read_records(options.data), read_records(options.retain, texts=True)
    if options.test:
        test = read_records(options.test)
        refuse_known(options.test, test, options.data, train)
        return train, {"learned": test, "kept": retain}
    train, test = hold_out(train, options.hold_out)
    return train, {"learned": test, "kept": retain}


def _check_lengths(
    plan: Plan, model: Path, train: Sequence[Record], sides: dict[str, list[Record]]
) -> None:
    """Raises ValueError with the file and line of a record that doesn't fit the model's context."""
    from tinsmith.compare.prompts import Prompts

    prompts = Prompts(model, plan.renderer, plan.demonstration)
    for path, records in (
        (plan.data, train),
        (plan.test or plan.data, sides["learned"]),
        (plan.retain, sides["kept"]),
    ):
        prompts.check(path, records, plan.max_tokens, plan.context)


def _do_missing(options: argparse.Namespace, plan: Plan, out: Path, model: Path) -> int:
    """Starts a server and the runner beside it, unless nothing is missing."""
    from tinsmith.cli.run import run_recipe

    wanted = plan.runs()
    todo = missing(out, wanted)
    if len(todo) < len(wanted):
        there = len(wanted) - len(todo)
        print(f"{there} of the {len(wanted)} runs are in {out}: {len(todo)} to do", flush=True)
    if not todo:
        return 0
    with console.log_to_stderr(options):
        return run_recipe(
            ["-m", "tinsmith.compare.runner", str(out)],
            {plan.model: model},
            partial(console.console, options),
            checkpoints=checkpoints_folder(options.checkpoints),
            **argument_types.engine(options),
        )


def show(out: Path, found: Sequence[report.Group], about: str) -> None:
    """Prints and writes the table, and writes the CSV and the picture."""
    from tinsmith.compare.picture import draw

    text = report.markdown(report.table(found))
    print(f"\n{text}")
    (out / "results.csv").write_text(report.csv_text(found), encoding="utf-8")
    (out / "report.md").write_text(f"{about}\n{text}\n![](compare.png)\n", encoding="utf-8")
    draw(found, out / "compare.png")
    print(f"{out}: report.md, compare.png, results.csv; in runs/ the answers of each")
