"""Pods of deploy/kubernetes without a Kubernetes: each container's own command line, on a host of its own.

A pod gets the environment, the mounts and the names that its manifest and the services give it: a hosts file stands
for the cluster's DNS, folders for volumes. What a kubelet does with users, limits and probes is left out.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.harness import ROOT, Job
from tests.hosts import Host, Lab
from tests.process.manifests import Object, container_of, environment_of, expanded, the
from torchelastic.rendezvous.server import find_etcd_binary

#: In a mount namespace of the pod: an empty file system where the mounts are, then the mounts, then the command.
MOUNTED = """
set -e
mount --bind "$1" /etc/hosts; shift
for top in /run /mnt /srv /var/lib; do mount -t tmpfs none $top; done
while [ "$1" != -- ]; do mkdir -p "$2"; mount --bind "$1" "$2"; shift 2; done
shift
exec "$@"
"""


class Pods:
    """Starts pods on the hosts of a lab.

    Args:
        lab: with a host for each pod, named as the pod's host name.
        folder: for volumes.
        secrets: which files are in which secret.
    """

    def __init__(self, lab: Lab, folder: Path, secrets: Mapping[str, Sequence[Path]]) -> None:
        self._lab, self._folder = lab, folder
        for name, files in secrets.items():
            (folder / name).mkdir(parents=True)
            for file in files:
                shutil.copy(file, folder / name)
        self._hosts = folder / "hosts"

    def serve_names(self, names: Mapping[str, Sequence[str]]) -> None:
        """The names that services give to pods: by host."""
        lines = [f"{self._lab[host].address} {' '.join((host, *others))}" for host, others in names.items()]
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")

    def command(self, kind: str, name: str, pod: str, labels: Mapping[str, str] | None = None) -> list[str]:
        """What starts a container on its host.

        Args:
            kind: of what makes such pods.
            name: of that.
            pod: the pod's name; its host's is what comes before a `_`.
            labels: of the pod, for the downward API.
        """
        container = container_of(kind, name)
        host = self._lab[pod.partition("_")[0]]
        variables = environment_of(container, pod, labels or {})
        words = [expanded(word, variables) for word in container["command"]]
        mounts = [str(word) for pair in self._mounts(kind, name, host, container) for word in pair]
        path = f"{Path(sys.executable).parent}:{find_etcd_binary().parent}:{os.environ['PATH']}"
        variables = {**variables, "PATH": path, "RES_OPTIONS": "timeout:1 attempts:1"}
        given = ["env", *(f"{key}={value}" for key, value in variables.items())]
        inside = ["sh", "-c", MOUNTED, "pod", str(self._hosts), *mounts, "--", *given, *words]
        return host.command(["unshare", "--mount", "--", *inside])

    def _mounts(self, kind: str, name: str, host: Host, container: Object) -> list[tuple[Path, str]]:
        spec = the(kind, name)["spec"]
        volumes = {volume["name"]: volume for volume in spec["template"]["spec"]["volumes"]}
        found = [(self._folder / "image", "/srv/job")]
        for mount in container["volumeMounts"]:
            volume = volumes.get(mount["name"], {})
            if "secret" in volume:
                folder = self._folder / str(volume["secret"]["secretName"])
            elif "persistentVolumeClaim" in volume:  # one for all
                folder = self._folder / str(volume["persistentVolumeClaim"]["claimName"])
            else:
                folder = self._folder / f"{host.name}-{mount['name']}"
            found.append((folder, mount["mountPath"]))
        for folder, _ in found:
            folder.mkdir(exist_ok=True)
        return found


def write_image(folder: Path, job: Job) -> None:
    """`/srv/job/train.py`: the cluster tests' training job, with what the manifest gives it and what the test does."""
    script = folder / "image" / "train.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(ROOT)!r})\nsys.argv += {job.job_arguments()!r}\n"
        f"runpy.run_path({str(job.script)!r}, run_name='__main__')\n"
    )


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill what is left."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
