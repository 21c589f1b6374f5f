"""How `tinsmith run` starts and ends a recipe: as `python` would; and its models' tokenizers."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.seeing_chat import chat_folder
from tinker.lib.public_interfaces import sampling_client
from tinker_cookbook import tokenizer_utils
from tinsmith import launch as launcher
from tinsmith.checkpoints.store import Store
from tinsmith.cli.run import recipe_name
from tinsmith.demo import demo
from tinsmith.server.records.database import State
from tinsmith.server.records.history import RunHistory
from transformers import AutoTokenizer

LAUNCH = (sys.executable, "-m", "tinsmith.launch")


def launch(*arguments: str, cwd: Path) -> str:
    command = [*LAUNCH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=True).stdout


def test_a_script_and_a_module_start_as_python_starts_them(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "neighbour.py").write_text("here = 'found'\n")
    text = "import sys, neighbour\nprint(__name__, neighbour.here, sys.argv[1:], __file__)\n"
    (scripts / "recipe.py").write_text(text)
    for command, folder in ((["scripts/recipe.py"], tmp_path), (["-m", "recipe"], scripts)):
        ran = subprocess.run(
            [sys.executable, *command, "a=1", "-b"],
            capture_output=True, text=True, cwd=folder, check=True,
        )  # fmt: skip
        assert launch(*command, "a=1", "-b", cwd=folder) == ran.stdout
        assert ran.stdout.startswith("__main__ found ['a=1', '-b']")


def test_a_name_of_another_model_finds_the_tokenizer_of_its_folder(tmp_path: Path) -> None:
    """Offline, where the hub's tokenizer of that name can't be had."""
    ended = subprocess.run(
        [
            sys.executable, "-m", "tinsmith.cli", "run", "--model", f"Qwen/Qwen3-8B={demo.MODEL}",
            "-m", "tinker_cookbook.recipes.decisions.demo", "model_name=Qwen/Qwen3-8B",
        ],
        input="What does it cost?\n\n", capture_output=True, text=True, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    shown = ended.stdout[ended.stdout.index("{") : ended.stdout.rindex("}") + 1]
    assert abs(sum(json.loads(shown).values()) - 1) < 1e-3


SAMPLER = """
import tinker
sampler = tinker.ServiceClient().create_sampling_client(base_model="Qwen/Qwen3-8B:peft:1024")
tokenizer = sampler.get_tokenizer()
print(len(tokenizer), tokenizer.encode("get_help"))
"""


def test_the_sdks_sampling_client_has_the_tokenizer_of_the_folder(tmp_path: Path) -> None:
    """The cookbook's first tutorial asked the hub for a tokenizer of that name: offline it failed,
    and else its ids were another model's."""
    (tmp_path / "sampler.py").write_text(SAMPLER)
    ended = subprocess.run(
        [
            sys.executable, "-m", "tinsmith.cli", "run", "--model", f"Qwen/Qwen3-8B={demo.MODEL}",
            "sampler.py",
        ],
        capture_output=True, text=True, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    own = AutoTokenizer.from_pretrained(demo.MODEL)
    assert ended.stdout.strip().endswith(f"{len(own)} {own.encode('get_help')}")


def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], str]]:
    """What will be registered with the cookbook; and the SDK's own function comes back."""
    made: dict[str, Callable[[], str]] = {}
    monkeypatch.setattr(tokenizer_utils, "register_tokenizer", made.__setitem__)
    monkeypatch.setattr(tokenizer_utils, "get_tokenizer", lambda folder: folder)
    monkeypatch.setattr(sampling_client, "_load_tokenizer_from_model_info", lambda *given: given)
    return made


def test_each_name_has_the_tokenizer_of_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    made = registered(monkeypatch)
    models = {
        "a/student": "/one",
        "a/teacher": Path("/other"),
        "/tmp": "/no",
        "/var/tmp": "/tmp/../var/tmp",
    }
    launcher.register_tokenizers(models)  # a name may also be that of another folder that is there
    found = {name: make() for name, make in made.items() if ":" not in name}
    assert found == {"a/student": "/one", "a/teacher": "/other", "/tmp": "/no"}
    load = sampling_client._load_tokenizer_from_model_info
    assert load("a/student") == ("a/student", "/one") and load("b/else") == ("b/else", None)
    assert load("a/teacher", "/the/server's") == ("a/teacher", "/the/server's")


