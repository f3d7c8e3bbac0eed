"""What torchrun's words in a command line of `torchelastic run` come to."""

from __future__ import annotations

import argparse
from collections.abc import Set
from pathlib import Path

import pytest

from torchelastic.launch.command_line import command_parser
from torchelastic.launch.torchrun_options import Translation, from_environment, translated, workers_per_host
from torchelastic.usage import UsageError


def given(*words: str) -> argparse.Namespace:
    return command_parser().parse_args(["run", *words, "train.py"])


def meant(*words: str, several_hosts: bool = False) -> Translation:
    return translated(given(*words), several_hosts=several_hosts, nproc=2)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        ("--rdzv_backend=static", "--master_addr=127.0.0.1", "--master-port", "29501", "--node-rank", "0"),
        ("--standalone", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "job7"),
    ],
)
def test_one_host_without_an_etcd_is_standalone(words: tuple[str, ...]) -> None:
    translation = meant(*words)
    assert translation.options == {"standalone": True, "rdzv_endpoint": None}
    said = [word.partition("=")[0].replace("_", "-") for word in words if word[:2] == "--"]
    expected = [word for word in said if word not in ("--standalone", "--rdzv-id")]
    assert len(translation.notes) == bool(expected)
    assert all(word in translation.notes[0] for word in expected)


@pytest.mark.parametrize("backend", [(), ("--rdzv-backend", "etcd"), ("--rdzv-backend", "etcd-v2")])
@pytest.mark.parametrize("several_hosts", [False, True])
def test_an_etcd_that_is_named_is_met_at(backend: tuple[str, ...], several_hosts: bool) -> None:
    at = ("--rdzv-endpoint", "host:2379", "--rdzv-id", "job7", "--master-port", "1")
    translation = meant(*backend, *at, several_hosts=several_hosts)
    assert translation.options == {}
    assert translation.notes == ("--master-port has no effect: the hosts meet at --rdzv-endpoint",)


