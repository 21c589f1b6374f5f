"""Builds tinsmith._core. The CPU's op files are compiled once for each instruction set and chosen
between at run time (csrc/cpu/device.c), so one build runs on any x86-64, and elsewhere with the
generic set."""

import os
import platform
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi"]
FLAGS = ["-std=c11", "-O3", "-g1", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]

GENERIC = {"generic": []}
X86 = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mfma",
        "-mprefer-vector-width=512",
    ],
}
ISAS = GENERIC | (X86 if platform.machine() in ("x86_64", "AMD64") else {})

ONCE = ["csrc/cpu/device.c", "csrc/cpu/pool.c"]


def sources(folder: str) -> list[str]:
    """The C files of a folder, relative to the root, in a fixed order."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).glob("*.c"))


OPS = [path for path in sources("csrc/cpu") if path not in ONCE]


class BuildOps(build_ext):
    """build_ext that also compiles the op files, once for each instruction set."""

    def build_extension(self, ext: Extension) -> None:
        ext.extra_objects = []
        for isa, flags in ISAS.items():
            ext.extra_objects += self.compiler.compile(
                OPS,
                output_dir=str(Path(self.build_temp) / isa),
                macros=[("CPU_ISA", isa)],
                debug=self.debug,
                extra_postargs=ext.extra_compile_args + flags,
                depends=ext.depends,
            )
        super().build_extension(ext)


# For the tests: TINSMITH_WERROR=1 makes warnings errors; TINSMITH_SANITIZE=address,undefined
# watches the C code at run time, with its assertions on.
strict = ["-Werror"] if os.environ.get("TINSMITH_WERROR") else []
sanitize = os.environ.get("TINSMITH_SANITIZE")
sanitizers = [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
watched = [*sanitizers, "-UNDEBUG", "-O1"] if sanitize else []

core = Extension(
    "tinsmith._core",
    sources=sources("csrc") + ONCE + sources("csrc/py"),
    depends=[
        str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".inc")
    ],
    include_dirs=[numpy.get_include()],
    define_macros=[
        ("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION"),
        ("NPY_TARGET_VERSION", "NPY_1_23_API_VERSION"),
    ],
    extra_compile_args=FLAGS + WARNINGS + strict + watched,
    extra_link_args=["-pthread", "-lm"] + (sanitizers if sanitize else []),
)

setup(ext_modules=[core], cmdclass={"build_ext": BuildOps})
