"""Owns the tests of where the secret comes from and of the files that are not private enough."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gfkernels.bootstrap.secret import find_secret, host_secret, read_private
from gfkernels.config import Config
from gfkernels.errors import ConfigError


def test_order(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from the file\n")
    file.chmod(0o400)
    assert find_secret(Config(secret="from config", secret_file=str(file)), False, None) == b"from config"
    assert find_secret(Config(secret_file=str(file)), False, None) == b"from the file"
    with pytest.raises(ConfigError, match="GFKERNELS_SECRET_FILE"):
        find_secret(Config(), False, None)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o700, 0o604, 0o200])
def test_modes(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_text("long enough")
    file.chmod(mode)
    with pytest.raises(ConfigError, match=r"chmod 600|cannot be read"):
        read_private(file, follow=True)


def test_missing_short_and_odd_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_private(tmp_path / "nothing", follow=True)
    with pytest.raises(ConfigError):
        read_private(tmp_path, follow=True)
    file = tmp_path / "secret"
    file.write_text("short")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="at least 8"):
        read_private(file, follow=True)


def test_host_secret_is_made_once(tmp_path: Path) -> None:
    first = host_secret(str(tmp_path))
    assert len(first) == 64 and host_secret(str(tmp_path)) == first
    assert (tmp_path / "gfkernels").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "gfkernels" / "secret").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "gfkernels") == ["secret"]


def test_host_secret_refuses_an_open_folder_and_links(tmp_path: Path) -> None:
    folder = tmp_path / "gfkernels"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="0755"):
        host_secret(str(tmp_path))
    folder.chmod(0o700)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("long enough")
    elsewhere.chmod(0o600)
    (folder / "secret").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="cannot be read"):
        host_secret(str(tmp_path))
    (folder / "secret").unlink()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="must be a folder"):
        host_secret(str(tmp_path))
