"""Builds tinsmith._core. The CPU's op files are compiled once for each instruction set and chosen
between at run time (csrc/cpu/device.c), so one build runs on any x86-64, and elsewhere with
the generic set. A file is compiled again when it, a header of it or how it is compiled has changed,
by content (`compile_changed`), whatever environment pip builds in.

Beside it, in the package, the CUDA device, libtinsmith_cuda.so, where TINSMITH_NVCC asks for it
(nvcc_asked): nvcc takes minutes. What is asked for and can't be built ends the build with a
sentence, and so does a C compiler that is not there, before anything is compiled. The emulated
device is for tests alone: they build it, with the code here (tests/support/op_devices.py)."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi"]
FLAGS = ["-std=c11", "-O3", "-g1", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]

AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mprefer-vector-width=512"
AVX512_BF16 = f"{AVX512} -mavx512vnni -mavx512bf16 -mavx512vbmi"
GENERIC = {"generic": ""}
X86 = {
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": AVX512,
    "avx512bf16": AVX512_BF16,
    "amx": f"{AVX512_BF16} -mamx-tile -mamx-bf16",
}
HERE = platform.machine() in ("x86_64", "AMD64")
ISAS = GENERIC | (X86 if HERE else {})
# A set that is another but for some files (cpu/table.c).
PARTS = {"avx512vnni": f"{AVX512} -mavx512vnni"} if HERE else {}
PART = ["csrc/cpu/weights/packed.c", "csrc/cpu/product/gemm_quantized.c"]
SIMD = "csrc/cpu/runtime/simd.h"
# Files that know no bf16: the sets that have it take AVX-512's ops of them (cpu/table.c).
PLAIN = [
    *("attention/rope", "delta/conv", "delta/delta", "delta/delta_backward", "delta/delta_gates"),
    *("head/jsd", "head/logprob", "head/sample", "head/topk", "optimizer/adamw"),
    *("optimizer/gram", "pointwise/gate", "pointwise/gelu", "pointwise/layernorm"),
    *("pointwise/patches", "pointwise/rmsnorm", "pointwise/route", "pointwise/rows"),
    *("pointwise/swiglu", "product/lora"),
]

ROOMS = ["device", "registry", "vision", "model", "train", "sampling", "functional", "binding"]
ONCE = ["csrc/cpu/device.c", *(f"csrc/cpu/runtime/{name}.c" for name in ("cpu", "memory", "pool"))]


# One build serves every later Python (the stable ABI); a free-threaded one has no such thing.
STABLE_ABI = None if sysconfig.get_config_var("Py_GIL_DISABLED") else "0x030A0000"


def sources(folder: str) -> list[str]:
    """The C files of a folder and of those in it, relative to the root, in a fixed order."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.c"))


def checksum(paths: list[str]) -> str:
    """A C constant that a change of the files changes."""
    return f"{zlib.crc32(b''.join((ROOT / path).read_bytes() for path in paths))}u"


OPS = [path for path in sources("csrc/cpu") if path not in ONCE]


def files_of(isa: str) -> list[str]:
    """The op files of an instruction set."""
    if isa in PARTS:
        return PART
    plain = [f"csrc/cpu/{name}.c" for name in PLAIN]
    return [path for path in OPS if "bf16" not in ISAS[isa] or path not in plain]


# The number of the seam between core and device libraries (csrc/device/device.h, DEVICE_ABI).
SEAM = [f"csrc/device/{name}" for name in ("ops.inc", "device.h", "delta_state.h")]
ABI = checksum(SEAM)

# What decides how weights become bytes in memory (binding/checksum.c): a quantised copy that other
# code has made is not read (python/tinsmith/models/weight_cache.py).
PACKERS = [
    *(f"csrc/cpu/runtime/{name}" for name in ("cpu.h", "simd.h", "transpose.c", "transpose.h")),
    *sorted(
        f"csrc/cpu/weights/{name}"
        for stem in ("packed", "quantize", "repack", "weight_load")
        for name in (f"{stem}.c", f"{stem}.h")
    ),
    *("csrc/cpu/weights/frozen.h", "csrc/device/arena.c", "csrc/device/delta_state.h"),
    *("csrc/device/device.h", "csrc/device/dtype.c", "csrc/device/dtype.h"),
    *("csrc/device/finite.h", "csrc/device/levels.h", "csrc/device/quantize.h"),
    *("csrc/model/layers.inc", "csrc/model/model.c", "csrc/model/weights.inc"),
]
CODE = checksum(PACKERS)