def test_a_name_with_a_suffix_has_the_tokenizer_of_the_name_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`--model NAME=FOLDER` was not enough for a recipe that says NAME:peft:262144."""
    made = registered(monkeypatch)
    launcher.register_tokenizers({"a/b": "/one", "a/b:peft:65536": "/other"})
    assert made["a/b:peft:262144"]() == made["a/b:peft:32768"]() == made["a/b"]() == "/one"
    assert made["a/b:peft:65536"]() == "/other"
    load = sampling_client._load_tokenizer_from_model_info
    assert load("a/b:peft:32768") == ("a/b:peft:32768", "/one")
    assert load("a/b:peft:65536") == ("a/b:peft:65536", "/other")


THREAD = """
import threading, time
said = threading.Event()
def late():
    said.wait()
    time.sleep(0.2)
    print("from the other")
threading.Thread(target=late).start()
print("from the main thread")
said.set()
"""
CALLBACKS = """
import atexit, logging.handlers, sys
target = logging.StreamHandler(sys.stdout)
logging.getLogger().addHandler(logging.handlers.MemoryHandler(100, target=target))
logging.warning("a record that waits for the end")
atexit.register(print, "second, and ", end="")
atexit.register(print, "first", file=sys.stderr)
sys.exit(4)
"""
OBJECTS = """
import json
class Last:
    def __del__(self): print("deleted")
json.last = Last()
json.left_open = open("left_open.txt", "w")
json.left_open.write("a line")
"""
FORK = """
import os, sys
child = os.fork()
if not child:
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
sys.exit(6)
"""
PROCESSES = """
import multiprocessing, sys
def work(code): sys.exit(code)
if __name__ == "__main__":
    for code, method in enumerate(("fork", "spawn", "forkserver"), 1):
        process = multiprocessing.get_context(method).Process(target=work, args=(code,))
        process.start()
        process.join()
        print(method, process.exitcode)
"""
PIPE = """
import os, sys
reader, writer = os.pipe()
os.dup2(writer, 1)
os.close(reader), os.close(writer)
print("nobody reads this")
"""
ENDS = {  # the recipe, its process's exit code, the reported one, stdout, the end of stderr
    "a code": ("import sys; sys.exit(3)", 3, "3", "", ""),
    "a code below zero": ("import sys; sys.exit(-1)", 255, "255", "", ""),
    "a sentence": ("import sys; sys.exit('a sentence')", 1, "1", "", "a sentence"),
    "None": ("import sys; print('no line end', end=''); sys.exit()", 0, "0", "no line end", ""),
    "the last line": ("print('a line')", 0, "0", "a line\n", ""),
    "an exception": ("open('nothing')", 1, "1", "", "No such file or directory: 'nothing'"),
    "Ctrl-C": ("raise KeyboardInterrupt", -signal.SIGINT, "130", "", "KeyboardInterrupt"),
    "SIGTERM": ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM, None, "", ""),
    "os._exit": ("import os; os._exit(8)", 8, None, "", ""),
    "a thread": (THREAD, 0, "0", "from the main thread\nfrom the other\n", ""),
    "callbacks": (CALLBACKS, 4, "4", "second, and a record that waits for the end\n", "first"),
    "objects": (OBJECTS, 0, "0", "deleted\n", ""),
    "a fork": (FORK, 6, "6", "5\n", ""),
    "processes": (PROCESSES, 0, "0", "fork 1\nspawn 2\nforkserver 3\n", ""),
    "a closed pipe": (PIPE, 120, "0", "", "BrokenPipeError: [Errno 32] Broken pipe"),
}


@pytest.mark.parametrize("case", ENDS)
@pytest.mark.parametrize("command", ["recipe.py", "-m recipe"])
def test_a_recipe_ends_as_python_ends_it(case: str, command: str, tmp_path: Path) -> None:
    """And the code that it ended with is reported, unless the process ends before the recipe."""
    text, code, reported, output, error = ENDS[case]
    (tmp_path / "recipe.py").write_text(text)
    report, left_open = tmp_path / "report", tmp_path / "left_open.txt"
    for python in ((sys.executable,), LAUNCH):
        left_open.unlink(missing_ok=True)
        ended = subprocess.run(
            [*python, *command.split()], capture_output=True, text=True, cwd=tmp_path,
            env=os.environ | {launcher.EXIT_CODE: str(report), "PYTHONUNBUFFERED": ""},
        )  # fmt: skip
        last = ended.stderr.splitlines()[-1] if ended.stderr else ""
        assert (ended.returncode, ended.stdout) == (code, output), ended.stderr
        assert last.endswith(error) and bool(last) == bool(error), ended.stderr
        assert case != "objects" or left_open.read_text() == "a line"
    assert (report.read_text() if report.exists() else None) == reported


NATIVE = """
import ctypes, sys, threading, time
inside = threading.Event()
@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
def work(_):
    inside.set()
    time.sleep(0.3)
    print("back from Python")
