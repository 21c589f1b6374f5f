"""A source distribution has what is built and nothing else. The wheel that pip would build of it,
and of nothing beside it, is what a user needs and no more; installed alone, it trains. And setup.py
says what it lacks: a C compiler, Python's headers, nvcc.

The wheel is compiled without optimization, in a third of the time. Its nvcc makes empty files: they
show where libraries and logs go."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import tinsmith
from support import ROOT
from support.archives import unpack
from support.op_devices import setup_py

pytestmark = pytest.mark.slow
ARTEFACTS = (".so", ".o", ".log", ".pyc")
SOURCES = (".c", ".h", ".inc", ".cu", ".cuh", *ARTEFACTS)
EMPTY_NVCC = """#!/bin/sh
echo "ptxas info    : Used 37 registers" >&2
while [ "$1" != -o ]; do shift; done
: > "$2"
"""
QUICK_CC = """#!/bin/sh
echo "$@" >> "$0.log"
CCACHE_NOHASHDIR=1 exec {} "$@" -O0
"""
BUILD = "from setuptools import build_meta; print(build_meta.build_wheel({!r}))"  # what pip calls
MIB = 1 << 20


def program(path: Path, text: str) -> Path:
    """A script that can be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def run(arguments: list[object], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, in a folder, without the checkout on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=environment | more, capture_output=True, text=True
    )


