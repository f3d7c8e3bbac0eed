"""Invalid arguments: one line that names the argument, the remedy and the help; and how the help is laid out."""

from __future__ import annotations

import re

import pytest

from torchelastic.launch.command_line import command_parser
from torchelastic.launch.main import main


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "--nnodes", "3:2", "x.py"], "torchelastic run: --nnodes '3:2': 1 <= MIN <= MAX"),
        (["run", "--max-restarts=x", "x.py"], "torchelastic run: argument --max-restarts"),
        (["run"], "torchelastic run: the following arguments are required: script"),
        (["run", "no-such-file.py"], "torchelastic run: there is no file 'no-such-file.py'"),
        (["run", "/"], "torchelastic run: '/' is a folder: name the script in it; for a package write -m PACKAGE"),
        (["run", "--log-dir=/dev/null/a", "x.py"], "torchelastic run: --log-dir /dev/null/a: /dev/null is a file"),
        (["run", "--nproc-per-node=999999", "x.py"], "torchelastic run: --nproc-per-node 999999: this process may"),
        (["status", "--bogus"], "torchelastic status: unrecognized arguments: --bogus"),
        (
            ["run", "--nproc_per_nod=2", "--stand-alone", "--bogus", "x.py"],
            "torchelastic run: unrecognized arguments: --nproc_per_nod=2 --stand-alone --bogus (did you mean "
            "--nproc-per-node, --standalone?)",
        ),
        (["status", "--rdzv-endpoint=h:1"], "torchelastic status: --rdzv-endpoint names an etcd, not a run: give"),
        (["status", "--rdzv-endpoint=h:abc", "--rdzv-id=x"], "torchelastic status: 'h:abc' is no HOST or HOST:PORT"),
        (["status", "--rdzv-endpoint=h h:1", "--rdzv-id=x"], "torchelastic status: 'h h:1' is no HOST or HOST:PORT"),
        (["drain"], "torchelastic drain: the following arguments are required: --rdzv-endpoint"),
        (["checkpoint", "ls", "x", "--bogus"], "torchelastic checkpoint ls: unrecognized arguments: --bogus"),
        (["no-such-command"], "torchelastic: argument COMMAND: invalid choice: 'no-such-command'"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_one_line(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(expected)
    command = expected.partition(":")[0]
    assert line.endswith(f"; see {command} --help")


@pytest.mark.parametrize("command", ["run", "status", "top", "drain", "doctor"])
def test_the_options_about_access_to_etcd_are_the_last_part_of_the_help(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command_parser().parse_args([command, "--help"])
    usage, *parts = re.split(r"^(?=\S.*:$)", capsys.readouterr().out, flags=re.MULTILINE)
    assert usage.startswith(f"usage: torchelastic {command}")
    with_etcd = [part.splitlines()[0] for part in parts if re.search(r"^  --etcd-", part, flags=re.MULTILINE)]
    assert with_etcd == ["access to etcd:"]
    assert [part.splitlines()[0] for part in parts if not part.startswith("examples")][-1] == "access to etcd:"
