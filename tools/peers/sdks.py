"""Training SDKs of several versions against this server, each with one script.

    python -m tools.peers.sdks                                        # all of VERSIONS
    python -m tools.peers.sdks tinker==0.16.1 fireworks-ai==1.2.30    # these

Each is installed alone into a folder of its own, before what is here on the path; the server is
this environment's, with the demonstration's model. Tinker's SDKs run sdk_loop.py and must all get
the same bits; Fireworks' run fireworks_steps.py, and every step must be right. Exits 1 if not.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import tinsmith.demo
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig

HERE = Path(__file__).parent
MODEL = Path(tinsmith.demo.__file__).parent / "model"
SCRIPTS = {"tinker": "sdk_loop.py", "fireworks-ai": "fireworks_steps.py"}
TINKER = ("0.16.1", "0.18.1", "0.22.7", "0.24.1", "0.25.0", "0.30.4", "0.34.0", "0.38.0")
VERSIONS = (*(f"tinker=={version}" for version in TINKER), "fireworks-ai==1.2.30")
SECONDS = 600.0


def run(requirement: str, url: str, folder: Path) -> tuple[bool, str]:
    """Whether the script of an SDK ended well, and what it printed."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, requirement], check=True)
    script = HERE / SCRIPTS[requirement.partition("=")[0]]
    done = subprocess.run(
        [sys.executable, str(script), url, "demo"],
        env={**os.environ, "PYTHONPATH": str(folder), "TINKER_API_KEY": "tml-local"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    return done.returncode == 0, done.stdout


def main(requirements: list[str]) -> int:
    """The table; 1 where something is not right."""
    right, digests = True, set()
    with tempfile.TemporaryDirectory() as work:
        place = Path(work) / "checkpoints"
        with Backend(ServerConfig({"demo": MODEL}, checkpoints=place, device="cpu")) as backend:
            for requirement in requirements or VERSIONS:
                well, said = run(requirement, backend.url, Path(work) / requirement)
                right &= well
                lines = [line for line in said.splitlines() if line.startswith("result: ")]
                told = lines[-1].removeprefix("result: ") if lines else "failed"
                digests |= {told} if requirement.startswith("tinker") else set()
                print(f"{requirement:21} {told}", flush=True)
                if not well:
                    print(said, file=sys.stderr)
    return int(not right or len(digests) > 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
