"""The Kubernetes manifests: right by the schemas of each version, and right among each other."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import all_versions
from packaging.version import Version

from tests.process.manifests import (
    KUBERNETES,
    PAGE,
    ROOT,
    Object,
    container_of,
    expanded,
    objects,
    pod_templates,
    secrets_of_the_page,
    the,
)
from torchelastic.agent.supervisor import KILL_GRACE_S
from torchelastic.launch.command_line import command_parser
from torchelastic.launch.run_options import nodes
from torchelastic.lifetime import STOPPED_EARLY
from torchelastic.lifetime.sources import detection

OLDEST = re.findall(r"Kubernetes\s+(1\.\d+) or later", PAGE.read_text())[0]
VERSIONS = sorted({version for version in all_versions() if Version(version) >= Version(OLDEST)}, key=Version)


def kustomized(folder: str) -> list[Object]:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here, whose kustomize builds the manifests")
    done = subprocess.run(["kubectl", "kustomize", str(KUBERNETES / folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def launcher_options() -> argparse.Namespace:
    """The trainer's command line, as the launcher reads it."""
    program, command, *words = container_of("Job", "train")["command"]
    assert (program, command) == ("torchelastic", "run")
    return command_parser().parse_args(["run", *words])


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_the_schemas_of_kubernetes(version: str) -> None:
    for one in objects("base"):
        kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("folder", ["base", "gpu", "monitoring"])
def test_kubectl_builds_each_folder(folder: str) -> None:
    built = kustomized(folder)
    expected = objects("base" if folder == "gpu" else folder)
    assert sorted((one["kind"], one["metadata"]["name"]) for one in built) == sorted(
        (one["kind"], one["metadata"]["name"]) for one in expected
    )
    for one in built:
        if one["kind"] != "PodMonitor":  # a CRD: its schema is in none of Kubernetes' own
            kubernetes_validate.validate(one, VERSIONS[-1], strict=True)
        if one["kind"] in ("StatefulSet", "Job"):
            images = [container["image"] for container in one["spec"]["template"]["spec"]["containers"]]
            assert all(re.fullmatch(r"[a-z-]+:[a-z0-9.]+", image) for image in images), "kustomization.yaml pins images"


def test_selectors_find_the_pods_that_they_mean() -> None:
    labels = {one["metadata"]["name"]: template["metadata"]["labels"] for one, template in pod_templates()}
    assert set(labels) == {"etcd", "train"}
    for one in [*objects("base"), *objects("monitoring")]:
        spec = one["spec"]
        selector: dict[str, Any] = spec.get("selector") or spec.get("podSelector") or {}
        selector = selector.get("matchLabels", selector)
        if one["kind"] in ("Job", "PersistentVolumeClaim"):
            assert not selector, "a Job makes its own"
            continue
        found = [name for name, have in labels.items() if selector.items() <= have.items()]
        assert selector, one["kind"]
        assert found == [one["metadata"]["name"]]


def test_etcd_lets_trainers_in_and_nobody_else() -> None:
    trainers, members = (
        template["metadata"]["labels"]
        for name in ("train", "etcd")
        for one, template in pod_templates()
        if one["metadata"]["name"] == name
    )
    allowed = {}
    for rule in the("NetworkPolicy", "etcd")["spec"]["ingress"]:
        selectors = [who["podSelector"]["matchLabels"] for who in rule.get("from", [])]
        for port in rule["ports"]:
            allowed[port["port"]] = [all(s.items() <= pod.items() for s in selectors) for pod in (trainers, members)]
            assert selectors or port["port"] == "metrics", "whatever is not health is for pods with labels"
    assert allowed == {"client": [True, True], "peer": [False, True], "metrics": [True, True]}


