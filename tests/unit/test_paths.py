"""Output files that appear whole: what stays of the file that they replace, and which errors."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from umem.base.paths import check_folder, replacing
from umem.errors import ConfigError


def write(target: Path, text: str) -> None:
    with replacing(target, ConfigError) as part:
        part.write_text(text)


def write_half(part: Path) -> None:
    part.write_text("half of it")
    raise ConfigError("no text is left")


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    real, link = tmp_path / "real" / "page", tmp_path / "link.html"
    real.parent.mkdir()
    link.symlink_to("real/page")
    for text in ("made", "replaced"):  # a link may come before its file
        with replacing(link, ConfigError) as part:
            assert part.suffix == ".html"
            part.write_text(text)
        assert link.is_symlink()
        assert real.read_text() == text
    assert [*real.parent.iterdir()] == [real]


def test_the_mode_of_an_existing_file_stays(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    write(target, "new")
    usual = stat.S_IMODE(target.stat().st_mode)
    (tmp_path / "other").touch()
    assert usual == stat.S_IMODE((tmp_path / "other").stat().st_mode)
    target.chmod(0o604)
    write(target, "newer")
    assert stat.S_IMODE(target.stat().st_mode) == 0o604


def test_a_file_in_a_folder_that_cannot_be_changed_is_overwritten_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")
    # Modes do not bind root, who may run the tests.
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and access(path, mode))
    before = target.stat().st_ino
    with replacing(target, ConfigError) as part:
        part.write_text("new")
        assert target.read_text() == "old"  # the body may read it
        assert part.name == target.name
    assert target.read_text() == "new"
    assert target.stat().st_ino == before
    assert not part.parent.exists()
    with pytest.raises(ConfigError, match="no text"), replacing(target, ConfigError) as part:
        write_half(part)
    assert target.read_text() == "new"


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    os.mkfifo(target)
    reader = os.open(target, os.O_RDONLY | os.O_NONBLOCK)
    write(target, "through the pipe")
    assert os.read(reader, 100) == b"through the pipe"
    os.close(reader)
    assert target.is_fifo()


def test_errors_name_the_file_that_they_are_of(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    with pytest.raises(FileNotFoundError, match="source"), replacing(target, ConfigError):
        (tmp_path / "source").read_text()
    full = f"^{target}: No space left on device; name a file"
    with pytest.raises(ConfigError, match=full), replacing(target, ConfigError):
        raise OSError(errno.ENOSPC, "No space left on device")
    missing = tmp_path / "none" / "page.html"
    with pytest.raises(ConfigError, match=f"^{missing}: No such file or directory; name a file"):
        write(missing, "")
    long = tmp_path / ("n" * 300 + ".html")
    with pytest.raises(ConfigError, match="File name too long; name a file"):
        write(long, "")
    assert [*tmp_path.iterdir()] == []


def test_a_place_that_cannot_be_written_is_known_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    check_folder(page, "--out")
    monkeypatch.setattr(os, "access", lambda path, _mode: path == page)  # root may write anywhere
    with pytest.raises(ConfigError, match=r"--out .*page.html: this process cannot write there"):
        check_folder(page, "--out")
    page.touch()
    check_folder(page, "--out")  # an existing file in such a folder is written in place
