"""Options of the command line: the values that they accept, and the errors for other values.

A wrong command line is refused before anything is read or started, in one line on stderr with exit
code 2. A type here turns an argument's text into its value; argparse names the option.
"""

import argparse
import difflib
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from tinsmith import _core
from tinsmith.engine.image_cache import IMAGE_TOKENS

DTYPE_HELP = (
    "what products with base weights are computed in; auto: bfloat16 for a bf16 model where that "
    "is faster on this processor, else float32, where weights of 8 to 4 bits (not FP8 and NF4) "
    "take inputs rounded to 16 bits"
)
DEVICE_HELP = "auto, cpu, cuda, or cuda:1 and so on for another GPU (default: %(default)s)"
DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")
SAMPLES_MAX = 1 << 16
RANK_MAX = 4096
TOKENS_MAX = 1 << 30
IMAGE_TOKENS_MAX = 1 << 20
THREADS_MAX = 256
PORT_MAX = (1 << 16) - 1
KEPT_MAX = 1 << 30
UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}  # in seconds
AGE_MAX = 1e10  # some 300 years
DEMO_STEPS_MAX = 300  # there are few more distinct questions
DEMO_STEPS, DEMO_RATES, DEMO_OUT = 32, [5e-4, 2.5e-3, 5e-3], "tinsmith-demo"
REAL_STEPS, REAL_OUT = 28, "tinsmith-demo-real"
IMAGES_STEPS, IMAGES_RATE, IMAGES_OUT = 100, 5e-3, "tinsmith-demo-images"
SEEDS_MAX = 30
ISAS = "generic", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx"
RATE_MAX = 1.0
# Names of our commands in other programs.
COMMANDS = {
    "ls": "list", "ps": "list", "models": "list", "rm": "prune", "delete": "prune",
    "clean": "prune", "train": "run", "finetune": "run", "generate": "sample",
    "complete": "sample", "eval": "compare", "evaluate": "compare", "download": "pull",
    "get": "pull", "start": "serve", "up": "serve", "status": "doctor", "show": "info",
    "convert": "export", "merge": "export",
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line. Multi-line texts, such as the examples at the end of a
    help, stay unchanged."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **({"formatter_class": _Shape} | options))

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit code 2."""
        text = _nearest(message.removeprefix("argument "))
        self.exit(2, f"{self.prog}: {text}; see {self.prog} --help\n")


def _nearest(message: str) -> str:
    """An error about a choice, with the nearest valid choice if one is near."""
    found = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message, re.DOTALL)
    if found is None:
        return message
    given, known = found[1], re.findall(r"[\w.-]+", found[2])
    near = [COMMANDS.get(given, "")] if "serve" in known else []
    near = [one for one in near if one in known] or difflib.get_close_matches(given, known, 1)
    return f"{message}; did you mean {near[0]}?" if near else message


class _Shape(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def epilog(examples: Iterable[str]) -> str:
    """The end of a help text."""
    lines = [f"  {example}" for example in examples]
    return "\n".join(["example:" if len(lines) == 1 else "examples:", *lines])


# ---- values ----


def _number(
    kind: Callable[[str], Any], what: str, fits: Callable[[Any], bool] = lambda value: True
) -> Callable[[str], Any]:
    """A type: a number that fits; `what` describes which ones do."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
            if fits(value):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"it should be {what}; {text!r:.60} came")

    return read


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A type: a whole number within inclusive bounds."""
    bounds = f"at least {least}" if most is None else f"from {least} to {most}"
    return _number(
        int,
        f"a whole number, {bounds}",
        lambda value: least <= value and (most is None or value <= most),
    )


seed = _number(int, "a whole number")
temperature = _number(float, "a number, at least 0", lambda value: 0 <= value < math.inf)
share = _number(float, "a number above 0, at most 1", lambda value: 0 < value <= 1)
age = _number(
    lambda text: float(text[:-1]) * UNITS.get(text[-1:], math.nan),
    "a length of time above 0, like 90m, 12h, 30d or 8w",
    lambda seconds: 0 < seconds < AGE_MAX,
)
_rate = _number(
    lambda text: float(f"{float(text):g}"),  # as it is shown, and as in a run's name
    f"a learning rate above 0, at most {RATE_MAX:g}",
    lambda rate: 0 < rate <= RATE_MAX,
)


def rates(text: str) -> list[float]:
    """Comma-separated learning rates, without duplicates."""
    return once([_rate(part) for part in text.split(",")], text)


def once(values: list[Any], text: str) -> list[Any]:
    """The values of a list; an error if one occurs twice."""
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text!r:.200} names something twice")
    return values


def memory(text: str) -> int:
    """A type: an amount of memory in bytes."""
    from tinsmith.engine.bases import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def device(text: str) -> str:
    """A type: the name of a device. The first GPU is cuda."""
    if not DEVICE.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"it should be auto, cpu, cuda, or cuda:1 for the second GPU; {text!r:.60} came"
        )
    return text.removesuffix(":0")


def file(text: str) -> Path:
    """A type: a file that exists."""
    path = Path(text).expanduser()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"it should be a file; {text!r:.200} is none")
    return path


def folder(text: str) -> Path:
    """A type: a folder that exists, or could be created."""
    path = Path(text)
    taken = next((place for place in (path, *path.parents) if _exists(place)), path)
    if not text or "\0" in text or (_exists(taken) and not taken.is_dir()):
        raise argparse.ArgumentTypeError(f"{text!r:.200} can't be a folder")
    return path


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


# ---- options that several commands have ----


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the model argument."""
    parser.add_argument(
        "model",
        help="a folder, a GGUF file, or a name in the Hugging Face cache (NAME or NAME@REVISION)",
    )
    add_pull(parser)


