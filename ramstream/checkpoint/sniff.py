"""What a file that is no weight file of ours looks like, and what to do about it."""

from __future__ import annotations

HEAD = 512
"""Bytes of a file that `looks_like` wants to see."""

_AGAIN = "download it again"
_CONVERT = "convert it to safetensors first"
_OLD = (
    "perhaps PyTorch weights in the old format; load and save it with torch 1.6 or newer, "
    "or convert it to safetensors"
)

_MAGIC = (
    (
        (b"version https://git-lfs",),
        "is a Git LFS pointer, not the weights; run `git lfs pull` in its repository",
    ),
    (
        (b"GGUF", b"GGML"),
        "is GGUF, whose quantised blocks cannot be averaged; use the safetensors it was made from",
    ),
    ((b"PK\x03\x04",), "is a zip archive; if torch saved it, name it .bin, or convert it to safetensors"),
    (
        (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
        f"is a pickle, {_OLD}",
    ),
    ((b"\x89HDF",), f"is HDF5, perhaps Keras weights; {_CONVERT}"),
    ((b"\x1f\x8b", b"\x28\xb5\x2f\xfd"), "is compressed; unpack it first"),
)
_PAGES = (b"<!doctype", b"<html", b"<head", b"<?xml", b"<error")


def looks_like(head: bytes) -> str | None:
    """`is …; do …` for a file whose first bytes are `head`, None when they tell nothing."""
    if not head:
        return f"is empty; {_AGAIN}"
    for magics, text in _MAGIC:
        if head.startswith(magics):
            return text
    if head[257:262] == b"ustar":
        return f"is a tar archive, {_OLD}"
    if not head.strip(b"\0"):
        return f"begins with zeros, as an unfinished download does; {_AGAIN}"
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith(_PAGES):
        return f"is a web page or a server's error reply, not the weights; {_AGAIN}"
    if start.startswith(b"{"):
        return "is a JSON text, not weights; give the folder instead of its index, or download it again"
    return None
