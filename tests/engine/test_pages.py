"""Huge pages: which memory is gathered, and that gathering changes nothing but the pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ddtree_engine import pages


def entry(addresses: str, rights: str = "rw-p", inode: int = 0, name: str = "", rss: int = 40_000, flags: str = "rd wr") -> str:
    head = f"{addresses} {rights} 00000000 00:00 {inode}                          {name}".rstrip()
    return f"{head}\nSize: 1 kB\nRss: {rss} kB\nAnonHugePages: 2048 kB\nVmFlags: {flags}\n"


BIG = "7f0000000000-7f0004000000"  # 64 MB


def starts(*entries: str) -> list[int]:
    return [region.start for region in pages.regions("".join(entries))]


def test_heap_and_anonymous_memory_are_gathered() -> None:
    assert starts(entry("550000000000-550004000000", name="[heap]"), entry(BIG)) == [0x550000000000, 0x7F0000000000]


@pytest.mark.parametrize(
    "other",
    [
        entry(BIG, inode=77, name="/usr/lib/libtorch_cpu.so"),
        entry(BIG, rights="r-xp"),
        entry(BIG, name="[stack]"),
        entry(BIG, flags="rd wr nh"),
        entry(BIG, rss=100),
        entry("7f0000000000-7f0000100000", rss=1000),
    ],
    ids=["file", "code", "stack", "asked for small pages", "hardly used", "smaller than a page"],
)
def test_other_memory_is_left_alone(other: str) -> None:
    kept = entry("7e0000000000-7e0004000000")
    assert starts(other, kept) == starts(kept, other) == [0x7E0000000000]


def test_the_numbers_of_a_region_are_the_kernels() -> None:
    (region,) = pages.regions(entry(BIG, rss=50_000))
    assert (region.kb, region.resident_kb, region.huge_kb) == (65_536, 50_000, 2048)


def test_gathering_keeps_what_memory_holds() -> None:
    numbers = torch.arange(6_000_000)
    kb = pages.gather()
    assert torch.equal(numbers, torch.arange(6_000_000))
    assert 0 <= kb < 2**30


def test_never_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = tmp_path / "enabled"
    enabled.write_text("always madvise [never]\n")
    monkeypatch.setattr(pages, "_ENABLED", enabled)
    monkeypatch.setattr(pages, "_SMAPS", tmp_path / "not to be read")
    assert pages.gather() == 0


def test_without_linux_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_ENABLED", tmp_path / "missing")
    assert pages.gather() == 0
