"""A real Prometheus and a real push gateway of a test's own, and what they answer."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import wait_until
from torchelastic.network.ports import unused_ports
from torchelastic.processes import dies_with_parent

NEEDED = ("prometheus", "promtool", "prometheus-pushgateway")
INSTALL = "apt-get install --no-install-recommends prometheus prometheus-pushgateway"
DEPLOYED = Path(__file__).parents[2] / "deploy" / "prometheus"
PATIENCE_S = 60.0

_CONFIGURATION = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: torchelastic
    static_configs: [{{targets: {targets}}}]
  - job_name: push-gateway
    honor_labels: true
    static_configs: [{{targets: {gateways}}}]
"""

Labels = tuple[tuple[str, str], ...]


def why_impossible() -> str:
    """Why no Prometheus can be had here; empty: it can."""
    missing = [program for program in NEEDED if shutil.which(program) is None]
    return f"no Prometheus: {', '.join(missing)} not found; {INSTALL}" if missing else ""


def promtool(*arguments: str, given: str = "", folder: Path = DEPLOYED) -> subprocess.CompletedProcess[str]:
    """Run promtool and return what came of it."""
    return subprocess.run(
        ["promtool", *arguments], input=given, capture_output=True, text=True, cwd=folder, timeout=60, check=False
    )


def fetched(url: str, accept: str = "*/*") -> tuple[str, str]:
    """Text and content type; never by way of a web proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, headers={"Accept": accept}), timeout=10) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


class Prometheus:
    """One that runs.

    Args:
        url: of its HTTP API.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def api(self, path: str, **parameters: str) -> Any:
        """What the API answers; an AssertionError with its words where it refuses."""
        try:
            text, _ = fetched(f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error
        return json.loads(text)["data"]

    def query(self, expression: str) -> dict[Labels, float]:
        """The value of each series, by its labels without those of the target."""
        found = {}
        for one in self.api("query", query=expression)["result"]:
            found[_labels(one["metric"])] = float(one["value"][1])
        return found

    def one(self, expression: str) -> float | None:
        """The value of the only series; None: there is none."""
        values = list(self.query(expression).values())
        assert len(values) <= 1, f"{expression}: {values}"
        return values[0] if values else None

    def wait_for(self, expression: str, value: float) -> None:
        """Until a query has this value."""
        wait_until(lambda: self.one(expression) == value, PATIENCE_S, f"{expression} == {value}")

    def wait_for_some(self, expression: str) -> None:
        """Until a query finds anything."""
        wait_until(lambda: self.query(expression), PATIENCE_S, expression)


def _labels(metric: Mapping[str, str]) -> Labels:
    return tuple(sorted((name, value) for name, value in metric.items() if name not in ("__name__", "job", "instance")))


@contextmanager
def running_prometheus(folder: Path, targets: Sequence[str], gateways: Sequence[str] = ()) -> Iterator[Prometheus]:
    """One with the rules of deploy/prometheus that scrapes these HOST:PORTs once a second."""
    folder.mkdir()
    text = _CONFIGURATION.format(
        rules=DEPLOYED / "torchelastic.rules.yml",
        targets=json.dumps(list(targets)),
        gateways=json.dumps(list(gateways)),
    )
    (folder / "prometheus.yml").write_text(text)
    with _served(
        folder / "prometheus.log", "prometheus", f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
    ) as url:  # fmt: skip
        yield Prometheus(url)


@contextmanager
def running_gateway(folder: Path) -> Iterator[str]:
    """The URL of an empty push gateway."""
    with _served(folder / "gateway.log", "prometheus-pushgateway") as url:
        yield url


@contextmanager
def _served(log: Path, *command: str) -> Iterator[str]:
    address = "127.0.0.1:{}".format(*unused_ports("127.0.0.1"))
    with log.open("wb") as file:
        server = subprocess.Popen(
            dies_with_parent([*command, f"--web.listen-address={address}"]), stdout=file, stderr=file
        )
    try:
        wait_until(lambda: _is_ready(f"http://{address}/-/ready"), PATIENCE_S, f"{command[0]} is ready")
        yield f"http://{address}"
    finally:
        server.kill()
        server.wait()


def _is_ready(url: str) -> bool:
    try:
        fetched(url)
    except OSError:
        return False
    return True
