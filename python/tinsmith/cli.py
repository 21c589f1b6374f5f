"""The `tinsmith` command. An error is one sentence on stderr and exit code 1 (2: wrong usage).

Each subcommand imports what it needs when it runs, so that `doctor` can tell what is missing.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module, metadata
from pathlib import Path

from tinsmith import console, talk
from tinsmith.engine.errors import sentence
from tinsmith.server.clients import CHECKPOINTS, require_server

PACKAGES = (
    "tinker",
    "tinker-cookbook",
    "starlette",
    "uvicorn",
    "tokenizers",
    "jinja2",
    "zstandard",
    "pyrage",
    "prometheus-client",
)

HELP_MODEL = (
    "a base model: NAME=FOLDER serves a Hugging Face model's folder under a name; a name alone is "
    "a folder, or is looked for in the Hugging Face cache"
)
LEAVE_SECONDS = 1.5  # after which `serve` ends, whatever it is doing
EXAMPLES = """examples:
  tinsmith demo
  tinsmith run -m tinker_cookbook.recipes.sdft.train model_name=models/qwen3 ...
  tinsmith serve Qwen/Qwen3-0.6B=models/qwen3 teacher=models/qwen3-8b --memory 40G
  tinsmith chat models/qwen3 --adapter tinker://RUN/sampler_weights/final
  tinsmith sample models/qwen3 --chat "What is LoRA?" --temperature 0
  tinsmith info models/qwen3 --tokens 8192 --rank 32
  tinsmith export models/qwen3 tinker://RUN/weights/final models/qwen3-tuned
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["demo"]:  # it has options of its own
            return _demo(given[1:])
        options = _parser().parse_args(given)
        code = int(options.command(options) or 0)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `tinsmith doctor | head`: what is left has no reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        print(f"tinsmith: {sentence(error)}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tinsmith",
        description="A local backend for the Tinker API: trains and samples on this machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    serve = commands.add_parser("serve", help="serve models until Ctrl-C")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    serve.add_argument("--port", type=int, default=8000, help="0 takes a free one (%(default)s)")
    _add_access(serve)
    serve.add_argument("models", nargs="*", metavar="NAME[=FOLDER]", help=HELP_MODEL)
    _add_engine(serve)
    serve.add_argument(
        "--preload",
        action=argparse.BooleanOptionalAction,
        help="load the models before listening, not on first use (default: if there is but one)",
    )
    console.add_options(serve)
    serve.set_defaults(command=_serve)

    run = commands.add_parser(
        "run",
        help="run a recipe on a backend of its own",
        description="Starts a backend, runs a recipe that uses the Tinker SDK, and stops. The "
        "models that its model_name=... and the like name are served, or else its defaults; and "
        "those of --model. With the recipe's --help it shows the recipe's own help.",
    )
    _add_engine(run)
    run.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE ...",
        help="a module and its arguments, as in python -m",
    )
    run.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="or a script's path and its"
    )
    console.add_options(run)
    run.set_defaults(command=_run)

    talk.add_parsers(commands)

    commands.add_parser("demo", help="watch a small model learn from demonstrations")

    doctor = commands.add_parser("doctor", help="what this installation can do, and why not more")
    doctor.set_defaults(command=_doctor)

    info = commands.add_parser("info", help="the memory that a model would take")
    info.add_argument("model", help="a folder, or a name in the Hugging Face cache")
    info.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="(%(default)s)")
    info.add_argument("--tokens", type=int, default=0, help="of a training step (0: the default)")
    info.add_argument("--rank", type=int, default=32, help="of a LoRA adapter (%(default)s)")
    info.add_argument(
        "--step-memory", help="that a training step may take, like 6G (half the rest)"
    )
    info.set_defaults(command=_info)

    export = commands.add_parser(
        "export",
        help="merge an adapter into its base model",
        description="Writes a Hugging Face folder of the base model with the adapter merged in.",
    )
    export.add_argument("model", help="a folder, or a name in the Hugging Face cache")
    export.add_argument("adapter", help="a checkpoint's or PEFT's folder, or a tinker:// path")
    export.add_argument("out", type=Path, help="the folder to write, which may not exist")
    _add_checkpoints(export)
    export.set_defaults(command=_export)
    return parser