def files(folder: Path) -> set[str]:
    """The files below a folder, relative to it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout's files, after builds that left their products everywhere."""
    tree = tmp_path_factory.mktemp("checkout")
    for name in ("csrc", "cuda", "python", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    for folder in ("csrc/cpu", "cuda", "python/tinsmith", "build/lib/tinsmith"):
        (tree / folder).mkdir(parents=True, exist_ok=True)
        for suffix in ARTEFACTS:
            (tree / folder / f"left{suffix}").write_text("left by a build")
    return tree


@pytest.fixture(scope="module")
def sources(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a source distribution unpacks to."""
    folder = tmp_path_factory.mktemp("sdist")
    done = run(["setup.py", "-q", "sdist", "-d", folder], tree)
    assert done.returncode == 0, done.stderr[-2000:]
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        unpack(opened, folder)
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built of a copy of them."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(sources, folder / "sources")
    program(folder / "nvcc", EMPTY_NVCC)
    program(folder / "cc", QUICK_CC.format(os.environ.get("CC", "gcc")))
    name, compiled = build(folder)
    assert len(compiled) > 150 and len(set(compiled)) < 120  # some for each instruction set
    return folder / name


def build(folder: Path) -> tuple[str, list[str]]:
    """Builds the wheel there, and returns its name and the files that were compiled for it."""
    (log := folder / "cc.log").unlink(missing_ok=True)
    settings = {"TINSMITH_NVCC": str(folder / "nvcc"), "TINSMITH_STRIP": "1"}
    done = run(
        ["-c", BUILD.format(str(folder))], folder / "sources", **settings, CC=str(folder / "cc")
    )
    assert done.returncode == 0, done.stderr[-2000:]
    calls = [line.split() for line in log.read_text().splitlines()]
    compiled = [call[call.index("-c") + 1] for call in calls if "-c" in call]
    return done.stdout.split()[-1], compiled


def test_a_second_build_compiles_what_changed(wheel: Path, tmp_path: Path) -> None:
    shutil.copytree(wheel.parent, folder := tmp_path / "elsewhere")
    assert build(folder)[1] == []
    source = folder / "sources" / "csrc"
    (source / "train" / "losses.c").open("a").write("/* more */")
    assert build(folder)[1] == ["csrc/train/losses.c"]
    (source / "cpu" / "product" / "amx.h").open("a").write("/* more */")
    compiled = build(folder)[1]
    assert "csrc/cpu/product/amx.c" in compiled and not any("/adamw.c" in path for path in compiled)
    (source / "train" / "losses.c").open("a").write("no C")
    with pytest.raises(AssertionError, match=r"losses\.c"):
        build(folder)
    with pytest.raises(AssertionError, match=r"losses\.c"):  # the object of before is not taken
        build(folder)


def test_a_source_distribution_has_what_is_built_and_nothing_else(
    tree: Path, sources: Path
) -> None:
    packed, there = files(sources), files(tree)
    wanted = {name for name in there if name.startswith(("csrc/", "cuda/", "python/tinsmith/"))}
    wanted -= {name for name in wanted if name.endswith(ARTEFACTS)}
    assert wanted <= packed, sorted(wanted - packed)
    for name in packed - wanted:
        assert not name.endswith(ARTEFACTS) and not name.startswith(("tests/", "build/")), name


def test_a_wheel_has_the_package_and_its_libraries_alone(wheel: Path, sources: Path) -> None:
    assert wheel.name.split("-", 2)[2].startswith("cp311-abi3-linux_")
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        core = opened.read("tinsmith/_core.abi3.so")
    libraries = {"tinsmith/_core.abi3.so", "tinsmith/libtinsmith_cuda.so"}
    package = {name for name in names if name.startswith("tinsmith/")}
    assert package == libraries | {
        name.removeprefix("python/")
        for name in files(sources)
        if name.startswith("python/tinsmith/")
    }
    metadata = names - package
    assert all(name.split("/")[0].endswith(".dist-info") for name in metadata)
    assert any(name.endswith("/LICENSE") for name in metadata)
    assert not any(name.endswith(SOURCES) for name in names - libraries)
    assert b".debug_" not in core and b".symtab" not in core  # stripped
    assert wheel.stat().st_size < 7 * MIB  # with an empty CUDA library


def test_a_wheel_alone_answers_and_learns(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "installed")
    # Without site-packages of the checkout's own install: NumPy's folder comes second.
    path = os.pathsep.join([str(tmp_path / "installed"), sysconfig.get_path("purelib")])
    done = run([ROOT / "tools" / "check_wheel.py"], tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(str(tmp_path / "installed")), done.stdout
    done = run(["-m", "tinsmith.cli", "--version"], tmp_path, PYTHONPATH=path)
    version = tinsmith.__version__
    assert done.returncode == 0 and version in done.stdout, done.stdout + done.stderr


# ---- what setup.py lacks ----


@pytest.mark.parametrize(
    ("compiler", "sentence"),
    (
        (None, r"the C compiler {} does not work here (No such file or directory). Install one"),
        ("exit 1", "the C compiler {} does not work here (exit code 1). Install one"),
        (
            r"printf '\351chec\n' >&2; exit 1",  # in Latin-1
            "the C compiler {} does not work here (\ufffdchec). Install one",
        ),
        ("! grep Python.h", f"the headers of Python {sys.version.split()[0]} were not found"),
    ),
    ids=("none", "broken", "another encoding", "no headers"),
)
def test_a_machine_without_a_compiler_is_told_so(
    compiler: str | None, sentence: str, sources: Path, tmp_path: Path
) -> None:
    path = tmp_path / "cc"
    if compiler:
        program(path, f"#!/bin/sh\n{compiler}\n")
    out = ["--build-temp", tmp_path / "temp", "--build-lib", tmp_path / "lib"]
    done = run(["setup.py", "-q", "build_ext", *out], sources, CC=str(path))
    *before, last = done.stderr.strip().splitlines()
    assert done.returncode == 1 and sentence.format(path) in last, done.stderr
    assert last.startswith("error: tinsmith is built from C, and ")
    assert "or install a wheel of tinsmith" in last and "Traceback" not in " ".join(before)


def test_nvcc_is_asked_for_and_is_that_of_the_path_then_of_nvidia_then_of_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = setup_py()
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(setup, "NVCC_HOME", str(tmp_path / "home" / "nvcc"))
    monkeypatch.setattr(setup.sysconfig, "get_path", lambda name: str(tmp_path / name))
    monkeypatch.setattr(setup.sys, "path", [])
    monkeypatch.setenv("TINSMITH_NVCC", "nvcc")
    with pytest.raises(setup.CompileError, match="CUDA device, and nvcc was not found"):
        setup.nvcc_asked()
    places = [tmp_path / "purelib" / setup.NVCC_OF_PIP, tmp_path / "home" / "nvcc"]
    places.append(tmp_path / "path" / "nvcc")
    for place in places:
        program(place, EMPTY_NVCC)
        assert setup.nvcc_asked() == str(place)
    monkeypatch.setenv("TINSMITH_NVCC", str(places[0]))
    assert setup.nvcc_asked() == str(places[0])
    monkeypatch.setenv("TINSMITH_NVCC", str(tmp_path / "none"))
    with pytest.raises(setup.CompileError, match="none was not found"):
        setup.nvcc_asked()
    for nothing in ("", None):
        if nothing is None:
            monkeypatch.delenv("TINSMITH_NVCC")
        else:
            monkeypatch.setenv("TINSMITH_NVCC", nothing)
        assert setup.nvcc_asked() is None


@pytest.mark.parametrize("said", ("--compress-mode [default,size]", "--fatbin", None))
def test_a_library_is_made_small_where_nvcc_can(tmp_path: Path, said: str | None) -> None:
    nvcc = tmp_path / "nvcc"
    if said:
        program(nvcc, f"#!/bin/sh\necho '{said}'\n")
    wanted = ["--compress-mode=size"] if said and "compress" in said else []
    assert setup_py().nvcc_smaller(str(nvcc)) == wanted


def test_the_runtime_of_pips_nvcc_is_where_its_packages_have_it(tmp_path: Path) -> None:
    setup, nvcc = setup_py(), tmp_path / setup_py().NVCC_OF_PIP
    assert setup.nvcc_libraries(str(nvcc)) == []
    runtime = program(nvcc.parent.parent / "lib" / "libcudart_static.a", "")
    assert setup.nvcc_libraries(str(nvcc)) == [f"-L{runtime.parent}"]