def test_every_port_that_is_named_is_there() -> None:
    ports = {
        one["metadata"]["name"]: {
            port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]
        }
        for one, template in pod_templates()
    }
    for name in ("etcd", "train"):
        for port in the("Service", name)["spec"]["ports"]:
            assert ports[name][port["targetPort"]] == port["port"]
    for endpoint in the("PodMonitor", "train", "monitoring")["spec"]["podMetricsEndpoints"]:
        assert endpoint["port"] in ports["train"]
    options = launcher_options()
    assert options.metrics_port == ports["train"]["metrics"]
    assert options.metrics_host == "0.0.0.0"
    flags = dict(flag.split("=", 1) for flag in container_of("StatefulSet", "etcd")["command"] if "=" in flag)
    for flag, port in (
        ("--listen-client-urls", "client"),
        ("--listen-peer-urls", "peer"),
        ("--listen-metrics-urls", "metrics"),
    ):
        assert flags[flag].endswith(f"://0.0.0.0:{ports['etcd'][port]}")
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container_of("StatefulSet", "etcd")[probe]["httpGet"]["port"] == "metrics"


def test_the_names_of_the_members_are_those_that_a_stateful_set_gives() -> None:
    stateful_set = the("StatefulSet", "etcd")
    service = the("Service", stateful_set["spec"]["serviceName"])
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"], "members look for each other before they are ready"
    pods = [f"etcd-{number}" for number in range(stateful_set["spec"]["replicas"])]
    flags = dict(flag.split("=", 1) for flag in container_of("StatefulSet", "etcd")["command"] if "=" in flag)
    assert flags["--initial-cluster"] == ",".join(
        f"{pod}=https://{pod}.{service['metadata']['name']}:2380" for pod in pods
    )
    for flag, port in (("--advertise-client-urls", 2379), ("--initial-advertise-peer-urls", 2380)):
        assert expanded(flags[flag], {"POD_NAME": "etcd-1"}) == f"https://etcd-1.etcd:{port}"
    assert launcher_options().rdzv_endpoint == ",".join(f"{pod}.etcd:2379" for pod in pods)
    [hosts] = re.findall(r"^deploy/tls/make-certs\.sh \S+ (.*)$", PAGE.read_text(), flags=re.M)
    assert {f"{pod}.etcd" for pod in pods} <= set(hosts.split())
    assert the("Job", "train")["spec"]["template"]["spec"]["subdomain"] == the("Service", "train")["metadata"]["name"]


def test_every_file_that_a_command_names_is_mounted_and_every_mount_has_a_volume() -> None:
    made_here = {(one["kind"], one["metadata"]["name"]) for one in objects("base")}
    for one, template in pod_templates():
        [container] = template["spec"]["containers"]
        claims = [claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", [])]
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) == {*volumes, *claims}
        for word in container["command"]:
            path = word.rpartition("=")[2]
            if path.startswith("/") and not path.startswith("/srv/job/"):  # that one is in the image
                assert any(path.startswith(mount + "/") for mount in mounts), word
        for name, volume in volumes.items():
            if "secret" in volume:
                files = {Path(file).name for file in secrets_of_the_page()[volume["secret"]["secretName"]]}
                assert volume["secret"]["defaultMode"] == 0o440, "see docs/security.md: not for everybody"
                [folder] = [path for path, mounted in mounts.items() if mounted == name]
                named = {Path(w.rpartition("=")[2]).name for w in container["command"] if f"={folder}/" in w}
                assert named == files
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in made_here


