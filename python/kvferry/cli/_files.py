"""Guarded reading of what the kernel says in files: a file that is missing or odd is None, never an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def text(path: Path) -> str | None:
    """The file's text without outer white space."""
    try:
        return path.read_text(errors="replace").strip()
    except (OSError, ValueError):
        return None


def lines(path: Path) -> list[str]:
    """The file's lines; none where it cannot be read."""
    return (text(path) or "").splitlines()


def entries(folder: Path, pattern: str) -> list[Path]:
    """Paths in a folder, in the order of the numbers in their names; none where it cannot be read."""
    try:
        found = list(folder.glob(pattern))
    except OSError:
        return []
    return sorted(found, key=lambda path: (int("".join(filter(_is_digit, path.name)) or 0), path.name))


def exists(path: Path) -> bool:
    """Whether the path is there and may be looked at."""
    try:
        return path.exists()
    except OSError:
        return False


def number(string: str | None) -> int | None:
    """A plain decimal number, not negative."""
    string = (string or "").strip()
    return int(string) if string and all(map(_is_digit, string)) else None


def size(string: str | None) -> int | None:
    """Bytes from "2048K", "24684092 kB" or a plain number."""
    string = (string or "").strip().removesuffix("B").strip().upper()
    factor = _SUFFIXES.get(string[-1:], 1)
    plain = number(string[:-1] if factor > 1 else string)
    return None if plain is None else plain * factor


def members(string: str | None) -> list[int] | None:
    """The numbers of a kernel list such as "0-3,8,10-11"; None if it is not one."""
    if string is None:
        return None
    found: list[int] = []
    for part in filter(None, string.strip().split(",")):
        first, _, last = part.partition("-")
        low, high = number(first), number(last or first)
        if low is None or high is None or not low <= high < 1 << 20:
            return None
        found.extend(range(low, high + 1))
    return found


def field(source: list[str], name: str) -> str | None:
    """What follows "name:" in lines such as those of /proc/meminfo; the first such line counts."""
    for line in source:
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return None


def chosen(string: str | None) -> str | None:
    """The word in brackets of "always [madvise] never"."""
    _, bracket, rest = (string or "").partition("[")
    word, closing, _ = rest.partition("]")
    return word if bracket and closing else None


def _is_digit(character: str) -> bool:
    return "0" <= character <= "9"
