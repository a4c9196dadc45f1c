"""The deploy files, checked without a container engine."""

import subprocess
import sysconfig
from pathlib import Path

import yaml

from cron_ticks.settings import PREFIX, Settings

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"


def test_the_dockerfile_has_no_findings() -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    result = subprocess.run([str(hadolint), str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_the_dockerfile_copies_what_the_wheel_needs() -> None:
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = {
        name for line in lines if line.startswith("COPY ") and "--from" not in line for name in line.split()[1:-1]
    }
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "cron_ticks", "queue", "migrations"}
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()


def test_the_compose_file_starts_a_server_and_workers() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    services = compose["services"]
    assert set(services) == {"postgres", "migrate", "worker"}
    worker = services["worker"]
    assert worker["deploy"]["replicas"] == 2
    assert worker["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
    assert (DEPLOY / worker["build"]["context"] / worker["build"]["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    grace = float(worker["stop_grace_period"].removesuffix("s"))
    assert grace > 2 * float(worker["environment"]["CRON_TICKS_STOP_GRACE_SECONDS"])
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    for service in services.values():
        ours = {name for name in service.get("environment", {}) if name.startswith(PREFIX)}
        assert ours <= known
