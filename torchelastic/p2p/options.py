"""What a coordinator is given, checked; and the settings of the process that a group needs."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from torchelastic.group.backends import GLOO
from torchelastic.network.interface_choice import GLOO_VARIABLE, library_variables
from torchelastic.network.interfaces import interfaces
from torchelastic.network.this_host import chosen_interfaces
from torchelastic.observe.ledger.meter import this_worker
from torchelastic.processes.local_rank import OWN_GPU_VARIABLE
from torchelastic.rendezvous import handler as rendezvous_handler
from torchelastic.rendezvous import wire
from torchelastic.rendezvous.handler import EtcdRendezvousHandler, RendezvousHandler
from torchelastic.rendezvous.solo import SOLO_URL, SoloRendezvousHandler, why_not_alone
from torchelastic.rendezvous.url import parse_url

rendezvous_handler.register()


#: What may be requested, for tensors on a GPU; "nccl2" and "nccl-legacy" are torch 2.15's names of its two engines.
_FOR_GPUS = ("nccl", "nccl2", "nccl-legacy")


def checked_backend(backend: str | None) -> str:
    """The requested backend, or the one that suits this host. Raises ValueError."""
    if backend is None:
        needed = 1 if os.environ.get(OWN_GPU_VARIABLE) == "1" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= needed
        return "nccl" if has_gpus and dist.is_nccl_available() else GLOO
    named = [pair.rpartition(":") for pair in backend.split(",")]
    if not all(_takes(device if colon else "cuda", name) for device, colon, name in named):
        names = ", ".join(each for each in (GLOO, *_FOR_GPUS) if _has(each))
        raise ValueError(
            f"c10d_backend={backend!r}: give one that this torch ({torch.__version__}) has: {names}; or one for each "
            "kind of device, as in 'cpu:gloo,cuda:nccl'"
        )
    if not needs_gpu(backend):
        return GLOO
    if not torch.cuda.is_available():
        raise ValueError(f"c10d_backend={backend!r}: torch finds no GPU here, see `torchelastic doctor`")
    return backend


def needs_gpu(backend: str) -> bool:
    """Whether a backend, or one of several, is for tensors that lie on a GPU.

    >>> needs_gpu("cpu:gloo,cuda:nccl"), needs_gpu("gloo")
    (True, False)
    """
    return any(pair.rpartition(":")[2] != GLOO for pair in backend.split(","))


def _takes(device: str, name: str) -> bool:
    return _has(name) and (name == GLOO or name in _FOR_GPUS) and (device == "cuda" or (device, name) == ("cpu", GLOO))


def _has(name: str) -> bool:
    # before "nccl-legacy" had its name, "nccl2" ended the process when it was aborted (pytorch/pytorch#192105)
    needed = (name, "nccl-legacy") if name == "nccl2" else (name,)
    return all(dist.is_backend_available(each) for each in needed)


def checked_init_method(init_method: str | None) -> str:
    """The rendezvous URL that was given, or the launcher's; `SOLO_URL` where there is neither. Raises ValueError."""
    init_method = init_method or os.environ.get(wire.INIT_METHOD_VARIABLE)
    if init_method:
        return init_method
    why_not = why_not_alone(os.environ)
    if why_not is not None:
        raise ValueError(why_not)
    return SOLO_URL


def open_rendezvous(init_method: str) -> RendezvousHandler:
    """The handler that is registered for the URL's scheme, or the one for a process alone. Raises ValueError."""
    if init_method == SOLO_URL:
        return SoloRendezvousHandler()
    # ours not by torch, which has Python split the URL: since 3.14 that refuses [::1] beside another host
    opened = EtcdRendezvousHandler(init_method) if init_method.startswith("etcd://") else rendezvous(init_method)
    if not isinstance(opened, RendezvousHandler):
        raise ValueError(
            f"the scheme {init_method.partition(':')[0]!r} of init_method leads to a {type(opened).__name__}, which is "
            "no torchelastic RendezvousHandler: write etcd://"
        )
    opened.on_round(lambda _round: this_worker().waits_as_spare() if opened.is_spare else None)
    return opened


def checked_max(max_num_trainers: int | None, init_method: str) -> int:
    """The largest group: as given, or as the URL has it. Raises ValueError."""
    if max_num_trainers is None:
        return parse_url(init_method).max_workers if init_method.startswith("etcd://") else sys.maxsize
    if max_num_trainers < 1:
        raise ValueError(f"max_num_trainers={max_num_trainers} must be at least 1")
    return max_num_trainers


def smallest_group(init_method: str) -> int:
    """How many workers a group needs, as the URL has it; 1 where it does not say."""
    return parse_url(init_method).settings.smallest if init_method.startswith("etcd://") else 1


def choose_interface(address: str) -> None:
    """Have gloo use the network on which the others reach this host, unless the user has chosen one.

    Left alone it looks the host's own name up, which on many machines leads to another network or to none. The launcher
    has set a chosen interface for its workers already; a worker without one looks here. Raises InterfaceError.
    """
    if GLOO_VARIABLE in os.environ or not address:
        return
    choice = chosen_interfaces()
    if choice is not None:
        os.environ.update(library_variables(choice, os.environ))
        return
    name = next((one.name for one in interfaces() if address in one.addresses), None)
    if name is not None:
        os.environ[GLOO_VARIABLE] = name


def choose_gpu() -> None:
    """Have this worker use its own GPU, by its number on this host, unless the script has chosen one.

    Until then the first one is the current one, of every worker, and NCCL takes no GPU for two ranks.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if 0 < local_rank < torch.cuda.device_count() and torch.cuda.current_device() == 0:
        torch.cuda.set_device(local_rank)


def dump_stacks_on_request() -> None:
    """The agent asks a worker that hangs for its stacks before it ends it; see `torchelastic.agent.supervisor`."""
    if threading.current_thread() is threading.main_thread():
        faulthandler.register(signal.SIGRTMIN + 5, file=sys.__stderr__ or sys.stderr, all_threads=True)