def test_pods_are_nobody_special_and_keep_no_token_of_the_cluster() -> None:
    for _, template in pod_templates():
        pod, [container] = template["spec"], template["spec"]["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] > 0
        assert not pod["automountServiceAccountToken"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]


def test_the_grace_of_a_pod_is_enough_for_that_of_its_launcher() -> None:
    grace_s = the("Job", "train")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    # after --term-grace: SIGTERM to what is left, SIGKILL, and the agent's own way out
    assert grace_s >= launcher_options().term_grace + 2 * KILL_GRACE_S + 10
    for figure in (
        f"`--term-grace` ({launcher_options().term_grace:g} s)",
        f"`terminationGracePeriodSeconds` ({grace_s} s)",
    ):
        assert figure in PAGE.read_text()


def test_memory_for_checkpoints_is_a_volume_that_fits_into_the_memory_of_the_container() -> None:
    pod = the("Job", "train")["spec"]["template"]["spec"]
    [mount] = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    size, limit = volume["emptyDir"]["sizeLimit"], pod["containers"][0]["resources"]["limits"]["memory"]
    assert 0 < int(size.removesuffix("Gi")) < int(limit.removesuffix("Gi"))


def test_the_command_line_of_the_pods_means_an_elastic_run_that_a_late_pod_does_not_fail() -> None:
    options = launcher_options()
    low, high = nodes(options.nnodes)
    job = the("Job", "train")["spec"]
    assert low <= job["parallelism"] == job["completions"] <= high, "an Indexed Job is elastic if both are equal"
    assert job["completionMode"] == "Indexed"
    assert options.if_finished == "succeed"
    assert options.script == "/srv/job/train.py"
    assert options.rdzv_id == "$(JOB_NAME)-$(JOB_UID)"
    defined = {variable["name"] for variable in container_of("Job", "train")["env"]}
    used = set(re.findall(r"\$\((\w+)\)", " ".join(container_of("Job", "train")["command"])))
    assert used <= defined
    known = {value for name, value in vars(detection).items() if name.endswith("_VARIABLE")}
    ours = {name for name in defined if name.startswith("TORCHELASTIC_")}
    assert ours <= known


@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_the_workers_of_a_pod_share_its_processors(folder: str) -> None:
    [job] = [one for one in kustomized(folder) if one["kind"] == "Job"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    [threads] = [int(one["value"]) for one in container["env"] if one["name"] == "OMP_NUM_THREADS"]
    [workers] = re.findall(r"--nproc-per-node=(\d+)", " ".join(container["command"]))
    assert threads * int(workers) == int(container["resources"]["requests"]["cpu"])


def outcome(job: Object, exit_code: int, *, is_disrupted: bool = False) -> str:
    """What Kubernetes does with a pod that failed: the first rule counts (Job, "Pod failure policy")."""
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        conditions, codes = rule.get("onPodConditions", []), rule.get("onExitCodes", {"values": []})
        if is_disrupted and any(condition["type"] == "DisruptionTarget" for condition in conditions):
            return str(rule["action"])
        if exit_code in codes["values"]:
            assert codes["operator"] == "In"
            assert codes["containerName"] == job["spec"]["template"]["spec"]["containers"][0]["name"]
            return str(rule["action"])
    return "Count"


def test_a_pod_that_went_in_order_or_was_evicted_costs_no_try_and_a_wrong_command_line_no_second_one() -> None:
    job = the("Job", "train")
    assert outcome(job, 137, is_disrupted=True) == "Ignore"
    assert outcome(job, 128 + 15) == "Ignore"
    assert outcome(job, STOPPED_EARLY) == "Ignore"
    assert outcome(job, 2) == "FailJob"
    assert [outcome(job, code) for code in (1, 137)] == ["Count", "Count"]
    assert job["spec"]["backoffLimit"] > 0
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never", "podFailurePolicy wants it"


def test_what_the_page_tells_to_run_names_what_is_there() -> None:
    text = PAGE.read_text()
    for folder in re.findall(r"kubectl apply -k (\S+)", text):
        assert (ROOT / folder / "kustomization.yaml").is_file()
    patch = re.search(r"kubectl patch job (\S+) --patch '(.*)'", text)
    assert patch is not None
    spec = yaml.safe_load(patch[2])["spec"]
    assert the("Job", patch[1])
    assert spec["parallelism"] == spec["completions"]
    assert set(spec) == {"parallelism", "completions"}