def add_pull(parser: argparse.ArgumentParser) -> None:
    """Adds --pull, which fetches models that are not on this machine."""
    parser.add_argument(
        "--pull",
        action="store_true",
        help="fetch a model that is not on this machine from the Hugging Face hub",
    )


def add_device_name(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds the name of a device."""
    parser.add_argument("--device", default=default, type=device, metavar="NAME", help=DEVICE_HELP)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds the engine's device and threads."""
    add_device_name(parser, "auto")
    parser.add_argument(
        "--threads",
        type=whole(0, THREADS_MAX),
        default=0,
        help="how many threads compute (default: one for each core)",
    )


def add_stages(parser: argparse.ArgumentParser) -> None:
    """Adds the number of devices that hold a model."""
    parser.add_argument(
        "--stages",
        type=whole(1, _core.STAGES),
        default=1,
        metavar="N",
        help="how many GPUs hold a model that is too large for one, each a part of its layers; the "
        "results are the same (default: %(default)s)",
    )


def replicas(text: str) -> int | str:
    """A type: a number of replicas, or "auto"."""
    from tinsmith.replicas.local import replicas_from

    try:
        return replicas_from(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def ray_address(text: str) -> str:
    """A type: a Ray cluster's address, or "auto"."""
    from tinsmith.replicas.local import address_from

    try:
        return address_from(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_replicas(parser: argparse.ArgumentParser) -> None:
    """Adds the number of processes that compute, and what they must have in common."""
    parser.add_argument(
        "--replicas",
        type=replicas,
        default=1,
        metavar="N",
        help="how many processes compute, each with a GPU or its share of the cores; auto: all "
        "GPUs of the device's kind; the results are the same (default: %(default)s)",
    )
    add_ray(parser)
    parser.add_argument(
        "--isa",
        choices=ISAS,
        help="the widest instruction set of the CPU to use, so that unlike processors give the "
        "same bits (default: the widest it has)",
    )
    parser.add_argument(
        "--mixed", action="store_true", help="let replicas join that give other bits"
    )


def add_ray(parser: argparse.ArgumentParser) -> None:
    """Adds the address of a Ray cluster."""
    parser.add_argument(
        "--ray",
        type=ray_address,
        metavar="ADDRESS",
        help="the Ray cluster for replicas, HOST:6379, or auto: the one that this machine is a "
        "node of; it must be running (default: replicas are on this machine)",
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Adds the dtype of products with base weights."""
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help=DTYPE_HELP
    )


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Adds the format of base weights in memory, and their copy on disk."""
    parser.add_argument(
        "--weights",
        default="stored",
        choices=("stored", "bf16", "int8", "int4"),
        help="how base weights are kept in memory: int8 takes half of bf16's bytes and int4 0.28; "
        "both round the weights (default: as they are stored)",
    )
    parser.add_argument(
        "--weights-copy",
        default=True,
        action=argparse.BooleanOptionalAction,
        help="keep int8 or int4 weights of a large model in ~/.cache/tinsmith/weights, where later "
        "loads find them in seconds and processes share them; on the CPU (default: yes)",
    )


def engine(options: argparse.Namespace, *more: str) -> dict[str, Any]:
    """The options for the engine, and `more`, under the names of ServerConfig. --isa holds from
    here on, for this process and its children."""
    if options.isa is not None:
        os.environ["TINSMITH_ISA"] = options.isa
        _core.use_isa(options.isa)
    names = ["device", "stages", "dtype", "weights", "weights_copy", "threads", "memory", *more]
    return {name: getattr(options, name) for name in [*names, "replicas", "mixed", "ray"]}


def add_checkpoints(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds the folder of checkpoints; `what` says what it is used for."""
    parser.add_argument(
        "--checkpoints",
        type=folder,
        metavar="FOLDER",
        help=f"{what} (default: ~/.local/share/tinsmith/checkpoints; `tinsmith doctor` shows it)",
    )


def add_image_tokens(parser: argparse.ArgumentParser) -> None:
    """Adds the size of images."""
    parser.add_argument(
        "--image-tokens",
        type=whole(1, IMAGE_TOKENS_MAX),
        default=IMAGE_TOKENS,
        metavar="N",
        help="the most tokens of an image; a larger one is refused, as its tower takes long "
        "(default: %(default)s, 2048 by 2048 pixels)",
    )


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Adds the demonstration's options."""
    parser.add_argument(
        "--steps",
        type=whole(1, DEMO_STEPS_MAX),
        help=f"steps of each training (default: {DEMO_STEPS}; with --real {REAL_STEPS}, with "
        f"--images {IMAGES_STEPS})",
    )
    parser.add_argument(
        "--lr",
        type=rates,
        metavar="LIST",
        help="learning rates, with commas between them; each method is trained with each (default: "
        f"{','.join(f'{rate:g}' for rate in DEMO_RATES)}; with --real each has its own; --images "
        f"takes one: {IMAGES_RATE:g})",
    )
    parser.add_argument(
        "--own-notation",
        action="store_true",
        help="write the demonstrations in the notation that the model uses itself",
    )
    parser.add_argument(
        "--seed", type=seed, default=0, help="seed of all data (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=folder,
        metavar="FOLDER",
        help=f"where models, table and picture are written (default: {DEMO_OUT}; with --real "
        f"{REAL_OUT}, with --images {IMAGES_OUT})",
    )
    parser.add_argument(
        "--images",
        action="store_true",
        help="a small model with a vision tower learns five classes of clothes from real pictures",
    )
    parser.add_argument(
        "--real",
        action="store_true",
        help="SFT and SDFT on a real model, by `tinsmith compare`; it goes on where it was ended",
    )
    parser.add_argument(
        "--seeds",
        type=whole(1, SEEDS_MAX),
        metavar="N",
        help="with --real: how often each method is trained at each rate; two or more give "
        "intervals (default: 1)",
    )
    add_device(parser)