def _add_access(parser: argparse.ArgumentParser) -> None:
    key = parser.add_mutually_exclusive_group()
    key.add_argument("--api-key", metavar="KEY", help="clients' TINKER_API_KEY must be this one")
    key.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="the same, read from a file: other users see a command line",
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


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path(CHECKPOINTS),
        metavar="FOLDER",
        help="where save_state writes to (./%(default)s)",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME[=FOLDER]",
        help=HELP_MODEL + ". May be given several times.",
    )  # fmt: skip
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="what models, caches and runs may take together, such as 800M or 12G; idle "
        "models make room for others; requests and results that wait take a third more at most "
        "(default: nine tenths of the machine's or the card's)",
    )
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="(%(default)s)"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="what products with base weights are computed in; auto: bfloat16 for a bf16 model "
        "where that is faster on this processor, else float32",
    )
    _add_checkpoints(parser)
    parser.add_argument("--threads", type=int, default=0, help="0: one for each core")
    parser.add_argument(
        "--seed", type=int, help="requests without a seed then draw the same in each run"
    )


def _models(options: argparse.Namespace) -> dict[str, Path]:
    from tinsmith.files.families import find_model

    models = {}
    for text in [*getattr(options, "models", []), *options.model]:
        name, equals, folder = text.partition("=")
        models[name] = find_model(folder if equals else name, {})
    return models


def _memory(options: argparse.Namespace) -> int | None:
    from tinsmith.engine.bases import parse_bytes

    return None if options.memory is None else parse_bytes(options.memory)


def _serve(options: argparse.Namespace) -> None:
    models = _models(options)
    if not models:
        raise ValueError("there is no model to serve: name one, as in tinsmith serve NAME=FOLDER")
    require_server()
    from tinsmith.server.backend import API_KEY, Backend
    from tinsmith.server.connections import allow_files

    allow_files()
    console.start_log(options)
    key = options.api_key
    if options.api_key_file is not None:
        key = options.api_key_file.read_text().strip()
    with Backend(
        models,
        checkpoints=options.checkpoints,
        host=options.host,
        port=options.port,
        api_key=key,
        allow_hosts=options.allow_host,
        allow_origins=options.allow_origin,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        memory=_memory(options),
        preload=options.preload,
        seed=options.seed,
    ) as backend:
        print(f"tinsmith serves {', '.join(models)} at {backend.url}")
        print(f"checkpoints are in {backend.checkpoints}; in a client's shell:")
        shown = API_KEY if key is None else "(the server's key)"
        print(f"  export TINKER_BASE_URL={backend.url} TINKER_API_KEY={shown}", flush=True)
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        signal.signal(signal.SIGINT, lambda *_: ended.set())
        with console.console(options, backend):
            ended.wait()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C doesn't wait
        # What was answered is on disk. A save that takes longer leaves the checkpoint as it was;
        # the next start clears what there is of it.
        leave = threading.Timer(LEAVE_SECONDS, os._exit, (0,))
        leave.daemon = True
        leave.start()


def _run(options: argparse.Namespace) -> int:
    from tinsmith.run import run_recipe, show_help
    from tinsmith.wanted import asks_for_help, refusal, wanted_models

    command = ["-m", *options.module] if options.module else options.script
    if not command:
        raise ValueError("say what to run: tinsmith run -m MODULE ..., or tinsmith run SCRIPT ...")
    if asks_for_help(command):
        return show_help(command)
    wanted = wanted_models(command)
    models = wanted.found | _models(options)
    if not models:
        raise ValueError(refusal(command, wanted.missing))
    require_server()
    console.start_log(options)
    return run_recipe(
        command,
        models,
        partial(console.console, options),
        checkpoints=options.checkpoints,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        memory=_memory(options),
        seed=options.seed,
    )


