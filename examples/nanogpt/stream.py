"""Text files as a stream, for `--stream='texts/*.txt'`: each character once in an epoch, at any number of workers."""

from __future__ import annotations

from dataclasses import dataclass

from examples.nanogpt.data import Vocabulary
from examples.nanogpt.options import Options
from torchelastic.data import ElasticStream, lines, packed, shuffled

#: Sequences that are shuffled together; so many of each logical shard are in memory.
SHUFFLED = 256


@dataclass(frozen=True)
class Tokens:
    """Makes tokens of lines; raises ValueError if a character is not in the vocabulary."""

    vocabulary: Vocabulary

    def __call__(self, line: str) -> list[int]:
        """The tokens of a line without its end, and of the end."""
        return [int(token) for token in self.vocabulary.encode(line + "\n")]


def text_stream(options: Options, vocabulary: Vocabulary) -> ElasticStream:
    """Batches of the files' characters, without an end: int64 tensors of shape (sequences, block_size + 1).

    Args:
        options: the command line, with `stream`.
        vocabulary: of the prepared data set, which must have all characters of the files.
    """
    sequences = packed(lines(options.stream), options.block_size + 1, Tokens(vocabulary))
    return ElasticStream(
        shuffled(sequences, SHUFFLED, seed=options.seed),
        logical_shards=options.stream_shards,
        global_batch_size=options.sequences,
        epochs=None,
    )
