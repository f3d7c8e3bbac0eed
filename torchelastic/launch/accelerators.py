"""What torch says of this host's accelerators, in a process of its own.

Here torch would take 200 MB of the launcher's memory as long as the run lasts.
"""

from __future__ import annotations

import subprocess
import sys

from torchelastic.usage import UsageError

_COUNT = """
import sys, torch
kind = sys.argv[1]
if kind == "auto":
    print(torch.accelerator.device_count())
else:
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        print("unknown")
    else:
        print(module.device_count() if module.is_available() else 0)
"""
_ADDRESSES = """
import torch
kind, found = torch.accelerator.current_accelerator(), []
if kind is not None and torch.accelerator.is_available():
    module = torch.get_device_module(kind)
    for index in range(module.device_count()):
        its = module.get_device_properties(index)
        found.append("%04x:%02x:%02x.0" % (its.pci_domain_id, its.pci_bus_id, its.pci_device_id))
print("found", *found)
"""


def count(kind: str) -> int | None:
    """How many there are; None: torch knows no such device.

    Args:
        kind: "gpu" (CUDA or ROCm), "auto" (the one kind that there is), or a device type of torch, such as "xpu".

    Raises:
        UsageError: torch cannot say.
    """
    try:
        answer = _asked(_COUNT, "cuda" if kind == "gpu" else kind)
        return None if answer == "unknown" else int(answer)
    except (subprocess.CalledProcessError, ValueError) as error:
        raise UsageError(f"--nproc-per-node: torch cannot count the GPUs here ({error}); write a number") from error


def pci_addresses() -> list[str]:
    """Of each one that torch sees, in its order, such as "0000:dc:00.0"; raises UsageError: torch cannot say."""
    try:
        return _asked(_ADDRESSES, "").split()[1:]
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or [str(error)])[-1]
        raise UsageError(
            f"--numa-binding: torch does not say where the GPUs are ({why}): install torch 2.9 or later, or leave it "
            "out and bind each worker with --no-python and numactl"
        ) from error


def _asked(program: str, argument: str) -> str:
    """The last line of what it prints."""
    command = [sys.executable, "-c", program, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return (done.stdout.strip().splitlines() or [""])[-1]