@pytest.mark.parametrize(
    ("words", "place", "unused"),
    [
        (("--rdzv-backend", "c10d", "--rdzv-endpoint", "host:29500"), ("host", 29500), ""),
        (("--rdzv-backend", "c10d", "--rdzv-endpoint", "host", "--node-rank", "1"), ("host", 29400), "--node-rank has"),
        (
            ("--rdzv-backend", "c10d", "--rdzv-endpoint", "[fd00::1]:1", "--master-addr", "x"),
            ("fd00::1", 1),
            "--master",
        ),
        (("--master-addr", "host", "--node-rank", "1"), ("host", 29500), "--node-rank has"),
        (("--rdzv-backend=static", "--master-addr", "host", "--master-port", "7"), ("host", 7), ""),
    ],
)
def test_several_hosts_meet_at_the_one_that_is_named(
    words: tuple[str, ...], place: tuple[str, int], unused: str
) -> None:
    translation = meant(*words, several_hosts=True)
    host = f"[{place[0]}]" if ":" in place[0] else place[0]
    endpoint = f"{host}:{place[1]}"
    assert translation.options == {"meeting_place": place, "rdzv_endpoint": endpoint, "rdzv_id": "none"}
    assert f"the launcher on {place[0]} starts an etcd at port {place[1]}" in translation.notes[-1]
    assert len(translation.notes) == 1 + bool(unused)
    assert unused in translation.notes[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rdzv-backend", "c10d"), "write --rdzv-endpoint HOST:29400, the same on each"),
        (("--rdzv-backend", "c10d", "--rdzv-endpoint", "host:0"), "write --rdzv-endpoint HOST:29400"),
        (("--rdzv-backend", "zeus", "--rdzv-endpoint", "host:1"), "write --rdzv-endpoint HOST:2379 --rdzv-id ID"),
    ],
)
def test_where_several_hosts_cannot_meet_they_are_told_what_to_write(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        meant(*words, several_hosts=True)


@pytest.mark.parametrize(
    ("words", "hidden", "to_files"),
    [
        (("--redirects", "3"), {(0, "stdout"), (0, "stderr"), (1, "stdout"), (1, "stderr")}, True),
        (("-r", "0:1,1:2"), {(0, "stdout"), (1, "stderr")}, True),
        (("-r", "0"), set(), False),
        (("--tee", "1:3"), set(), True),
        (("--redirects", "3", "--tee", "0:1"), {(0, "stderr"), (1, "stdout"), (1, "stderr")}, True),
        (("--local-ranks-filter", "1"), {(0, "stdout"), (0, "stderr")}, False),
    ],
)
def test_output_is_shown_and_written_as_torchrun_would(
    words: tuple[str, ...], hidden: Set[tuple[int, str]], to_files: bool
) -> None:
    translation = meant(*words)
    assert (translation.hidden, translation.to_files) == (hidden, to_files)


def test_times_networks_and_roles_have_names_of_ours() -> None:
    conf = "--rdzv-conf=join_timeout=60,last_call_timeout=5,is_host=1"
    translation = meant("--shutdown-timeout=7", conf, "--local-addr", "10.0.0.4", "--role", "trainer", "--rdzv-id=a")
    assert dict(translation.options) == {
        "standalone": True, "rdzv_endpoint": None, "term_grace": 7.0, "rdzv_timeout": 60.0, "last_call": 5.0,
        "iface": "10.0.0.4/32",
    }  # fmt: skip
    assert translation.variables == {"ROLE_NAME": "trainer"}
    assert [note.split(" has")[0] for note in translation.notes] == ["--rdzv-conf is_host"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--numa-binding", "near"), "--numa-binding 'near': write node, socket, exclusive or core-complex"),
        (("--logs-specs", "x"), "--log-dir DIR"),
        (("--event-log-handler", "console"), "`torchelastic events` shows them"),
        (("--duplicate-stdout-filters", "loss"), "--log-dir DIR writes each worker's output to a file, for grep"),
        (("--redirects", "4"), "--redirects '4': write 0, 1, 2 or 3, or LOCAL_RANK:N"),
        (("--tee", "0:9"), "--tee '0:9'"),
        (("--local-ranks-filter", "a"), "--local-ranks-filter 'a': write LOCAL_RANK"),
        (("--rdzv-conf", "x"), "--rdzv-conf 'x': write KEY=VALUE"),
        (("--rdzv-conf", "join_timeout=soon"), "--rdzv-conf join_timeout 'soon': write a number"),
        (("--local-addr", "node7"), "--local-addr 'node7': write an address of this host, or --iface"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_to_write(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        meant(*words)
    assert said in str(caught.value)


def test_torchruns_defaults_ask_for_nothing() -> None:
    assert meant("--event-log-handler", "null", "--logs-specs", "default", "--standalone").notes == ()


@pytest.mark.parametrize(
    ("words", "prefix", "note"),
    [
        ((), "[worker ${local_rank}] ", ""),
        (("--role", "rank"), "[${role_name}${local_rank}]:", ""),
        (("--role", "rank", "--log-line-prefix-template", "$hostname:${rank}: "), "$hostname:${rank}: ", ""),
        (("--log_line_prefix_template", "${node}: "), "${node}: ", "${node} stays as it is, there are only role_name"),
    ],
)
def test_lines_of_workers_begin_as_torchrun_has_it(words: tuple[str, ...], prefix: str, note: str) -> None:
    translation = meant(*words, "--standalone")
    assert translation.prefix == prefix
    assert [note in said for said in translation.notes] == [True] * bool(note)


def test_without_a_role_workers_have_torchruns_default_and_an_empty_one_is_one() -> None:
    assert (meant().variables, meant("--role", "").variables) == ({}, {"ROLE_NAME": ""})


def test_what_the_launch_module_needs_has_no_effect() -> None:
    assert meant("--standalone", "--use_env").notes == ("--use-env has no effect: LOCAL_RANK is set always",)


@pytest.mark.parametrize("endpoint", ["localhost:29401", "30000", "127.0.0.1:29500", "[::1]:29500", "localhost"])
def test_an_endpoint_of_one_host_for_itself_is_no_etcd(endpoint: str) -> None:
    assert meant("--rdzv-endpoint", endpoint).options == {"standalone": True, "rdzv_endpoint": None}
    assert meant("--rdzv-endpoint", endpoint, "--rdzv-id", "job7").options == {}


def test_an_endpoint_of_several_hosts_without_an_id_may_be_two_things() -> None:
    with pytest.raises(
        UsageError, match="write --rdzv-id ID for an etcd there; if it is one of the hosts, write --rdz"
    ):
        meant("--rdzv-endpoint", "node0:29500", several_hosts=True)


def test_the_completion_is_refused_without_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_parser().parse_args(["run", "--print-completion", "zsh"])
    assert "shtab --shell zsh torchelastic.launch.command_line.command_parser" in capsys.readouterr().err


KINDS = {"auto": 2, "gpu": 2, "xpu": 3, "npu": 0}


@pytest.mark.parametrize(("text", "workers"), [("3", 3), ("cpu", 8), ("gpu", 2), ("auto", 2), ("xpu", 3)])
def test_workers_are_counted_as_torchrun_counts_them(text: str, workers: int) -> None:
    assert workers_per_host(text, lambda: 8, KINDS.get) == workers
    assert workers_per_host("auto", lambda: 8, lambda _kind: 0) == 8


@pytest.mark.parametrize(
    ("text", "said"), [("npu", "no NPU is visible"), ("two", "'two': write a number"), ("-1", "'-1'")]
)
def test_workers_that_cannot_be_counted_are_an_error(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        workers_per_host(text, lambda: 8, KINDS.get)


def test_variables_stand_for_options_that_are_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_environment({"PET_NNODES": "2", "PET_RDZV_ID": "", "NNODES": "3"}) == {"nnodes": "2"}
    assert from_environment({"PET_STANDALONE": "1", "PET_NO_PYTHON": "0", "PET_MODULE": ""}) == {"standalone": True}
    assert from_environment({"PET_NUMA_BINDING": "node"}) == {}  # nor does torchrun
    assert from_environment({"PET_SHUTDOWN_TIMEOUT": "7", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "8"}) == {"term_grace": "7"}
    assert from_environment({"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[$rank] "}) == {
        "log_line_prefix_template": "[$rank] "
    }
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    monkeypatch.setenv("PET_MAX_RESTARTS", "9")
    monkeypatch.setenv("PET_LOG_DIR", "logs")
    options = given("--max-restarts", "1")
    assert (options.nproc_per_node, options.max_restarts, options.log_dir) == ("4", 1, Path("logs"))
