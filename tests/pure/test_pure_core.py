"""The list of what `make coverage` measures is complete and honest."""

from __future__ import annotations

import configparser
import functools
import re

from tests.pure.test_rooms import PACKAGE, imports_of, modules

ROOT = PACKAGE.parent

#: Whoever imports one of these, or a module that does, may look at a clock, talk, wait, log, roll dice or touch files.
ACTING = {
    *("asyncio", "concurrent", "contextvars", "ctypes", "etcd3", "fcntl", "fsspec", "grpc", "http", "importlib"),
    *("logging", "multiprocessing", "os", "pathlib", "prometheus_client", "psutil", "queue", "random", "resource"),
    *("rich", "secrets", "select", "selectors", "shutil", "signal", "socket", "ssl", "subprocess", "tempfile"),
    *("threading", "time", "torch"),
}
#: Some that decide do log, or lay out tensors; none does any of this.
NEVER = {
    *("asyncio", "concurrent", "etcd3", "fcntl", "grpc", "http", "multiprocessing", "queue", "random", "select"),
    *("selectors", "shutil", "socket", "ssl", "subprocess", "tempfile"),
}


def listed() -> tuple[list[str], dict[str, str], dict[str, str]]:
    """What is measured; what imports nothing that acts and is not measured; what is not measured yet."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.read(ROOT / "tests/pure/pure_core.ini")
    return parser["run"]["include"].split(), dict(parser["left out"]), dict(parser["not yet"])


CORE, LEFT_OUT, NOT_YET = listed()


@functools.cache
def pure_modules() -> frozenset[str]:
    """Those that import nothing that acts, neither themselves nor through what they import of the package."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in modules()
    }
    imports = {}
    for name, path in paths.items():
        imports[name] = set(imports_of(path))
        # `from package import module` names the package
        text = path.read_text()
        for package, names in re.findall(r"^from (torchelastic[\w.]*) import \(?([\w\s,]+)", text, re.MULTILINE):
            imports[name] |= {f"{package}.{one}" for one in re.findall(r"\w+", names)} & set(paths)
    pure = {name for name in paths if not {one.split(".")[0] for one in imports[name]} & ACTING}
    is_package = {name for name, path in paths.items() if path.name == "__init__.py"}
    while True:
        acting = {name for name in pure if imports[name] & (set(paths) - pure - is_package)}
        if not acting:
            return frozenset(str(paths[name].relative_to(ROOT)) for name in pure - is_package)
        pure -= acting


def test_every_module_that_imports_nothing_that_acts_is_measured_or_says_why_not() -> None:
    assert pure_modules() - set(CORE) - set(LEFT_OUT) - set(NOT_YET) == set()
    assert len(pure_modules() & set(CORE)) > 60


def test_the_lists_are_sorted_and_name_each_module_once_with_a_reason() -> None:
    for names in (CORE, list(LEFT_OUT), list(NOT_YET)):
        assert names == sorted(set(names))
        assert [name for name in names if not (ROOT / name).is_file()] == []
    assert not set(CORE) & {*LEFT_OUT, *NOT_YET}
    assert not set(LEFT_OUT) & set(NOT_YET)
    assert set(LEFT_OUT) <= pure_modules()
    assert all({**LEFT_OUT, **NOT_YET}.values())


def test_what_is_measured_neither_talks_nor_starts_anything() -> None:
    talks = {name: {one.split(".")[0] for one in imports_of(ROOT / name)} & NEVER for name in CORE}
    assert {name: found for name, found in talks.items() if found} == {}


def test_whatever_is_left_out_of_the_measurement_has_its_reason_in_the_same_line() -> None:
    without = [
        f"{name}: {line.strip()}"
        for name in CORE
        for line in (ROOT / name).read_text().splitlines()
        if "pragma" in line and not re.search(r"# pragma: no (cover|branch) - \w", line)
    ]
    assert without == []
