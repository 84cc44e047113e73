"""Where the members of a zip archive lie, for archives whose members are stored as they are."""

from __future__ import annotations

import struct
import zipfile
from collections import Counter
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple, cast

from ramstream.checkpoint.safetensors import Room
from ramstream.checkpoint.wording import listed, shown

_LOCAL_HEADER = 30
"""Bytes of a member's own header before its name: see PKWARE's APPNOTE, section 4.3.7."""
_ENCRYPTED, _UTF8 = 0x1, 0x800
_FOLDER = 0x10
"""How DOS marks a folder; torch does not read a member that is one."""
_LARGEST_DIRECTORY = 16 << 20
"""Bytes: some 150,000 members, and 300 MB in memory at most."""
_AGAIN = "download it again"


class Member(NamedTuple):
    """The data of one member: absolute offset in the file, and bytes."""

    offset: int
    size: int


def directory(stream: BinaryIO, room: Room) -> list[zipfile.ZipInfo]:
    """What the directory at the end of a zip file says. ValueError where there is none, or a huge one.

    It is taken out of `room`, also where it turns out to be none.
    """
    try:
        with zipfile.ZipFile(cast(BinaryIO, _Sips(stream, room))) as archive:
            return archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, struct.error) as error:
        raise ValueError(
            f"is no whole zip archive ({shown(str(error))}); it is truncated or damaged, {_AGAIN}"
        ) from error


class _Sips:
    """A stream that is not read in pieces as large as its own content says."""

    def __init__(self, stream: BinaryIO, room: Room) -> None:
        self.seek, self.tell, self.seekable = stream.seek, stream.tell, stream.seekable
        self._stream, self._room = stream, room

    def read(self, size: int = -1) -> bytes:
        """As asked, or the last few bytes. ValueError for more than a directory may have."""
        if size > _LARGEST_DIRECTORY:
            raise ValueError(f"its directory takes {size:,} bytes, the limit is {_LARGEST_DIRECTORY:,}")
        data = self._stream.read(size if size >= 0 else _LARGEST_DIRECTORY)
        self._room.left -= len(data)
        return data


def members(
    stream: BinaryIO, entries: Sequence[zipfile.ZipInfo], size: int
) -> tuple[dict[str, Member], list[str]]:
    """The members of a zip file of `size` bytes by name, and a line for everything that is wrong with them."""
    found, problems = {}, []
    twice = [name for name, times in Counter(entry.filename for entry in entries).items() if times > 1]
    if twice:
        problems.append(f"holds members of the same name: {listed(twice)}; {_AGAIN}")
    for entry in entries:
        try:
            found[entry.filename] = _member(stream, entry, size)
        except ValueError as error:
            problems.append(f"member {shown(entry.filename)} {error}")
    return found, problems or _overlaps(entries, found)


def _member(stream: BinaryIO, entry: zipfile.ZipInfo, size: int) -> Member:
    """Where a member's data lies; ValueError says why it cannot be read in place."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise ValueError("is compressed, torch.save stores members as they are; load and save it with torch")
    if entry.flag_bits & _ENCRYPTED:
        raise ValueError("is encrypted; decrypt it first")
    if entry.external_attr & _FOLDER:
        raise ValueError(f"is marked as a folder; {_AGAIN}")
    if not 0 <= entry.header_offset <= size - _LOCAL_HEADER:
        raise ValueError(f"begins at byte {entry.header_offset:,} of {size:,}; {_AGAIN}")
    stream.seek(entry.header_offset)
    name = entry.orig_filename.encode("utf-8" if entry.flag_bits & _UTF8 else "cp437")
    header = stream.read(_LOCAL_HEADER + len(name))
    length, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    if header[:4] != b"PK\x03\x04" or length != len(name) or header[_LOCAL_HEADER:] != name:
        raise ValueError(f"is not where the directory says; {_AGAIN}")
    offset = entry.header_offset + _LOCAL_HEADER + length + extra
    if offset + entry.file_size > size:
        end = offset + entry.file_size
        raise ValueError(f"ends at byte {end:,}, the file has {size:,}; it is truncated, {_AGAIN}")
    return Member(offset, entry.file_size)


def _overlaps(entries: Sequence[zipfile.ZipInfo], found: dict[str, Member]) -> list[str]:
    """A line for every member that begins before the one before it ends."""
    problems = []
    end, before = 0, ""
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        if entry.header_offset < end:
            problems.append(f"members {shown(before)} and {shown(entry.filename)} overlap; {_AGAIN}")
        end, before = sum(found[entry.filename]), entry.filename
    return problems