# For the tests: TINSMITH_WERROR=1 makes warnings errors; TINSMITH_SANITIZE=address,undefined
# watches the C code at run time, with its assertions on.
STRICT = ["-Werror"] if os.environ.get("TINSMITH_WERROR") else []
SANITIZE = os.environ.get("TINSMITH_SANITIZE")
# For a wheel that is published: TINSMITH_STRIP=1 leaves the debugger's tables out.
STRIPPED = ["-Wl,--strip-all"] if os.environ.get("TINSMITH_STRIP") else []
# Larger than what a thread's stack is sure to hold is the crew's scratch (csrc/cpu/runtime/pool.h).
SHALLOW = [] if SANITIZE else ["-Wframe-larger-than=32768"]
SANITIZERS = [f"-fsanitize={SANITIZE}"] if SANITIZE else []
# Python's own flags have -fwrapv, which makes a signed overflow legal: it would go unseen.
WATCHED = [
    *("-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-fno-wrapv", "-UNDEBUG", "-O1"),
]
SANITIZED = [*SANITIZERS, *WATCHED] if SANITIZE else []

NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "--fmad=false",
    "-Xptxas=-v",  # each kernel's registers and spills: the log that is kept
    *([] if STRIPPED else ["-lineinfo"]),  # profilers and sanitizers name lines
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-gencode=arch=compute_90,code=compute_90",
    "-Xcompiler=-Wall,-Wextra,-fPIC,-fvisibility=hidden",
]
NVCC_LINK = [
    *("-shared", "-cudart=static", "-Xlinker=--exclude-libs,ALL", "-ldl"),
    *(["-Xlinker=--strip-all"] if STRIPPED else []),
]
EMULATED = [
    "g++",
    "-xc++",
    "-std=c++17",
    "-DCUDA_EMULATED",
    "-O2",
    "-g1",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    *STRICT,
    *SANITIZED,
]
EMULATED_LINK = ["-shared", "-pthread", *SANITIZERS]
NVCC_HOME = "/usr/local/cuda/bin/nvcc"
NVCC_OF_PIP = "nvidia/cu13/bin/nvcc"  # in the folder of packages: pip install nvidia-cuda-nvcc
CUDA_LIBRARY = "libtinsmith_cuda.so"
CUDA_LOG = "libtinsmith_cuda.log"  # what the compiler said of each kernel; a test reads it

# What the compiler must be able to read, and the sentence where it is not.
NEEDED = {
    "#include <stdio.h>": "tinsmith is built from C, and the C compiler {compiler} does not work "
    "here ({said}). Install one (Debian, Ubuntu: apt install gcc libc6-dev; Fedora: dnf install "
    "gcc), name it in CC, or install a wheel of tinsmith, which needs none",
    "#include <Python.h>": "tinsmith is built from C, and the headers of Python {version} were not "
    "found ({said}). Install them (Debian, Ubuntu: apt install python3-dev; Fedora: dnf install "
    "python3-devel), or install a wheel of tinsmith, which needs none",
}


def nvcc_asked() -> str | None:
    """The nvcc that TINSMITH_NVCC asks for; None where it asks for none. A bare name is looked for
    on PATH, then where NVIDIA's installer and pip's packages have it, which a build in isolation
    does not see on its own path. CompileError if it is not there."""
    asked = os.environ.get("TINSMITH_NVCC")
    if not asked:
        return None
    packages = [sysconfig.get_path("purelib"), *sys.path]
    places = [asked]
    if asked == "nvcc":
        places += [NVCC_HOME, *(str(Path(folder) / NVCC_OF_PIP) for folder in packages)]
    found = next(filter(None, map(shutil.which, places)), None)
    if found is None:
        raise CompileError(
            f"TINSMITH_NVCC asks for the CUDA device, and {asked} was not found. Name nvcc by its "
            "path, or pip install nvidia-cuda-nvcc, or unset it: the CPU needs no nvcc"
        )
    return found


