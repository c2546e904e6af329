"""The library is silent until asked; then warnings and errors reach stderr."""

from __future__ import annotations

import pytest
from support import python

import kvferry as kf

TRANSFER = """
import kvferry as kf
cfg = kf.LayoutConfig(num_blocks=4, num_layers=1, page_size=1, inner_dim=8, dtype="uint8")
a, b = (kf.PhysicalLayout.fully_contiguous(cfg, kf.system()) for _ in range(2))
with kf.TransferContext() as ctx:
    ctx.transfer(a, b, [1], [2]).wait()
"""


def test_silent_until_asked() -> None:
    done = python(TRANSFER)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_filter_in_the_environment_or_a_call_turns_it_on() -> None:
    asked = "import kvferry as kf\nkf.enable_logging('debug')\nkf.enable_logging('error')\n"
    for done in (python(TRANSFER, KVFERRY_LOG="debug"), python(asked + TRANSFER)):
        assert done.returncode == 0
        assert "transfer" in done.stderr
        assert "blocks=1" in done.stderr
    done = python(TRANSFER, KVFERRY_LOG="warn")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_filter_that_is_none_is_refused() -> None:
    with pytest.raises(kf.OptionError, match="level"):
        kf.enable_logging("kvferry=loud")
