"""Virtual environments of the peers, each under `.cache/` with the versions of a requirements file."""

import shutil
import subprocess
import venv
from pathlib import Path

from cron_ticks.cli.bench import contract

HERE = Path(__file__).parent
CACHE = HERE.parent / ".cache"


def install_peers(name: str, requirements: str) -> Path:
    """Made anew when the requirements have changed; its Python."""
    environment, wanted = CACHE / name, HERE / "peers" / requirements
    python, done = environment / "bin" / "python", environment / "installed.txt"
    if not done.exists() or done.read_text() != wanted.read_text():
        venv.create(environment, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, "-r", str(wanted)], check=True)  # noqa: S603
        done.write_text(wanted.read_text())
    return python


def contract_folder(name: str) -> Path:
    """A folder with `contract.py` and nothing else: beside it in the package are names of the standard library."""
    folder = CACHE / name / "contract"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(contract.__file__, folder / "contract.py")
    return folder