def nvcc_smaller(nvcc: str) -> list[str]:
    """The flag that makes a library a fifth as large, with lines half of what it is without them,
    where this nvcc has it (12.8 and later). It changes no code."""
    try:
        said = subprocess.run([nvcc, "--help"], capture_output=True, text=True, errors="replace")
    except OSError:  # cuda_build says why
        return []
    return ["--compress-mode=size"] if "--compress-mode" in said.stdout else []


def nvcc_libraries(nvcc: str) -> list[str]:
    """Where pip's packages have the CUDA runtime: nvcc itself looks into lib64 alone."""
    folder = Path(nvcc).parent.parent / "lib"
    return [f"-L{folder}"] if (folder / "libcudart_static.a").exists() else []


def cuda_inputs() -> list[Path]:
    """Everything that the CUDA device is made of."""
    names = ("delta_state.h", "device.h", "dtype.h", "finite.h", "levels.h", "ops.inc")
    names += ("philox.h", "quantize.h", "status.h")
    shared = [ROOT / "csrc" / "device" / name for name in names]
    return [*sorted((ROOT / "cuda").rglob("*.[ch]*")), *shared]


def cuda_digest(flags: list[str]) -> str:
    """What a CUDA device is made of, as 40 hexadecimal digits: the library's build ID. So one that
    was built elsewhere is known by its content, whatever the files' times are."""
    digest = hashlib.sha256(repr(flags).encode())
    for path in cuda_inputs():
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()[:40]


def cuda_is(library: Path, digest: str) -> bool:
    """Whether a library is made of what has that digest."""
    return library.exists() and bytes.fromhex(digest) in library.read_bytes()


def cuda_build(
    library: Path, objects: Path, compile_with: list[str], link_with: list[str], *also: str
) -> str:
    """Builds cuda/*/*.cu into a shared library; returns "" or the sentence of what went wrong. What
    is compiled with `also` does not count as other code."""
    digest = cuda_digest(compile_with[1:])
    if cuda_is(library, digest):
        return ""
    link_with = [*link_with, "-Xlinker", f"--build-id=0x{digest}"]
    objects.mkdir(parents=True, exist_ok=True)
    library.parent.mkdir(parents=True, exist_ok=True)

    def compile_one(path: Path) -> Path:
        out = objects / f"{path.stem}.o"
        command = [*compile_with, *also, f"-DDEVICE_ABI={ABI}", "-c", path, "-o", out]
        with out.with_suffix(".log").open("w") as log:
            code = subprocess.run(command, stderr=log).returncode
        said = out.with_suffix(".log").read_text()
        if code or "warning" in said:
            sys.stderr.write(said)
        if code:
            raise subprocess.CalledProcessError(code, command)
        return out

    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            built = list(pool.map(compile_one, sorted((ROOT / "cuda").rglob("*.cu"))))
        logs = [out.with_suffix(".log").read_text() for out in built]
        (objects / CUDA_LOG).write_text("".join(logs))
        subprocess.run([compile_with[0], *built, "-o", library, *link_with], check=True)
    except subprocess.CalledProcessError as error:
        library.unlink(missing_ok=True)
        what = next((arg.name for arg in error.cmd if str(arg).endswith(".cu")), library.name)
        return f"{compile_with[0]} could not make {what}; its log says why"
    except OSError as error:
        return f"{compile_with[0]} can't be run: {error.strerror}"
    return ""


