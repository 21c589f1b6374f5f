"""One loop over several versions of Tinker's SDK, and whether all got the same bits.

    python -m tools.peers.sdks                   # every version of VERSIONS
    python -m tools.peers.sdks 0.16.1 0.24.1     # these

Each version is installed alone into a folder of its own, before the SDK that is here on the path;
the server is this environment's. Exits 1 where a loop fails or its digest is another.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import tinsmith.demo
from tinsmith.server.backend import Backend

ROOT = Path(__file__).parents[2]
VERSIONS = ("0.16.1", "0.18.1", "0.22.7", "0.24.1", "0.25.0", "0.30.4", "0.34.0", "0.38.0")
SECONDS = 300.0


def run(version: str, url: str, folder: Path) -> tuple[bool, str]:
    """Whether a version's loop ended well, and what it printed."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), f"tinker=={version}"], check=True)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "peers" / "sdk_loop.py"), url, "demo"],
        env={**os.environ, "PYTHONPATH": str(folder), "TINKER_API_KEY": "tml-local"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    return done.returncode == 0, done.stdout


def main(versions: list[str]) -> int:
    """The table; 1 where not all agree."""
    digests = {}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        model = Path(tinsmith.demo.__file__).parent / "model"
        with Backend({"demo": model}, checkpoints=folder / "checkpoints", device="cpu") as backend:
            for version in versions or VERSIONS:
                well, said = run(version, backend.url, folder / version)
                digest = said.splitlines()[-1].removeprefix("digest ") if well else "failed"
                digests[version] = digest
                print(f"tinker {version:8} {digest}", flush=True)
                if not well:
                    print(said, file=sys.stderr)
    return int(len(set(digests.values())) != 1 or "failed" in digests.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
