"""Contract: a byte that has changed, or a file that was cut, is what was saved or is told; never another value.

Where one checkpoint is all there is, who asks for it gets it, an error that names it, or nothing with a warning that
names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.contracts.facades import KINDS, VARIANTS, Facade, outcome
from tests.contracts.faults import in_child

#: The others do not keep this yet: `load_latest` on tiers, the local and the memory managers find nothing, and say
#: nothing, where the only manifest is damaged or the only shard was cut.
FACADES: Mapping[str, Facade] = {
    "streams": KINDS["streams"],
    "training": KINDS["training"],
    **{name: facade for name, (kind, facade) in VARIANTS.items() if kind == "training"},
}
SAVED = 7
#: So many bytes of each file are changed, one at a time; of every layer of the format some.
POSITIONS = 40


def damaged(data: bytes) -> Iterator[tuple[str, bytes]]:
    """The content with one byte changed, or cut."""
    for position in sorted({*range(0, len(data), max(1, len(data) // POSITIONS)), len(data) - 1}):
        yield f"byte {position}", data[:position] + bytes([data[position] ^ 0x41]) + data[position + 1 :]
    yield "cut", data[: len(data) // 2]


@pytest.mark.parametrize("name", FACADES)
def test_damage_is_told_or_changes_nothing(name: str, tmp_path: Path) -> None:
    facade, folder = FACADES[name], tmp_path / "saved"
    in_child(lambda: facade.save(folder, SAVED))
    told = 0
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    assert files
    for path in files:
        whole = path.read_bytes()
        for what, data in damaged(whole):
            path.write_bytes(data)
            found = outcome(lambda: facade.resume(folder))
            if found.get("value") != SAVED:
                text = found.get("error") or " ".join(found["warnings"])
                assert path.parent.name in text, (path.name, what, found)
                assert found.get("value", None) is None, "another value"
                assert "error" not in found or "CheckpointError" in found["kinds"], (path.name, what, found)
                told += 1
            path.write_bytes(whole)
    assert told > POSITIONS, "hardly any damage was noticed"
    assert facade.resume(folder) == SAVED, "who only looks has removed nothing"