def _demo(arguments: Sequence[str]) -> int:
    require_server()
    return int(import_module("tinsmith.demo.demo").main(arguments) or 0)


def _doctor(options: argparse.Namespace) -> None:
    from tinsmith.engine.worker import devices

    print(f"tinsmith {_version('tinsmith') or '(not installed)'}, Python {sys.version.split()[0]}")
    for name, reason in devices().items():
        if name != "cuda-emulated":  # which only the tests have
            print(f"device {reason or name + ': ready'}")
    for name in PACKAGES:
        extra = "cookbook" if name == "tinker-cookbook" else "server"
        missing = f"is not installed: pip install 'tinsmith[{extra}]'"
        print(f"{name} {_version(name) or missing}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _info(options: argparse.Namespace) -> None:
    from tinsmith.engine.bases import parse_bytes, readable
    from tinsmith.engine.worker import plan
    from tinsmith.files.families import element_type, find_model, left_aside, read_config

    folder = find_model(options.model, {})
    config, inv_freq = read_config(folder)
    kind = element_type(folder)
    sizes = plan(
        config,
        inv_freq,
        kind,
        rank=options.rank,
        tokens=options.tokens,
        step_bytes=parse_bytes(options.step_memory) if options.step_memory else 0,
        device=options.device,
    )
    print(f"{folder}: {int(config['layers'])} layers, width {int(config['width'])}, {kind}")
    if aside := left_aside(folder):
        tensors = ", ".join(f"{count} tensors of {prefix}*" for prefix, count in aside.items())
        print(f"left aside, because text does not need them: {tensors}")
    kept = _kept(sizes, int(config["layers"]))
    labels = {
        "weights": "base weights",
        "adapter": f"one adapter of rank {options.rank}, with gradients and optimizer",
        "step": f"a training step of {sizes['step_tokens']} tokens, which {kept}",
        "own": "what the device's ops need for themselves",
        "cache": _cache(sizes),
    }
    for key, label in labels.items():
        print(f"{readable(sizes[key]):>12}  {label}")
    total, free = sum(sizes[key] for key in labels), sizes["free"]
    print(
        f"{readable(total):>12}  in all; device {options.device} can give {readable(free)} of its "
        f"{readable(sizes['all'])}{'' if total <= free else ', which is too little'}"
    )
    bound = ", the model's context" if sizes["longest"] == int(config["context"]) else ""
    longest = f"the longest datum that can be trained has {sizes['longest']} tokens{bound}"
    print(
        "Sampling fills the KV cache and keeps it for prompts that begin alike (prefix cache): "
        "by default a quarter of what the weights leave; of serve's --memory, if that is given."
    )
    print(
        f"A training step may take {readable(sizes['step_most'])}; "
        f"{longest if sizes['longest'] else 'no datum can be trained in that'}."
    )


def _kept(sizes: Mapping[str, int], layers: int) -> str:
    """The part of its layers' activations that a step keeps, as the end of a sentence."""
    if not sizes["attention_kept"]:
        return "is more than it may take"
    if sizes["kept"] == layers:
        return f"keeps all of its {layers} layers"
    return (
        f"keeps {sizes['kept']} of its {layers} layers, attention's part of "
        f"{sizes['attention_kept']}, and makes the rest again"
    )


def _cache(sizes: Mapping[str, int]) -> str:
    """What a sampler's cache holds."""
    from tinsmith.engine.bases import readable

    pages = f"a KV cache of {sizes['cache_tokens']} tokens, {readable(sizes['kv_token'])} each"
    if not sizes["states"]:
        return pages
    one = readable(sizes["kv_sequence"])
    return f"{pages}, and the states of {sizes['states']} sequences, {one} each"


def _export(options: argparse.Namespace) -> None:
    from tinsmith.files.export import export, find_adapter
    from tinsmith.files.families import find_model

    folder = find_adapter(options.adapter, options.checkpoints)
    count = export(find_model(options.model, {}), folder, options.out)
    print(f"{options.out}: {count} matrices of {options.model} changed by {folder}")


if __name__ == "__main__":
    sys.exit(main())
