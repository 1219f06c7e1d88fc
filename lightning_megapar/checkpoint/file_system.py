"""The only door through which checkpoints change the disk.

Every operation that alters a file or directory is one method of :class:`FileSystem`, and each calls
:meth:`FileSystem.before` first: a test that overrides it counts, fails or kills at any operation. Reads are not
here; nothing that only reads can damage a checkpoint.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import stat
import zlib
from pathlib import Path
from typing import Any

import torch

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


class FileSystem:
    """Local or shared POSIX file systems. Errors are ``OSError`` with errno and file name."""

    buffer_bytes = 1 << 20
    """Small writes are gathered up to this size."""

    def before(self, operation: str, path: Path) -> None:
        """Called before each operation, with its name and the path that it changes. Does nothing."""

    def make_directory(self, path: Path) -> None:
        """Create one directory; its parent must exist, it must not."""
        self.before("make_directory", path)
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """Create a new file for writing and return its descriptor. Refuses an existing file or link."""
        self.before("create", path)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: bytes | bytearray | memoryview, path: Path) -> None:
        """Write all of ``data`` at the descriptor's position."""
        self.before("write", path)
        view = memoryview(data).cast("B")
        while view:
            try:
                view = view[os.write(descriptor, view) :]
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from None

    def sync(self, descriptor: int, path: Path) -> None:
        """Bring a file's contents to stable storage."""
        self.before("sync", path)
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None

    def close(self, descriptor: int, path: Path) -> None:
        self.before("close", path)
        os.close(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Bring a directory's entries to stable storage."""
        self.before("sync_directory", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems without directory sync
                raise OSError(error.errno, error.strerror, str(path)) from None
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename to a name that is free."""
        self.before("rename", target)
        os.rename(source, target)

    def exchange(self, first: Path, second: Path) -> None:
        """Swap two existing names in one step.

        Raises:
            OSError: ``ENOTSUP`` where the system or file system cannot; nothing has changed then.
        """
        self.before("exchange", second)
        _renameat2_exchange(first, second)

    def unlink(self, path: Path) -> None:
        """Remove a file or a link (never what it points to)."""
        self.before("unlink", path)
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        self.before("remove_directory", path)
        os.rmdir(path)

    def remove_tree(self, path: Path) -> None:
        """Remove a file, a link or a directory with all its contents; links inside are removed, not followed."""
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            self.unlink(path)
            return
        for entry in sorted(os.listdir(path)):
            self.remove_tree(path / entry)
        self.remove_directory(path)

    def free_bytes(self, path: Path) -> int:
        """Bytes that an unprivileged process may still write to the file system of an existing path."""
        return shutil.disk_usage(path).free

    def lock(self, path: Path) -> int | None:
        """Lock a directory for as long as the descriptor stays open; ``None`` when another process holds it.

        Raises:
            OSError: where the file system has no such locks (some network file systems).
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        return descriptor


def _renameat2_exchange(first: Path, second: Path) -> None:
    unsupported = OSError(errno.ENOTSUP, "atomic exchange of two names is not supported", str(second))
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # not Linux, or a C library older than 2018
        raise unsupported from None
    code = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if code == 0:
        return
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        raise unsupported
    raise OSError(number, os.strerror(number), str(second))


class CheckedFile:
    """A new file written from front to back: buffered, counted, with a crc32 per section and of the whole.

    Args:
        file_system: where it is written.
        path: must not exist.
    """

    def __init__(self, file_system: FileSystem, path: Path) -> None:
        self.file_system, self.path, self.buffer_bytes = file_system, path, file_system.buffer_bytes
        self.position = 0
        self.crc = 0
        self.section_crc = 0
        self.error: OSError | None = None
        self._pending = bytearray()
        self._descriptor = file_system.create(path)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        self.crc = zlib.crc32(view, self.crc)
        self.section_crc = zlib.crc32(view, self.section_crc)
        self.position += len(view)
        if len(view) >= self.buffer_bytes:
            self.flush()
            self._put(view)
        else:
            self._pending += view
            if len(self._pending) >= self.buffer_bytes:
                self.flush()
        return len(view)

    def save(self, value: Any) -> None:
        """``torch.save(value, self)``. It reports a full disk as "unexpected pos"; the disk's own error is raised."""
        try:
            torch.save(value, self)  # type: ignore[arg-type]
        except Exception:
            if self.error is not None:
                raise self.error from None
            raise

    def flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            self._put(pending)

    def _put(self, data: bytearray | memoryview) -> None:
        try:
            self.file_system.write(self._descriptor, data, self.path)
        except OSError as error:
            self.error = self.error or error
            raise

    def finish(self) -> None:
        """Flush, sync and close. On an error the descriptor is closed as well."""
        try:
            self.flush()
            self.file_system.sync(self._descriptor, self.path)
        except BaseException:
            self.abandon()
            raise
        descriptor, self._descriptor = self._descriptor, -1
        self.file_system.close(descriptor, self.path)

    def abandon(self) -> None:
        """Close without flushing; for use after an error."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def write_file(file_system: FileSystem, path: Path, data: bytes) -> int:
    """Write, sync and close a new file; return its crc32."""
    file = CheckedFile(file_system, path)
    try:
        file.write(data)
        file.finish()
    except BaseException:
        file.abandon()
        raise
    return file.crc
