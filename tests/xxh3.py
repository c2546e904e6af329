"""XXH3, 64 bits, seed 0, written from its specification: what `layout.checksum` hashes head rows with."""

from __future__ import annotations

_M = (1 << 64) - 1
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2, _P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P64_4, _P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_PMX1, _PMX2 = 0x165667919E3779F9, 0x9FB21C651E98DF25
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def xxh3_64(data: bytes) -> int:
    """Hash any number of bytes."""
    size = len(data)
    if size <= 16:
        return _short(data, size)
    if size <= 128:
        acc = size * _P64_1
        for i in reversed(range((size - 1) // 32 + 1)):
            acc += _mix16(data, 16 * i, 32 * i) + _mix16(data, size - 16 * (i + 1), 32 * i + 16)
        return _avalanche(acc & _M)
    if size <= 240:
        acc = size * _P64_1 + sum(_mix16(data, 16 * i, 16 * i) for i in range(8))
        acc = _avalanche(acc & _M)
        acc += sum(_mix16(data, 16 * i, 16 * (i - 8) + 3) for i in range(8, size // 16))
        return _avalanche((acc + _mix16(data, size - 16, 136 - 17)) & _M)
    return _long(data, size)


def _short(data: bytes, size: int) -> int:
    if size > 8:
        low = _u64(data, 0) ^ (_u64(_SECRET, 24) ^ _u64(_SECRET, 32))
        high = _u64(data, size - 8) ^ (_u64(_SECRET, 40) ^ _u64(_SECRET, 48))
        swapped = int.from_bytes(low.to_bytes(8, "little"), "big")
        return _avalanche((size + swapped + high + _fold(low, high)) & _M)
    if size >= 4:
        value = _u32(data, size - 4) + (_u32(data, 0) << 32)
        value ^= _u64(_SECRET, 8) ^ _u64(_SECRET, 16)
        value ^= _rotate(value, 49) ^ _rotate(value, 24)
        value = value * _PMX2 & _M
        value ^= (value >> 35) + size
        value = value * _PMX2 & _M
        return value ^ (value >> 28)
    if size:
        value = data[size - 1] | size << 8 | data[0] << 16 | data[size >> 1] << 24
        return _avalanche64(value ^ (_u32(_SECRET, 0) ^ _u32(_SECRET, 4)))
    return _avalanche64(_u64(_SECRET, 56) ^ _u64(_SECRET, 64))


def _long(data: bytes, size: int) -> int:
    acc = [_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1]
    per_block = (len(_SECRET) - 64) // 8
    for stripe in range((size - 1) // 64):
        _accumulate(acc, data, 64 * stripe, 8 * (stripe % per_block))
        if stripe % per_block == per_block - 1:
            for i in range(8):
                value = acc[i] ^ (acc[i] >> 47) ^ _u64(_SECRET, len(_SECRET) - 64 + 8 * i)
                acc[i] = value * _P32_1 & _M
    _accumulate(acc, data, size - 64, len(_SECRET) - 64 - 7)
    value = size * _P64_1
    for i in range(4):
        left, right = (acc[2 * i + j] ^ _u64(_SECRET, 11 + 16 * i + 8 * j) for j in range(2))
        value += _fold(left, right)
    return _avalanche(value & _M)


def _accumulate(acc: list[int], data: bytes, at: int, secret: int) -> None:
    for i in range(8):
        value = _u64(data, at + 8 * i)
        key = value ^ _u64(_SECRET, secret + 8 * i)
        acc[i ^ 1] = (acc[i ^ 1] + value) & _M
        acc[i] = (acc[i] + (key & 0xFFFFFFFF) * (key >> 32)) & _M


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _u64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _rotate(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _M


def _fold(left: int, right: int) -> int:
    product = left * right
    return (product & _M) ^ (product >> 64)


def _mix16(data: bytes, at: int, secret: int) -> int:
    return _fold(_u64(data, at) ^ _u64(_SECRET, secret), _u64(data, at + 8) ^ _u64(_SECRET, secret + 8))


def _avalanche(value: int) -> int:
    value = (value ^ (value >> 37)) * _PMX1 & _M
    return value ^ (value >> 32)


def _avalanche64(value: int) -> int:
    value = (value ^ (value >> 33)) * _P64_2 & _M
    value = (value ^ (value >> 29)) * _P64_3 & _M
    return value ^ (value >> 32)
