"""Owns the secret that ranks share: given, from a private file, or on one host from a file of this user's own."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from gfkernels.config import Config
from gfkernels.errors import ConfigError

_REMEDY = (
    "set GFKERNELS_SECRET or GFKERNELS_SECRET_FILE to the same secret on all ranks, or pass secret= to init, or "
    "start the ranks with MPI and pass comm= (it then travels by MPI), or with `gfkernels run` on one host"
)


def given_secret(config: Config) -> bytes | None:
    """The secret that the configuration names, None where it names none.

    Raises:
        ConfigError: the file cannot be read, is empty, or others may read it.
    """
    if config.secret is not None:
        return config.secret.encode()
    if config.secret_file is not None:
        return read_private(Path(config.secret_file), follow=True)
    return None


def find_secret(config: Config, single_host: bool, runtime_dir: str | None) -> bytes:
    """The secret of this world.

    Args:
        config: the settings.
        single_host: all ranks run on this host, as this user.
        runtime_dir: `$XDG_RUNTIME_DIR`, if set.

    Raises:
        ConfigError: several hosts and no secret, or a file that is not private.
    """
    secret = given_secret(config)
    if secret is not None:
        return secret
    if not single_host:
        raise ConfigError(f"ranks on several hosts need a shared secret: {_REMEDY}")
    return host_secret(runtime_dir)


def host_secret(runtime_dir: str | None) -> bytes:
    """This user's secret on this host, made by whoever comes first and kept: 0600, in a folder with 0700.

    It is one per user rather than per job, so that no job can delete what the next one has just read.
    """
    if runtime_dir and os.path.isdir(runtime_dir) and os.stat(runtime_dir).st_uid == os.getuid():
        folder = Path(runtime_dir) / "gfkernels"
    else:
        folder = Path(f"/tmp/gfkernels-{os.getuid()}")
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        info = folder.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
            raise ConfigError(
                f"{folder} must be a folder of user {os.getuid()} with mode 0700 (it is owned by {info.st_uid}, mode "
                f"{stat.S_IMODE(info.st_mode):04o}), or another user could let processes in: remove it, or {_REMEDY}"
            )
        path = folder / "secret"
        if not path.exists():
            _create(path)
    except OSError as error:
        raise ConfigError(f"{folder} cannot hold this host's secret ({error.strerror}): {_REMEDY}") from None
    return read_private(path, follow=False)


def _create(path: Path) -> None:
    # The link makes the name appear with its content; of two ranks that race here one wins and both read that file.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secrets.token_hex(32).encode())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.close(descriptor)
        temporary.unlink()


def read_private(path: Path, follow: bool) -> bytes:
    """Reads a secret from a file that nobody else can read.

    Raises:
        ConfigError: it cannot be read, is not private, or is empty.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        raise ConfigError(f"the secret file {path} cannot be read: {error.strerror}") from None
    try:
        info = os.fstat(descriptor)
        mode = stat.S_IMODE(info.st_mode)
        if not stat.S_ISREG(info.st_mode) or mode not in (0o600, 0o400):
            raise ConfigError(f"the secret file {path} has mode {mode:04o}, expected 0600 or 0400: chmod 600 {path}")
        if info.st_uid not in (os.getuid(), 0):
            raise ConfigError(f"the secret file {path} belongs to user {info.st_uid}, not to {os.getuid()} or root")
        secret = os.read(descriptor, 4096).strip()
    finally:
        os.close(descriptor)
    if len(secret) < 8:
        raise ConfigError(f"the secret file {path} holds {len(secret)} bytes, expected at least 8")
    return secret
