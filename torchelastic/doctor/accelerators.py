"""GPUs, and what torch can do with them. torch is imported by a child, which is ended if that takes too long.

What is found of NCCL on the way is judged by `nccl_rules`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchelastic.doctor.findings import Finding, Level
from torchelastic.doctor.nccl_rules import SHARING, NcclFacts, judge_nccl, may_share, release_of
from torchelastic.foreign_json import RecordError, converted, decode_json
from torchelastic.rendezvous.credentials import PASSWORD_VARIABLE

NAME = "accelerators"
#: Importing torch from a cold disk takes seconds.
PROBE_TIMEOUT_S = 11.0
#: A line of what the child prints for each GPU, and more.
_MOST_ANSWER_BYTES = 1 << 20

#: The version of NCCL is of the library that is loaded, which may be another one than torch was built with. "nccl" is
#: NCCL2 where torch has another name for the older engine, unless the variable says 0, which torch reads when imported.
_PROBE = """
import json, os, torch
import torch.distributed as dist
here = dist.is_available()
nccl = here and dist.is_nccl_available()
hip = getattr(torch.version, "hip", None)
cuda = torch.cuda.is_available()
count = torch.cuda.device_count() if cuda else 0
print(json.dumps({
    "torch": torch.__version__,
    "cuda_build": torch.version.cuda or hip,
    "gloo": here and dist.is_gloo_available(),
    "nccl": nccl,
    "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if nccl and not hip else "",
    "is_nccl2": nccl and "nccl-legacy" in dist.Backend.backend_list and os.environ.get("TORCH_DIST_USE_NCCL2") != "0",
    "devices": [
        [torch.cuda.get_device_name(i), "%d.%d" % torch.cuda.get_device_capability(i)] for i in range(count)
    ],
    "compiled_for": torch.cuda.get_arch_list() if cuda and not hip else [],
}))
"""


@dataclass(frozen=True)
class AcceleratorFacts:
    """What there is.

    Attributes:
        nodes: the NVIDIA devices of the kernel, such as "nvidia0".
        visible: CUDA_VISIBLE_DEVICES; None: not set.
        failure: why the child failed; "" if it did not.
        is_late: it was ended because it took too long.
        torch: its version.
        cuda_build: the CUDA (or HIP) version that torch was built for; None: for CPUs alone.
        gloo: whether torch has this backend.
        nccl: the same.
        nccl_version: of the library; "" where it is not known, or AMD's.
        is_nccl2: whether the backend "nccl" is torch's newer engine.
        devices: name and compute capability of each GPU that torch can use.
        compiled_for: what torch's kernels were compiled for, such as "sm_90"; empty where that is not known.
        may_share: whether NCCL was told to let several ranks use one GPU, and can.
    """

    nodes: tuple[str, ...] = ()
    visible: str | None = None
    failure: str = ""
    is_late: bool = False
    torch: str = ""
    cuda_build: str | None = None
    gloo: bool = True
    nccl: bool = False
    nccl_version: str = ""
    is_nccl2: bool = False
    devices: tuple[tuple[str, str], ...] = ()
    compiled_for: tuple[str, ...] = ()
    may_share: bool = False


def judge_accelerators(facts: AcceleratorFacts, workers: int | None) -> list[Finding]:
    """What keeps torch from the GPUs or the GPUs from talking to each other. Pure.

    Args:
        facts: see there.
        workers: how many there are to be on this host; None: not known.
    """
    if facts.is_late:
        remedy = "run `time python -c 'import torch'` on this host: its disk may be slow, or it is busy"
        return [Finding(NAME, Level.WARNING, "importing torch takes long", facts.failure, remedy)]
    if facts.failure:
        remedy = "run `python -c 'import torch'` on this host, and install torch again if it fails"
        return [Finding(NAME, Level.ERROR, "torch cannot be imported", facts.failure, remedy)]
    found: list[Finding] = []
    if not facts.gloo:
        because = "torchelastic agrees on steps over gloo, also beside NCCL"
        found.append(Finding(NAME, Level.ERROR, "torch has no gloo", because, "install an official build of torch"))
    if facts.devices:
        return [*found, *_judge_gpus(facts, workers)]
    if facts.nodes:
        return [*found, _why_none_is_usable(facts)]
    because = f"on a host with GPUs: NCCL {facts.nccl_version}" if facts.nccl_version else ""
    because += ', where the backend "nccl" is NCCL2' if facts.is_nccl2 else ""
    return [*found, Finding(NAME, Level.NOTE, f"no GPU: torch {facts.torch} trains on the CPU, over gloo", because)]


def _why_none_is_usable(facts: AcceleratorFacts) -> Finding:
    what = f"this host has {len(facts.nodes)} NVIDIA GPU(s) and torch {facts.torch} can use none"
    if facts.cuda_build is None:
        remedy = "install a build of torch with CUDA, see https://pytorch.org/get-started/locally/"
        return Finding(NAME, Level.ERROR, what, "it was built for CPUs alone", remedy)
    if facts.visible is not None and not any(char.isalnum() for char in facts.visible.replace("-1", "")):
        because = f"CUDA_VISIBLE_DEVICES is {facts.visible!r}, which hides all"
        return Finding(NAME, Level.ERROR, what, because, "unset CUDA_VISIBLE_DEVICES, or name GPUs in it")
    named = (facts.visible or "").replace(" ", "").split(",")
    if len(set(named)) < len(named):
        because = f"CUDA_VISIBLE_DEVICES is {facts.visible!r}, and CUDA takes none where one is named twice"
        return Finding(NAME, Level.ERROR, what, because, "name each GPU once")
    remedy = (
        "see what `nvidia-smi` says; update the driver, install a torch for an older CUDA, or give the container the "
        "GPUs (`docker run --gpus all`)"
    )
    return Finding(NAME, Level.ERROR, what, f"it was built for CUDA {facts.cuda_build}, and the driver refuses", remedy)


def _judge_gpus(facts: AcceleratorFacts, workers: int | None) -> list[Finding]:
    found = []
    if not facts.nccl:
        because, remedy = "GPUs of several workers need it", "install an official build of torch with CUDA"
        found.append(Finding(NAME, Level.ERROR, f"torch {facts.torch} has no NCCL", because, remedy))
    for name, capability in sorted(set(facts.devices)):
        if facts.compiled_for and not is_compiled_for(capability, facts.compiled_for):
            because = f"torch {facts.torch} was compiled for {', '.join(facts.compiled_for)}"
            remedy = "install a torch that was compiled for it, see https://pytorch.org/get-started/locally/"
            what = f"torch has no kernels for {name} (sm_{capability.replace('.', '')})"
            found.append(Finding(NAME, Level.ERROR, what, because, remedy))
    found += _judge_sharing(facts, workers)
    if any(finding.level > Level.NOTE for finding in found):
        return found
    kinds = {name: sum(other == name for other, _ in facts.devices) for name, _ in facts.devices}
    gpus = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    return [Finding(NAME, Level.OK, f"{gpus}; torch {facts.torch} for {facts.cuda_build}"), *found]


def _judge_sharing(facts: AcceleratorFacts, workers: int | None) -> list[Finding]:
    """Workers that use one GPU without meaning it: each of them sees what this process sees."""
    here, hidden = len(facts.devices), len(facts.nodes) > len(facts.devices) and facts.visible is not None
    seen = f"CUDA_VISIBLE_DEVICES={facts.visible} shows {here} of this host's {len(facts.nodes)} GPUs"
    if workers is None or workers <= here:
        return [Finding(NAME, Level.NOTE, seen, "every worker that is started here sees no others")] if hidden else []
    what = f"{workers} workers are to share {here} GPU(s)"
    if facts.may_share:
        return [Finding(NAME, Level.NOTE, what, f"NCCL lets them ({SHARING}=1) if a script gives c10d_backend='nccl'")]
    because = "NCCL refuses two ranks on one GPU: CoordinatorP2P() takes gloo for all of them, which is slower"
    remedy = f"--nproc-per-node {here}"
    if hidden:
        because, remedy = f"{seen}; {because}", f"unset CUDA_VISIBLE_DEVICES, or {remedy}"
    return [Finding(NAME, Level.WARNING, what, because, remedy)]


def is_compiled_for(capability: str, compiled_for: Sequence[str]) -> bool:
    """Whether a GPU can run what was compiled: of the same major capability and no newer, or PTX of an older one.

    >>> is_compiled_for("9.0", ["sm_80", "sm_90"]), is_compiled_for("6.1", ["sm_80"])
    (True, False)
    >>> is_compiled_for("12.0", ["compute_90"])
    True
    """
    major, minor = (int(number) for number in capability.split("."))
    for target in compiled_for:
        kind, _, digits = target.partition("_")
        number = "".join(char for char in digits if char.isdigit())
        if len(number) < 2:
            return True  # a target that nobody here knows: no reason to complain
        other = int(number[:-1]), int(number[-1])
        if kind == "compute" and other <= (major, minor):
            return True
        if kind == "sm" and other[0] == major and other[1] <= minor:
            return True
    return False


def gather_accelerators(environment: Mapping[str, str], timeout_s: float = PROBE_TIMEOUT_S) -> AcceleratorFacts:
    """Ask the kernel, and torch in a child of its own."""
    nodes = tuple(sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*")))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    kept = {name: value for name, value in environment.items() if name != PASSWORD_VARIABLE}
    command = [sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(
            command, env=kept, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return AcceleratorFacts(nodes, visible, f"it was not done within {timeout_s:g} s", is_late=True)
    try:
        answer = decode_json("torch", done.stdout.strip().splitlines()[-1], most_bytes=_MOST_ANSWER_BYTES)
        found = converted("torch", answer, AcceleratorFacts)
        sharing = may_share(release_of(found.nccl_version), environment)
        return replace(found, nodes=nodes, visible=visible, may_share=sharing)
    except (RecordError, IndexError):
        last = (done.stderr.strip().splitlines() or [f"the child ended with status {done.returncode}"])[-1]
        return AcceleratorFacts(nodes, visible, last)


def nccl_facts(facts: AcceleratorFacts, environment: Mapping[str, str]) -> NcclFacts:
    """What `judge_nccl` goes by."""
    capabilities = tuple(capability for _, capability in facts.devices)
    rdma = tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*")))
    release, cuda = release_of(facts.nccl_version), facts.cuda_build or ""
    return NcclFacts(release, cuda, facts.is_nccl2, capabilities, rdma, environment)


def check(workers: int | None) -> Sequence[Finding]:
    """Check this host's GPUs, and NCCL where there are any."""
    facts = gather_accelerators(os.environ)
    found = judge_accelerators(facts, workers)
    return [*found, *judge_nccl(nccl_facts(facts, os.environ))] if facts.devices and facts.nccl else found
