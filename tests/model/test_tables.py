"""The tables of csrc/model hold what the next families need: layers of other kinds, several
matrices in one slot, state that a sequence keeps. No family has them yet, so rows that do are added
to a copy of the tables, and tests/model/tables.c checks what the code of today makes of them.
"""

import shutil
import subprocess
from pathlib import Path

from support import ROOT
from support.op_devices import setup_py

STATE_BYTES = 320
ROWS = {
    "layers.inc": f"""
        LAYER_KIND(recurrent, MIXER, RECURRENT, 0, 0, {STATE_BYTES})
        LAYER_KIND(parted, FEED, PARTED, 0, 0, 0)""",
    "weights.inc": """
        LAYER_VECTOR(decay, s->heads, HAS(RECURRENT))
        LAYER_MATRIX(part_up, 5, s->ffn, s->width, HAS(PARTED), MLP, EACH)""",
    "acts.inc": "KEPT(DEAR, float, state, 2 * s->heads, RECURRENT)",
}
SOURCES = (
    "device/arena.c", "device/dtype.c", "device/status.c", "model/acts.c", "model/adapter.c",
    "model/cache.c", "model/memory_share.c", "model/model.c", "model/shape.c",
    "model/stage_devices.c",
    "model/stages.c", "model/training_memory.c", "vision/features.c", "vision/images.c",
    "vision/tower.c",
)  # fmt: skip


def test_rows_of_kinds_that_no_family_has_yet(tmp_path: Path) -> None:
    copy = tmp_path / "csrc"
    for folder in ("device", "registry", "vision", "model"):
        shutil.copytree(ROOT / "csrc" / folder, copy / folder)
    for name, rows in ROWS.items():
        table = copy / "model" / name
        text, undefined = table.read_text(), "\n#undef"
        assert undefined in text
        table.write_text(text.replace(undefined, f"\n{rows}\n{undefined}", 1))
    flags = [*setup_py().WARNINGS, "-std=c11", "-Werror", "-g", "-fsanitize=address"]
    parts = f"-DSTATE_BYTES={STATE_BYTES}", "-DRECURRENT=32", "-DPARTED=64"
    files = [ROOT / "tests" / "model" / "tables.c", *(copy / name for name in SOURCES)]
    program = tmp_path / "tables"
    command = ["gcc", *flags, *parts, f"-I{copy}", *files, "-o", program, "-lm"]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "all of it holds\n"), done.stdout + done.stderr
