"""What an ElasticStream costs: samples per second beside the bare iterators, and what a change of the group costs.

    python -m benchmarks.stream [--rounds 9] [--batches 300] [--workers 0,2,4] [--ranks 2]

The data are blocks of 512 tokens, compressed, as if read from a file. `bare` iterates them and
makes batches with torch's `default_collate`; with worker processes that is a plain DataLoader over an IterableDataset,
whose workers each make whole batches of their part of the shards, and which knows no position. `stateful` is the
StatefulDataLoader of torchdata over the same, where it can be imported. All read the same number of samples in turn, in
each round; the first is not counted. `ratio` is samples per second over those of `bare`, the median of the rounds.

`move_ms`: from the first `next` after all shards were given another place until it returns, less a `next` as usual;
what it draws again (at most eight batches) is in it, and the seek of this source is nothing. `next_us` is what `next`
costs without any data to speak of, alone and with several ranks, so the difference is that of the message.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import socket
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from benchmarks.environment import print_result, summary
from benchmarks.rendezvous.crowd import Crowd
from torchelastic.data import ElasticStream

SHARDS, BATCH, TOKENS = 8, 64, 512
LIMIT_S = 120.0
TARGETS = {"ratio": 0.95, "move_ms": 50, "bytes_per_shard": 100}
BLOCKS = [zlib.compress(torch.randint(0, 50_000, (TOKENS,), dtype=torch.int32).numpy().tobytes()) for _ in range(64)]


class Tokens(Iterator[torch.Tensor]):
    """An endless shard that knows its place, as one that reads files does."""

    def __init__(self, shard: int, _num_shards: int, position: Any) -> None:
        self._shard, self._block = shard, position["byte"] // TOKENS if position else 0

    def __next__(self) -> torch.Tensor:
        self._block += 1
        block = zlib.decompress(BLOCKS[(self._shard + self._block) % len(BLOCKS)])
        return torch.frombuffer(bytearray(block), dtype=torch.int32)

    def state_dict(self) -> dict[str, Any]:
        return {"file": f"part-{self._shard:05}.bin", "byte": self._block * TOKENS}


class BareShards(IterableDataset[torch.Tensor]):
    """The same shards in turn, of one process or divided among workers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        shards = [Tokens(shard, SHARDS, 0) for shard in range(first, SHARDS, step)]
        for shard in itertools.cycle(shards):
            yield from itertools.islice(shard, BATCH // SHARDS)


def make_stream(workers: int = 0) -> ElasticStream:
    return ElasticStream(Tokens, SHARDS, global_batch_size=BATCH, epochs=None, num_workers=workers)


def committed(stream: ElasticStream) -> Iterator[Any]:
    for batch in stream:
        stream.commit()
        yield batch


def bare_batches() -> Iterator[Any]:
    samples = iter(BareShards())
    while True:
        yield default_collate(list(itertools.islice(samples, BATCH)))


def ways(workers: int) -> dict[str, Iterator[Any]]:
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": workers}
    found = {
        "bare": iter(DataLoader(BareShards(), **options)) if workers else bare_batches(),
        "ours": committed(make_stream(workers)),
    }
    try:
        torchdata: Any = importlib.import_module("torchdata.stateful_dataloader")
    except ImportError:
        return found
    return {**found, "stateful": iter(torchdata.StatefulDataLoader(BareShards(), **options))}


def rates(workers: int, rounds: int, batches: int) -> Mapping[str, Any]:
    """Samples per second of each way, and ours and torchdata's as a ratio to the bare ones of the same round."""
    all_ways = ways(workers)
    found: dict[str, list[float]] = {name: [] for name in all_ways}
    for _ in range(rounds + 1):
        for name, way in all_ways.items():
            began_s = time.perf_counter()
            count = sum(len(batch) for batch in itertools.islice(way, batches))
            found[name].append(count / (time.perf_counter() - began_s))
    bare = found["bare"][1:]
    return {
        "bare_per_s": summary(bare, digits=0),
        **{
            name: {"ratio": round(statistics.median(a / b for a, b in zip(each[1:], bare, strict=True)), 3)}
            for name, each in found.items()
            if name != "bare"
        },
    }


def moves(workers: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of the `next` after which all shards are at another place, less one as usual."""
    stream = make_stream(workers)
    states = []
    for _ in itertools.islice(committed(stream), 15):
        states.append(stream.state_dict())
    found = []
    for number in range(rounds):
        stream.load_state_dict({**states[7 * (number % 2) + 7], "epoch": number})  # another epoch: nothing is kept
        usual_s = [_timed(stream) for _ in range(9)]
        found.append(1000 * (usual_s[0] - statistics.median(usual_s[4:])))
    stream.close()
    return summary(found)


def _timed(stream: ElasticStream) -> float:
    began_s = time.perf_counter()
    next(stream)
    stream.commit()
    return time.perf_counter() - began_s


def numbers(_shard: int, _num_shards: int, position: int) -> Iterator[int]:
    return itertools.count(position)


def serve(pipe: Connection, rank: int, port: int, ranks: int, blocks: int) -> None:
    """Be one of several ranks, and answer with the microseconds of a `next` in each block."""
    pipe.recv()
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    stream = ElasticStream(numbers, SHARDS, global_batch_size=SHARDS, epochs=None)
    stream.set_world(rank, ranks)
    found = []
    for _ in range(blocks + 1):
        found.append(1e6 * sum(_timed(stream) for _ in range(100)) / 100)
    pipe.send({"next_us": found[1:]})
    pipe.recv()


def next_us(ranks: int, blocks: int) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Crowd(serve, [(port, ranks, blocks)] * ranks) as crowd:
        answers = crowd.ask("measure", LIMIT_S)
    return summary(answers[0]["next_us"], digits=1)


def bytes_per_shard(make: Callable[[], ElasticStream]) -> float:
    stream = make()
    for _ in itertools.islice(committed(stream), 100):
        pass
    return round(len(str(stream.state_dict()["shards"])) / SHARDS, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=300, help="of each way in a round")
    parser.add_argument("--workers", default="0,2,4", help="worker processes")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    workers = [int(count) for count in options.workers.split(",")]
    print_result(
        "stream",
        samples_per_s={str(count): rates(count, options.rounds, options.batches) for count in workers},
        move_ms={str(count): moves(count, options.rounds) for count in workers},
        next_us={str(ranks): next_us(ranks, options.rounds) for ranks in (1, options.ranks)},
        bytes_per_shard={
            "numbers": bytes_per_shard(lambda: ElasticStream(numbers, SHARDS, global_batch_size=BATCH, epochs=None)),
            "places": bytes_per_shard(make_stream),
        },
        targets=TARGETS,
    )


if __name__ == "__main__":
    main()
