"""Documents of any length as sequences of one length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torchelastic.data.sources.api import Source, SourceError, fields, made, of_epoch, opened, place_of

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True)
class packed(Generic[T]):
    """Sequences of `length` tokens, cut from the documents of a shard written one after the other.

    A source of int64 tensors of shape (length,), which torch's `default_collate` stacks. What is left of a document
    when a sequence is full begins the next one; no token is in two sequences. For inputs and targets that are shifted
    by one, take `length` + 1.

    Position: the source's at the document in which the newest sequence ends, and the token there, so that opening a
    shard reads and tokenizes one document again.

    Args:
        source: of documents.
        length: tokens of a sequence.
        tokenize: makes the tokens of a document, each time the same ones; without it a document is a sequence of
            tokens: a list, an array or a tensor.
        end_of_document: a token that follows each document; None for none.
        pad: fills the last sequence of a shard; None leaves out the tokens that do not fill one.

    Raises:
        ValueError: `length` is below 1.
    """

    source: Source[T]
    length: int
    tokenize: Callable[[T], Sequence[int]] | None = None
    end_of_document: int | None = None
    pad: int | None = None

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length is {self.length}: give at least 1")

    def for_epoch(self, epoch: int) -> packed[T]:
        """The source for an epoch."""
        return replace(self, source=of_epoch(self.source, epoch))

    def __call__(self, shard: int, num_shards: int, position: Any, /) -> Iterator[torch.Tensor]:
        """Opens a shard; see `Source`."""
        return _Packed(self, shard, num_shards, position)


class _Packed(Iterator["torch.Tensor"]):
    def __init__(self, how: packed[T], shard: int, num_shards: int, position: Any) -> None:
        import torch

        self._how: packed[Any] = how
        self._tensor = torch.tensor
        begin, self._used = (0, 0) if position == 0 else fields(position, "source", "token")
        self._inner = opened(self._how.source, shard, num_shards, begin)
        self._begin = begin  # of the newest document
        self._tokens = self._next_tokens() or [] if self._used else []  # of the newest document
        if self._used > len(self._tokens):
            raise SourceError(
                f"the position is at token {self._used} of a document that has {len(self._tokens)} tokens now: "
                "tokenize as before, or start the epoch anew"
            )

    def __next__(self) -> torch.Tensor:
        length = self._how.length
        begin, tokens = self._begin, self._tokens
        sequence = tokens[self._used : self._used + length]
        used = self._used + len(sequence)
        while len(sequence) < length:
            begin = place_of(self._inner)
            more = self._next_tokens()
            if more is None:
                if not sequence or self._how.pad is None:
                    raise StopIteration
                sequence += [self._how.pad] * (length - len(sequence))
                tokens, used = [], 0
            else:
                tokens, used = more, min(length - len(sequence), len(more))
                sequence += tokens[:used]
        self._begin, self._tokens, self._used = begin, tokens, used
        return self._tensor(sequence)

    def _next_tokens(self) -> list[int] | None:
        how = self._how
        for document in self._inner:
            tokens: Any = document if how.tokenize is None else made(how.tokenize, document)
            tokens = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)  # tensors and arrays
            return tokens if how.end_of_document is None else [*tokens, how.end_of_document]
        return None

    def state_dict(self) -> Any:
        return {"source": self._begin, "token": self._used}
