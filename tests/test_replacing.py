"""A file is the old one or the new one, never a part."""

from pathlib import Path

import pytest

from molflt.replacing import replacing


def write_half(path: Path) -> None:
    with replacing(path) as partial:
        partial.write_text("ne")
        raise OSError("full")


def test_a_file_is_replaced_at_the_end_and_left_alone_by_a_failure(tmp_path):
    """Nothing else stays in the folder."""
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(OSError, match="full"):
        write_half(path)
    assert path.read_text() == "old"
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
        assert partial.name.startswith(".")
        assert partial.suffix == ".partial"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
