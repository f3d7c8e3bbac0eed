"""The manifests of deploy/kubernetes, as the tests read them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
PAGE = ROOT / "docs" / "kubernetes.md"

Object = dict[str, Any]


def objects(folder: str) -> list[Object]:
    """All objects of a folder, without its kustomization."""
    files = [path for path in sorted((KUBERNETES / folder).glob("*.yaml")) if path.name != "kustomization.yaml"]
    return [document for path in files for document in yaml.safe_load_all(path.read_text())]


def the(kind: str, name: str, folder: str = "base") -> Object:
    [found] = [one for one in objects(folder) if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def pod_templates() -> Iterator[tuple[Object, Object]]:
    """What makes pods, each with its template."""
    for one in objects("base"):
        if one["kind"] in ("StatefulSet", "Job"):
            yield one, one["spec"]["template"]


def container_of(kind: str, name: str) -> Object:
    [container] = the(kind, name)["spec"]["template"]["spec"]["containers"]
    return dict(container)


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` as Kubernetes has it: what is not defined stays as it is."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)


def field_of(path: str, name: str, labels: Mapping[str, str]) -> str:
    """What the downward API gives for a field of a pod."""
    label = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
    return {"metadata.name": name}[path] if label is None else labels[label[1]]


def environment_of(container: Object, name: str, labels: Mapping[str, str]) -> dict[str, str]:
    """A container's variables, in a pod with that name and these labels."""
    variables = {}
    for one in container["env"]:
        value = one.get("value")
        variables[one["name"]] = (
            field_of(one["valueFrom"]["fieldRef"]["fieldPath"], name, labels) if value is None else value
        )
    return variables


def secrets_of_the_page() -> dict[str, list[str]]:
    """Which files docs/kubernetes.md puts into which secret: paths by name."""
    lines = re.findall(r"^kubectl create secret generic (\S+) (.*)$", PAGE.read_text(), flags=re.M)
    return {name: re.findall(r"--from-file=(\S+)", rest) for name, rest in lines}