class BuildOps(build_ext):
    """build_ext that also compiles the op files, once for each instruction set, and the CUDA
    device."""

    def cuda_absent(self) -> str:
        """Builds the CUDA device beside _core where it is asked for; returns why it is not there,
        or ""."""
        library = Path(self.get_ext_fullpath("tinsmith._core")).parent / CUDA_LIBRARY
        if not SANITIZE and self.cuda_kept(library):
            return ""
        library.unlink(missing_ok=True)  # of other files, or for another _core
        if SANITIZE:
            return "this is a build with sanitizers"
        nvcc = nvcc_asked()
        if not nvcc:
            return (
                "tinsmith was installed without it; to build it, set TINSMITH_NVCC=nvcc when you "
                "run pip install"
            )
        command, link = [nvcc, *NVCC_FLAGS], [*NVCC_LINK, *nvcc_libraries(nvcc)]
        if reason := cuda_build(library, self.cuda_objects(), command, link, *nvcc_smaller(nvcc)):
            raise CompileError(f"the CUDA device that TINSMITH_NVCC asks for: {reason}")
        return ""

    def cuda_kept(self, library: Path) -> bool:
        """Whether the library is there already, or in the source tree (built elsewhere, say), made
        of the files as they are now. It needs no compiler then."""
        package = ROOT / "python" / "tinsmith"
        if not cuda_is(package / CUDA_LIBRARY, cuda_digest(NVCC_FLAGS)):
            return cuda_is(library, cuda_digest(NVCC_FLAGS))
        for name, place in ((CUDA_LIBRARY, library), (CUDA_LOG, self.cuda_objects() / CUDA_LOG)):
            place.parent.mkdir(parents=True, exist_ok=True)
            if (package / name).exists() and not (
                place.exists() and place.samefile(package / name)
            ):
                shutil.copy2(package / name, place)
        return True

    def cuda_objects(self) -> Path:
        """Where the CUDA device's parts and nvcc's log are: not in the package."""
        return Path(self.build_temp) / "cuda"

    def check_compiler(self) -> None:
        """CompileError with the sentence of what is missing, if C can't be compiled."""
        compiler = self.compiler.compiler_so
        command = [*compiler, *(f"-I{path}" for path in self.include_dirs), "-fsyntax-only"]
        for text, sentence in NEEDED.items():
            try:
                done = subprocess.run(
                    [*command, "-xc", "-"],
                    input=f"{text}\n",
                    capture_output=True,
                    encoding="utf-8",
                    errors="replace",  # a compiler may speak in the old encoding of its locale
                )
                said = done.stderr.strip().partition("\n")[0] or f"exit code {done.returncode}"
                said = said if done.returncode else ""
            except OSError as error:
                said = str(error.strerror)
            if said:
                facts = {"compiler": compiler[0], "version": platform.python_version()}
                raise CompileError(sentence.format(said=said, **facts))
        said = subprocess.run([*compiler, "--version"], capture_output=True).stdout
        words = [word for word in compiler[1:] if not word.startswith("-I")]  # CFLAGS among them
        self.made_by = [said, words, sys.version, numpy.__version__]

    def made_of(self, obj: Path, source: str, settings: list[str]) -> str:
        """What an object is made of, as a digest: its source and the headers here that the compiler
        has named, the compiler, and the settings but for folders, which pip's change each time."""
        named = obj.with_suffix(".d")
        text = named.read_text() if named.exists() else ""
        headers = text.replace("\\\n", " ").partition(":")[2].split()
        digest = hashlib.sha256(repr((self.made_by, settings)).encode())
        for path in [source, *(name for name in headers if not name.startswith("/"))]:
            digest.update(Path(path).read_bytes() if Path(path).exists() else b"gone")
        return digest.hexdigest()

    def compile_changed(
        self, obj: str, source: str, ext: str, first: list, last: list, macros: list
    ) -> None:
        """Compiles one file, if that makes another object. (setuptools would compile every file
        whenever one has changed.)"""
        out = Path(obj)
        stamp, headers = out.with_suffix(".made"), ["-MMD", "-MF", str(out.with_suffix(".d"))]
        passed = [*map(str, (*first, *last, *macros))]
        settings = [one for one in passed if not one.startswith(("-I", "-include"))]
        if out.exists() and stamp.exists():
            if stamp.read_text() == self.made_of(out, source, settings):
                return
            stamp.unlink()
        self.compile_one(obj, source, ext, first, [*last, *headers], macros)
        stamp.write_text(self.made_of(out, source, settings))

    def build_extensions(self) -> None:
        self.check_compiler()
        self.compiler.force = self.force = True  # to link takes a second
        self.compile_one, self.compiler._compile = self.compiler._compile, self.compile_changed
        super().build_extensions()

    def copy_extensions_to_source(self) -> None:
        """What an editable install does with _core, for the library beside it."""
        super().copy_extensions_to_source()
        package = Path(self.get_finalized_command("build_py").get_package_dir("tinsmith"))
        for other in package.glob("_core.*.so"):  # of one Python alone: it would be imported first
            if other.name != Path(self.get_ext_filename("tinsmith._core")).name:
                other.unlink()
        for built in (
            Path(self.build_lib) / "tinsmith" / CUDA_LIBRARY,
            self.cuda_objects() / CUDA_LOG,
        ):
            (package / built.name).unlink(missing_ok=True)
            if built.exists():
                shutil.copy2(built, package / built.name)

    def build_extension(self, ext: Extension) -> None:
        ext.define_macros = [*ext.define_macros, ("DEVICE_ABI", ABI), ("WEIGHTS_CODE", CODE)]
        if reason := self.cuda_absent():
            self.warn(f"no CUDA device: {reason}")
            ext.define_macros += [("CUDA_ABSENT", c_string(reason))]

        def compile_op(job: tuple[str, str]) -> list[str]:
            isa, source = job
            folder = Path(self.build_temp) / isa
            header = [f"-I{folder}", f"-I{Path(SIMD).parent}", f"-include{Path(SIMD).name}"]
            return self.compiler.compile(
                [source],
                output_dir=str(folder),
                macros=[("CPU_ISA", isa)],
                debug=self.debug,
                extra_postargs=[*ext.extra_compile_args, *(ISAS | PARTS)[isa].split(), *header],
            )

        jobs = [(isa, source) for isa in (*ISAS, *PARTS) for source in files_of(isa)]
        jobs.sort(key=lambda job: -Path(job[1]).stat().st_size)
        headers = [Path(self.build_temp) / isa / f"{Path(SIMD).name}.gch" for isa in ISAS]
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda header: self.precompile(header, ext), headers))
                ext.extra_objects = [one for made in pool.map(compile_op, jobs) for one in made]
        finally:
            for header in headers:
                header.unlink(missing_ok=True)
        super().build_extension(ext)

    def precompile(self, header: Path, ext: Extension) -> None:
        """simd.h of an instruction set as GCC's precompiled header, for its first build: to read
        the compiler's intrinsics takes half of what a small file takes. 30 MB, and not kept."""
        header.unlink(missing_ok=True)  # of a build that was cut off
        if b"Free Software" in self.made_by[0] and not header.parent.exists():
            header.parent.mkdir(parents=True, exist_ok=True)
            isa = ISAS[header.parent.name].split()
            flags = [*ext.extra_compile_args, *isa, *["-g"] * bool(self.debug)]
            command = [*self.compiler.compiler_so, *flags, "-x", "c-header", SIMD, "-o", header]
            subprocess.run(command, check=False)  # without it, the header itself is read


def c_string(text: str) -> str:
    """A C string literal of plain text."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    return f'"{escaped}"'


core = Extension(
    "tinsmith._core",
    sources=[path for room in ROOMS for path in sources(f"csrc/{room}")] + ONCE,
    include_dirs=[numpy.get_include()],
    define_macros=[
        *([("Py_LIMITED_API", STABLE_ABI)] if STABLE_ABI else []),
        ("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION"),
        ("NPY_TARGET_VERSION", "NPY_1_23_API_VERSION"),
    ],
    extra_compile_args=FLAGS + WARNINGS + SHALLOW + STRICT + SANITIZED,
    extra_link_args=["-pthread", "-lm", "-ldl", *SANITIZERS, *STRIPPED],
    py_limited_api=bool(STABLE_ABI),
)

if __name__ == "__main__":  # the tests import this file for its flags and cuda_build
    abi3 = {"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {}
    setup(ext_modules=[core], cmdclass={"build_ext": BuildOps}, options=abi3)
