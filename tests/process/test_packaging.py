"""The wheel and the sdist: what is in them, what they say of themselves, and that they work where nothing else is."""

from __future__ import annotations

import email
import email.message
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from torchelastic.version import __version__

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "THIRD_PARTY_NOTICES.md", "torchelastic")
NOTICES = (ROOT / "THIRD_PARTY_NOTICES.md").read_text()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built from a copy: setuptools leaves its own files beside the sources."""
    folder = tmp_path_factory.mktemp("packaging")
    for name in SOURCES:
        source, target = ROOT / name, folder / "source" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(folder / "dist"),
        str(folder / "source"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [path] = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as file:
        [name] = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_string(file.read(name).decode())


def wanted_files() -> set[str]:
    """Modules, the type marker, the live page's files and the report's templates."""
    package = ROOT / "torchelastic"
    found = [*package.rglob("*.py"), package / "py.typed"]
    found += [*package.glob("observe/page/static/*"), *package.glob("observe/report/templates/*")]
    return {str(path.relative_to(ROOT)) for path in found}


def test_the_wheel_has_the_package_its_page_and_its_types_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    package = {name for name in names if name.startswith("torchelastic/")}
    assert package == wanted_files()
    assert "torchelastic/observe/page/static/index.html" in package
    assert "torchelastic/observe/report/templates/page.html" in package
    info = {name.partition(".dist-info/")[2] for name in names - package}
    assert info >= {"licenses/LICENSE", "licenses/THIRD_PARTY_NOTICES.md", "METADATA", "entry_points.txt"}
    assert all(".dist-info/" in name for name in names - package), "no tests, no examples"


def test_the_sdist_has_what_a_build_needs(built: Path) -> None:
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as file:
        names = {member.name.partition("/")[2] for member in file.getmembers() if member.isfile()}
    assert wanted_files() <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "THIRD_PARTY_NOTICES.md"} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "examples/"))]


def test_its_metadata_says_what_pyproject_says(metadata: email.message.Message, wheel: Path) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("torchelastic", __version__)
    assert wheel.name == f"torchelastic-{__version__}-py3-none-any.whl"
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata.get_all("License-File") == ["LICENSE", "THIRD_PARTY_NOTICES.md"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert metadata["Requires-Python"] == ">=3.10"
    pythons = [text.rpartition(" ")[2] for text in metadata.get_all("Classifier", []) if "Python :: 3" in text]
    assert pythons[0] == "3.10"
    needed = [requirement for requirement in metadata.get_all("Requires-Dist", []) if "extra ==" not in requirement]
    assert any(re.fullmatch(r"torch>=2\.\d+", requirement) for requirement in needed)


def test_the_version_stands_in_one_place() -> None:
    texts = {
        path: path.read_text(errors="replace")
        for path in [*(ROOT / "torchelastic").rglob("*.py"), ROOT / "pyproject.toml", ROOT / "setup.py"]
    }
    with_version = [path.relative_to(ROOT) for path, text in texts.items() if __version__ in text]
    assert with_version == [Path("torchelastic/version.py")]


# The notices ----------------------------------------------------------------------------------------------------------


def listed() -> dict[str, str]:
    rows = re.findall(r"^\| ([a-z0-9-]+) \| ([^|]+) \|", NOTICES, flags=re.M)
    return {name: licence for name, licence in rows if name != "package"}


def needs(names: set[str]) -> set[str]:
    """These and all that they need, of what is installed here."""
    found: set[str] = set()
    while names - found:
        name = (names - found).pop()
        found.add(name)
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            found.remove(name)
            names = names - {name}  # not on this platform, or not for this Python
            continue
        wanted = (Requirement(text) for text in requirements)
        names = names | {normal(one.name) for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})}
    return found


def test_the_notices_list_all_that_is_installed_with_it_and_the_extras_for_use(metadata: email.message.Message) -> None:
    requirements = metadata.get_all("Requires-Dist", [])
    direct = {normal(re.split(r"[^A-Za-z0-9._-]", text)[0]) for text in requirements if "extra ==" not in text}
    assert direct <= listed().keys()
    cuda = ("nvidia-", "cuda-", "triton")
    assert {name for name in needs(direct) if not name.startswith(cuda)} <= listed().keys()
    for extra in ("standalone", "convert", "lightning", "megatron", "transformers"):
        of_extra = {re.split(r"[^A-Za-z0-9._-]", text)[0] for text in requirements if f'extra == "{extra}"' in text}
        assert of_extra
        assert {normal(name) for name in of_extra} <= listed().keys()


@pytest.mark.parametrize("name", sorted(listed()))
def test_the_licence_that_is_listed_is_the_one_that_the_package_says(name: str) -> None:
    about = importlib.metadata.metadata(name).json
    said = f"{about.get('license_expression')} {str(about.get('license'))[:200]} {about.get('classifier')}"
    first = re.split(r"[, (]", listed()[name])[0]
    words = {"MIT": "MIT", "PSF-2.0": "PSF", "Apache-2.0": "Apache"}.get(first, "BSD")
    assert first in ("MIT", "PSF-2.0", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause")
    assert words in said, said


# In an empty environment ----------------------------------------------------------------------------------------------

JOB = """
import torch, torchelastic
from torchelastic.p2p import CoordinatorP2P

torch.set_num_threads(1)
model = torch.nn.Linear(2, 1)
state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.01))

def train_step(state):
    if state.step == 20:
        raise StopIteration
    state.optimizer.zero_grad()
    state.model(torch.ones(1, 2)).square().sum().backward()
    state.optimizer.step()

print("trained", torchelastic.train(CoordinatorP2P(), train_step, state).step, torchelastic.__file__)
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Installed with the versions of constraints.txt; a run, its report and the live page's files come from there."""
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"PATH": f"{binaries}:{environment['PATH']}"}

    def run(*words: str | Path) -> str:
        done = subprocess.run(
            list(map(str, words)), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    [torch] = re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), flags=re.M)
    run(binaries / "pip", "install", "-q", "-c", ROOT / "constraints.txt", torch, f"{wheel}[standalone]")
    run(binaries / "pip", "check")
    assert run("torchelastic", "--version").strip() == f"torchelastic {__version__}"
    for command in ("run", "status", "report", "doctor", "drain", "top"):
        assert f"torchelastic {command}" in run("torchelastic", command, "--help")
    (tmp_path / "job.py").write_text(JOB)
    said = run("torchelastic", "run", "--standalone", "--nproc-per-node=2", "--log-dir=logs", "job.py")
    assert said.count(f"trained 20 {tmp_path}/venv/lib/") == 2
    assert "live page: http://127.0.0.1:" in said
    run("torchelastic", "report", "logs", "-o", "report.html")
    assert (tmp_path / "report.html").read_text().lstrip().lower().startswith("<!doctype html>")
    files_in = "(importlib.resources.files('torchelastic.observe.page') / 'static').iterdir()"
    page = f"import importlib.resources; print(*(file.name for file in {files_in}))"
    files = set(run(binaries / "python", "-c", page).split())
    assert files == {path.name for path in (ROOT / "torchelastic" / "observe" / "page" / "static").iterdir()}
