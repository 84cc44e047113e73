"""The journal: lines to the byte, and replay up to the first that is torn."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ramstream.errors import IntegrityError
from ramstream.journal import Journal, Line

RECORDS: list[Line] = [
    {"journal": "count", "digest": "ab", "inputs": [[[1, 2, 3]]]},
    {"unit": 0, "inputs": [18446744073709551615, 0], "name": "Größe"},
    {"unit": 1, "changed": []},
]
LINES = [
    b'3be2e6fe2470e441 {"journal":"count","digest":"ab","inputs":[[[1,2,3]]]}\n',
    b'3d862d6c605412f4 {"unit":0,"inputs":[18446744073709551615,0],"name":"Gr\\u00f6\\u00dfe"}\n',
    b'a8c458d116695e67 {"unit":1,"changed":[]}\n',
]
POSITIONS = [0, len(LINES[0]), len(LINES[0] + LINES[1])]
WHOLE = b"".join(LINES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def replay(path: Path) -> list[tuple[int, Line]]:
    journal = Journal(path)
    found = list(journal.replay())
    journal.close()
    return found


def test_the_bytes_of_its_lines(path: Path) -> None:
    journal = Journal(path)
    assert journal.append(RECORDS[:1]) == POSITIONS[:1]
    assert journal.append(RECORDS[1:]) == POSITIONS[1:]
    assert journal.append([]) == []
    journal.close()
    assert path.read_bytes() == WHOLE


def test_replay_gives_what_was_appended_and_where(path: Path) -> None:
    path.write_bytes(WHOLE)
    assert replay(path) == list(zip(POSITIONS, RECORDS, strict=True))
    assert path.read_bytes() == WHOLE


def test_read_finds_a_record_by_its_position(path: Path) -> None:
    path.write_bytes(WHOLE)
    journal = Journal(path)
    assert [journal.read(position) for position in reversed(POSITIONS)] == RECORDS[::-1]
    journal.close()


def test_a_line_that_a_disk_changed_under_us_is_an_error_and_not_there_the_next_time(path: Path) -> None:
    path.write_bytes(WHOLE)
    journal = Journal(path)
    (_, _), (position, _), _ = journal.replay()
    path.write_bytes(WHOLE.replace(b"Gr", b"gr"))
    with pytest.raises(
        IntegrityError, match=rf"^{path}: the line at byte {position} was whole .* and is not now; "
    ):
        journal.read(position)
    journal.close()
    assert replay(path) == [(0, RECORDS[0])]


def test_a_new_journal_is_empty_and_follows_the_umask(path: Path) -> None:
    mask = os.umask(0o027)
    try:
        assert replay(path) == []
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("end", range(len(WHOLE) + 1))
def test_a_file_cut_anywhere_keeps_its_whole_lines(path: Path, end: int) -> None:
    path.write_bytes(WHOLE[:end])
    whole = sum(position + len(line) <= end for position, line in zip(POSITIONS, LINES, strict=True))
    assert replay(path) == list(zip(POSITIONS, RECORDS, strict=True))[:whole]
    assert path.read_bytes() == b"".join(LINES[:whole])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(
    kept=st.integers(0, 3),
    cut=st.floats(0, 1, exclude_max=True),
    noise=st.binary(max_size=60),
    more=st.lists(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9)), max_size=3),
)
def test_a_torn_journal_goes_on_after_its_whole_lines(
    tmp_path: Path, kept: int, cut: float, noise: bytes, more: list[Line]
) -> None:
    path = tmp_path / "journal.jsonl"
    torn = LINES[kept][: int(cut * len(LINES[kept]))] if kept < 3 else b""
    path.write_bytes(b"".join(LINES[:kept]) + torn + noise)
    if kept < 3 and torn + noise[: len(LINES[kept]) - len(torn)] == LINES[kept]:
        return  # the noise completed the line
    journal = Journal(path)
    assert [record for _, record in journal.replay()] == RECORDS[:kept]
    positions = journal.append(more)
    journal.close()
    assert replay(path) == [*zip(POSITIONS, RECORDS[:kept], strict=False), *zip(positions, more, strict=True)]


@pytest.mark.parametrize("place", range(len(LINES[1])))
def test_a_line_with_a_changed_byte_ends_the_replay(path: Path, place: int) -> None:
    data = bytearray(WHOLE)
    data[POSITIONS[1] + place] ^= 1
    path.write_bytes(data)
    assert replay(path) == [(0, RECORDS[0])]
    assert path.read_bytes() == LINES[0]


def test_a_failed_append_is_written_over_by_the_next(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path)
    journal.append(RECORDS[:1])

    def full(descriptor: int, data: memoryview, offset: int) -> None:
        os.pwrite(descriptor, data[:7], offset)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ramstream.journal.write_at", full)
        with pytest.raises(OSError, match="No space"):
            journal.append(RECORDS[1:])
    assert journal.append(RECORDS[2:]) == [len(LINES[0])]
    journal.close()
    assert path.read_bytes() == LINES[0] + LINES[2]


@pytest.mark.parametrize("durable", [True, False])
def test_append_returns_when_the_lines_are_on_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    journal = Journal(path, durable)
    journal.append(RECORDS)
    journal.close()
    assert synced == ([len(WHOLE)] if durable else [])