handle = ctypes.c_ulong()
ctypes.CDLL(None).pthread_create(ctypes.byref(handle), None, work, None)
inside.wait()
sys.work = work
"""


def test_a_native_thread_comes_back_from_python_before_the_shutdown(tmp_path: Path) -> None:
    """As those of the SDK's HTTP client do; the shutdown would end it where Python has it."""
    (tmp_path / "recipe.py").write_text(NATIVE)
    assert launch("recipe.py", cwd=tmp_path) == "back from Python\n"


LOGGING = """
import sys
import tinker
assert "tinker_cookbook.utils.ml_log" not in sys.modules
from tinker_cookbook.utils import ml_log
logger = ml_log.setup_logging(sys.argv[1], do_configure_logging_module=False)
client = tinker.ServiceClient().create_lora_training_client("demo", rank=2).result()
for step in range(3):
    told = {"env/all/reward/total": step / 4, "note": "a text", "lists": [1], "bad": float("nan")}
    logger.log_metrics(told, step=step)
print(client.model_id)
"""


SPAWNING = """
import multiprocessing
from tinker_cookbook.image_processing_utils import get_image_processor
from tinker_cookbook.tokenizer_utils import get_tokenizer

def found(name):
    return len(get_tokenizer(name)), get_image_processor(name).patch_size

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(*pool.apply(found, ["Qwen/Qwen3-VL-8B:peft:1024"]))
"""


def test_a_spawned_process_finds_a_names_tokenizer_and_image_processor(tmp_path: Path) -> None:
    folder = chat_folder()
    (tmp_path / "recipe.py").write_text(SPAWNING)
    ended = subprocess.run(
        [*LAUNCH, "recipe.py"], capture_output=True, text=True, cwd=tmp_path, timeout=120,
        env=os.environ | {launcher.MODELS: json.dumps({"Qwen/Qwen3-VL-8B": str(folder)})},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.split() == [str(len(AutoTokenizer.from_pretrained(folder))), "16"]


def test_what_a_recipe_logs_is_on_the_page(tmp_path: Path) -> None:
    """As the cookbook's logger writes it, and called by the recipe."""
    folder = tmp_path / "recipes" / "my_rl"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "train.py").write_text(LOGGING)
    command = [sys.executable, "-m", "tinsmith.cli", "run", "--model", f"demo={demo.MODEL}"]
    command += ["--checkpoints", str(tmp_path / "kept"), "-m", "my_rl.train", str(tmp_path / "log")]
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=folder.parent, timeout=300
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    run = ended.stdout.split()[-1]
    written = (tmp_path / "log" / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in written.splitlines()] == [0, 1, 2]
    state = State(Store(tmp_path / "kept"))
    history = RunHistory(state)
    try:
        rows, _ = history.logged(run)
        _, about = history.about(run) or (0, {})
    finally:
        history.close()
        state.close()
    wanted = [{"env/all/reward/total": step / 4, "bad": None} for step in range(3)]
    assert rows == [{"step": step, "values": values} for step, values in enumerate(wanted)]
    assert about["recipe"] == "my_rl" and about["reward"] == "env/all/reward/total"


@pytest.mark.parametrize(
    ("command", "name"),
    (
        (["-m", "tinker_cookbook.recipes.math_rl.train", "a=b.c"], "math_rl"),
        (["-m", "tinker_cookbook.recipes.rl_loop"], "rl_loop"),
        (["-m", "train"], "train"),
        (["train.py"], "train"),
        (["scripts/lights.py", "x"], "lights"),
    ),
)
def test_a_recipe_is_called_by_its_module_or_script(command: list[str], name: str) -> None:
    assert recipe_name(command) == name
