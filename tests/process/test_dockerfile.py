"""The Dockerfile, as far as it can be tried without Docker: what it copies, pins and installs, and as whom it runs."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.process.manifests import ROOT, container_of, the

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Instruction and rest of each line, comments left out and continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def of(word: str) -> list[str]:
    return [rest for found, rest in instructions() if found == word]


def arguments() -> dict[str, str]:
    return dict(text.split("=", 1) for text in of("ARG"))


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets a path into the build: its last line that fits decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        parents = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
        plain = pattern.removeprefix("**/")
        names = parents if plain == pattern else [Path(parent).name for parent in parents]
        if line and not line.startswith("#") and any(fnmatch.fnmatch(name, plain) for name in names):
            sent = line.startswith("!")
    return sent


def copied() -> list[tuple[list[str], str]]:
    found = []
    for rest in of("COPY"):
        *sources, target = re.sub(r"\$\{(\w+)\}", lambda name: arguments()[name[1]], rest).split()
        found.append((sources, target))
    return found


def test_every_instruction_is_one_and_the_base_is_pinned() -> None:
    known = {"FROM", "ARG", "RUN", "ENV", "COPY", "WORKDIR", "USER", "ENTRYPOINT", "CMD"}
    assert {word for word, _ in instructions()} <= known
    [base] = of("FROM")
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)
    assert f"torch=={arguments()['TORCH_VERSION']}\n" in (ROOT / "constraints.txt").read_text()


def test_what_is_copied_is_there_and_is_sent_to_the_build_and_nothing_else_is() -> None:
    for sources, _ in copied():
        for source in sources:
            assert (ROOT / source).exists(), source
            assert is_sent(source), source
    assert is_sent("torchelastic/observe/page/static/page.css")
    assert (ROOT / arguments()["JOB"] / "train.py").is_file()
    for left_out in (
        ".git/config",
        ".venv/bin/python",
        "tests/conftest.py",
        "tls/ca.key",
        "runs/x",
        "torchelastic/__pycache__/x.pyc",
    ):
        assert not is_sent(left_out), left_out


def test_packaging_finds_all_that_it_reads_among_what_is_copied() -> None:
    names = {
        Path(source).name for sources, target in copied() if target.startswith("/opt/source") for source in sources
    }
    read = re.findall(r"^(?:readme|license-files) = (.*)$", (ROOT / "pyproject.toml").read_text(), flags=re.M)
    wanted = {name for text in read for name in re.findall(r'"([^"]+)"', text)}
    assert {"README.md", "LICENSE"} <= wanted <= names


def test_it_runs_as_the_user_of_the_manifests_under_an_init_that_passes_signals() -> None:
    [user] = of("USER")
    pod = the("Job", "train")["spec"]["template"]["spec"]
    assert int(user) == pod["securityContext"]["runAsUser"]
    assert f"--uid {user}" in " ".join(of("RUN"))
    assert json.loads(of("ENTRYPOINT")[0]) == ["tini", "--"]
    assert "apt-get install -y --no-install-recommends tini" in " ".join(of("RUN"))
    assert pod["shareProcessNamespace"], (
        "the manifest's command takes the place of ENTRYPOINT: the pause container reaps"
    )
    program = container_of("Job", "train")["command"]
    assert program[0] == json.loads(of("CMD")[0])[0]
    [script] = [word for word in program if word.endswith(".py")]
    assert script == f"{of('WORKDIR')[0]}/train.py" == f"{copied()[-1][1]}/train.py"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_its_installations_run_in_an_empty_environment_and_the_job_trains(tmp_path: Path) -> None:
    """Each RUN that installs, by a shell, with the paths of the image put below a folder."""
    venv.create(tmp_path / "opt" / "venv", with_pip=True)
    for sources, target in copied():
        for source in sources:
            to = tmp_path / target.strip("/")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, to, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                to.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, to)
    path = f"{tmp_path}/opt/venv/bin:{os.environ['PATH']}"
    installing = [run for run in of("RUN") if "pip install" in run]
    assert len(installing) == 2
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= arguments() | {"PATH": path, "EXTRAS": "standalone"}
    for run in installing:
        done = subprocess.run(
            ["sh", "-ec", run.replace("/opt/", f"{tmp_path}/opt/")], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    script = tmp_path / "srv" / "job" / "train.py"
    words = ["--standalone", str(script), f"--checkpoint-dir={tmp_path}/saved", "--steps=120", "--step-s=0"]
    done = subprocess.run(
        ["torchelastic", "run", *words], env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 100: loss" in done.stdout
    assert list((tmp_path / "saved").iterdir())
    assert sys.prefix not in done.stderr
