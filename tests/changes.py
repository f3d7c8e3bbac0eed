"""Which tests wait for CI unless something that they are about has changed, and what has changed.

Adapters, examples, pages, packaging and what the tests themselves stand on change seldom, and their tests cost much:
they import whole frameworks, build the package or start a pytest. `make test` runs such a file of tests when git says
that it has changed, or something that it belongs to (`BELONGS`): in the commits that the branch's upstream does not
have, in the last commit, or since then in the working tree, files that git does not know yet included. Else its tests
are `long`: `make test-long` and CI run them. Where git cannot say (no git, no repository, no commit before this one),
all have changed.

What such a test needs of the rest of the package is not in the list: that a change there breaks an adapter is found
by CI.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

_HUGGING_FACE = (
    "torchelastic/adapters/*.py",
    "torchelastic/adapters/hugging_face/*",
    "tests/process/*hugging_face*",
    "tests/process/accelerate_runs.py",
)
_LIGHTNING = ("torchelastic/adapters/*.py", "torchelastic/adapters/lightning/*", "tests/process/*lightning*")
_PAGES = ("docs/*", "README.md", "CONTRIBUTING.md", "benchmarks/README.md")
_FORKED = ("tests/process/fork*", "torchelastic/processes/*")
_TRANSFORMER = ("examples/transformer_slurm/*", "deploy/slurm/*", "tests/process/transformer_jobs.py")

#: Patterns of files of tests, and of the paths that their tests are about; `*` matches any part of a path, `/` too.
BELONGS: Mapping[str, Collection[str]] = {
    "tests/process/test_accelerate_*.py": _HUGGING_FACE,
    "tests/process/test_transformers_memory.py": _HUGGING_FACE,
    "tests/process/test_lightning_*.py": _LIGHTNING,
    "tests/process/test_megatron_memory.py": ("torchelastic/adapters/megatron/*", "tests/process/megatron_ranks.py"),
    "tests/nemo/*": ("torchelastic/adapters/nemo/*", "tests/nemo/*"),
    "tests/process/test_imagenet_*.py": ("examples/imagenet/*",),
    "tests/process/test_nanogpt.py": ("examples/nanogpt/*",),
    "tests/process/test_transformer_*.py": _TRANSFORMER,
    "tests/process/test_sources_of_libraries.py": ("torchelastic/data/sources/*",),
    "tests/process/test_docs*.py": _PAGES,
    "tests/process/test_migrating_*.py": ("docs/migrating/*", "examples/migrating/*"),
    "tests/process/test_killed_pytest.py": ("tests/cluster/harness.py", *_FORKED),
    "tests/cluster/test_forked_workers.py": ("tests/cluster/fork*", *_FORKED),
    "tests/cluster/test_cookbook.py": ("docs/cookbook.md",),
    "tests/cluster/test_migrating_scripts.py": ("docs/migrating/*", "examples/migrating/*"),
    "tests/process/test_packaging.py": ("pyproject.toml", "setup.py", "*/py.typed", "constraints*.txt", "LICENSE"),
    "tests/process/test_dockerfile.py": ("deploy/docker/*",),
    "tests/process/test_kubernetes_manifests.py": ("deploy/kubernetes/*", "tests/process/manifests.py"),
    "tests/process/test_make_certs.py": ("deploy/tls/*", "tests/process/made_certificates.py"),
    "tests/process/test_benchmark*.py": ("benchmarks/*",),
    "tests/process/test_simulate_esi.py": ("torchelastic/launch/simulate_esi.py", "docs/simulate-esi.md"),
}


def waits(test_file: str, changed: Collection[str] | None) -> bool:
    """Whether a file's tests may wait for CI. Pure.

    Args:
        test_file: from the root of the checkout.
        changed: paths from there; None: nobody knows, so all of them.

    >>> waits("tests/process/test_nanogpt.py", ["torchelastic/step.py"])
    True
    >>> waits("tests/process/test_nanogpt.py", ["examples/nanogpt/model.py"])
    False
    >>> waits("tests/process/test_heartbeat.py", [])
    False
    """
    belongs = [about for pattern, about in BELONGS.items() if fnmatchcase(test_file, pattern)]
    if not belongs or changed is None:
        return False
    about = [test_file, *(pattern for patterns in belongs for pattern in patterns)]
    return not any(fnmatchcase(path, pattern) for path in changed for pattern in about)


def changed_paths(root: Path) -> list[str] | None:
    """What has changed in a checkout, by git; None: it cannot say."""
    base = _git(root, "merge-base", "HEAD", "@{upstream}")
    head = _git(root, "rev-parse", "HEAD")
    if base is None or base == head:  # no upstream, or it has all commits: then the last commit is what is new
        base = _git(root, "rev-parse", "HEAD~1")
    changed = None if base is None else _git(root, "diff", "--name-only", "-z", "--no-renames", base[0])
    unknown = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return None if changed is None or unknown is None else sorted({*changed, *unknown})


def _git(root: Path, *words: str) -> list[str] | None:
    """What a command of git says, one path or line each; None: it has failed."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=False, env=variables, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.replace("\0", "\n").split("\n")[:-1]
