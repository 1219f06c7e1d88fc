"""The commit protocol: a checkpoint appears whole under its final name, or not at all.

A save writes into a sibling temporary directory on the same file system and becomes visible by one rename. An
existing checkpoint is exchanged against the new one in one step and removed afterwards, never written over.

Names beside a checkpoint ``last.ckpt`` (``<uid>`` is 32 hexadecimal digits):

* ``.last.ckpt.tmp-<uid>``: a save under way, or one that was interrupted; its directory is locked while in use;
* ``.last.ckpt.old-<uid>``: the previous checkpoint, for the instant of a replacement where the file system cannot
  exchange names; it is read in the checkpoint's stead when that one is missing;
* ``.last.ckpt.trash-<uid>``: on its way out.

:func:`clean_directory` removes what an interrupted process left and repairs a missing checkpoint from its ``.old-``.
"""

from __future__ import annotations

import errno
import os
import re
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_megapar.checkpoint.errors import CheckpointError, describe, human_bytes
from lightning_megapar.checkpoint.file_system import FileSystem
from lightning_megapar.checkpoint.manifest import MANIFEST, METADATA

LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old|trash)-(?P<uid>[0-9a-f]{32})")
STALE_SECONDS = 24 * 3600.0
"""Where directories cannot be locked, a leftover is taken for abandoned after this time."""

CHECKPOINT_MARKS = (MANIFEST, METADATA, "meta.pt")
"""A directory that holds one of these is a checkpoint (ours, plain DCP, Lightning's) and may be replaced."""


def new_uid() -> str:
    return uuid.uuid4().hex


def sibling(path: Path, kind: str, uid: str) -> Path:
    """The name beside ``path`` for a ``"tmp"``, ``"old"`` or ``"trash"`` of it."""
    return path.parent / f".{path.name}.{kind}-{uid}"


class PendingCheckpoint:
    """One save on rank 0, from the temporary directory to its publication.

    Args:
        final: the checkpoint's absolute path.
        uid: of this save; another one is taken should its directory be lost to a janitor.
        file_system: the door to the disk.
    """

    def __init__(self, final: Path, uid: str, file_system: FileSystem) -> None:
        self.final, self.uid, self.fs = final, uid, file_system
        self.directory = sibling(final, "tmp", uid)
        self.replaced: Path | None = None
        self.published = False
        self._lock: int | None = None

    def open(self, bytes_needed: int) -> None:
        """Check the target and the room on the disk, then create and lock the temporary directory.

        Args:
            bytes_needed: what all ranks together will write.

        Raises:
            CheckpointError: the target is a directory that is no checkpoint, or the disk is too full.
            OSError: from the file system.
        """
        self._check_target()
        self._make_parents(self.final.parent)
        clean_directory(self.final.parent, self.fs)
        free = self.fs.free_bytes(self.final.parent)
        if bytes_needed > free:
            raise CheckpointError(
                f"not enough room in {self.final.parent}: the checkpoint needs {human_bytes(bytes_needed)} "
                f"({bytes_needed} bytes), {human_bytes(free)} ({free} bytes) are free"
            )
        while not self._claim():
            # A janitor took the directory for abandoned before it was locked.
            self.uid = new_uid()
            self.directory = sibling(self.final, "tmp", self.uid)

    def _claim(self) -> bool:
        self.fs.make_directory(self.directory)
        try:
            self._lock = self.fs.lock(self.directory)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # no locks on this file system: age decides what is abandoned
        if self._lock is None:
            return False
        if not self.directory.exists():
            self._unlock()
            return False
        return True

    def _check_target(self) -> None:
        if self.final.is_symlink() or not self.final.is_dir():
            return
        entries = os.listdir(self.final)
        if entries and not any(mark in entries for mark in CHECKPOINT_MARKS):
            shown = ", ".join(sorted(entries)[:3])
            raise CheckpointError(f"{self.final} is a directory but not a checkpoint (it holds {shown}); not replaced")

    def _make_parents(self, directory: Path) -> None:
        if directory.is_dir():
            return
        self._make_parents(directory.parent)
        try:
            self.fs.make_directory(directory)
        except FileExistsError:
            if not directory.is_dir():
                raise
        self.fs.sync_directory(directory.parent)

    def publish(self) -> None:
        """Make the temporary directory the checkpoint. On an error the previous checkpoint is back in its place.

        Raises:
            OSError: from the file system.
        """
        self.fs.sync_directory(self.directory)
        if self._take_free_name():
            undo = lambda: self.fs.rename(self.final, self.directory)  # noqa: E731
        else:
            try:
                self.fs.exchange(self.directory, self.final)
            except OSError as error:
                if error.errno != errno.ENOTSUP:
                    raise
                self._replace_in_two_steps()
                return
            undo = lambda: self.fs.exchange(self.directory, self.final)  # noqa: E731
            self.replaced = self.directory
        try:
            self.fs.sync_directory(self.final.parent)
        except OSError:
            undo()
            self.replaced = None
            raise
        self.published = True

    def _take_free_name(self) -> bool:
        if os.path.lexists(self.final):
            return False
        try:
            self.fs.rename(self.directory, self.final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            return False  # another process has published here in the meantime
        return True

    def _replace_in_two_steps(self) -> None:
        old = sibling(self.final, "old", self.uid)
        self.fs.rename(self.final, old)
        try:
            self.fs.rename(self.directory, self.final)
        except OSError:
            self.fs.rename(old, self.final)
            raise
        try:
            self.fs.sync_directory(self.final.parent)
        except OSError:
            self.fs.rename(self.final, self.directory)
            self.fs.rename(old, self.final)
            raise
        self.replaced, self.published = old, True

    def finish(self) -> None:
        """After publication: release the lock and remove what was replaced. Failures only warn."""
        self._unlock()
        if self.replaced is not None:
            _discard(self.replaced, sibling(self.final, "trash", self.uid), self.fs)

    def discard(self) -> None:
        """After a failure: remove the temporary directory. Failures only warn. Does nothing once published."""
        try:
            if not self.published and os.path.lexists(self.directory):
                _discard(self.directory, sibling(self.final, "trash", self.uid), self.fs)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _discard(path: Path, trash: Path, fs: FileSystem) -> None:
    """Move away, then delete: a name that looks like a checkpoint never stands on a half-deleted one."""
    try:
        if path != trash:
            fs.rename(path, trash)
        fs.remove_tree(trash)
    except FileNotFoundError:
        pass  # another process was faster
    except OSError as error:
        warnings.warn(f"could not remove {trash}: {describe(error)[0]}", stacklevel=2)


def remove_sharded(path: str | os.PathLike[str], *, file_system: FileSystem | None = None) -> None:
    """Delete a checkpoint: a sharded directory, a single file, or a link (not what it points to).

    The name disappears in one step; a process killed while deleting leaves only a ``.trash-`` directory, which the
    next save removes. A missing path is not an error.

    Args:
        path: the checkpoint. A directory that is not one is refused.

    Raises:
        CheckpointError: on such a directory.
        OSError: when the name cannot be moved away.
    """
    fs = file_system or FileSystem()
    target = Path(os.path.abspath(path))
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        fs.unlink(target)
        return
    entries = os.listdir(target)
    if entries and not any(mark in entries for mark in CHECKPOINT_MARKS):
        raise CheckpointError(f"{target} is a directory but not a checkpoint; not removed")
    trash = sibling(target, "trash", new_uid())
    fs.rename(target, trash)
    fs.sync_directory(target.parent)
    _discard(trash, trash, fs)


def clean_directory(directory: str | os.PathLike[str], file_system: FileSystem | None = None) -> list[Path]:
    """The janitor: remove leftovers of interrupted saves in ``directory`` and repair checkpoints from ``.old-``.

    A leftover whose directory a living process has locked is left alone. Where directories cannot be locked, only
    leftovers older than :data:`STALE_SECONDS` are touched. Failures only warn.

    Args:
        directory: that holds checkpoints; may be missing.

    Returns:
        the paths that were removed or renamed.
    """
    fs, directory, touched = file_system or FileSystem(), Path(directory), []
    try:
        found = [m for m in map(LEFTOVER.fullmatch, sorted(os.listdir(directory))) if m]
    except OSError:
        return []
    # Temporary directories first: an .old- whose save still runs belongs to that save.
    found.sort(key=lambda m: ("tmp", "trash", "old").index(m["kind"]))
    living: set[str] = set()
    for match in found:
        path, final = directory / match.group(), directory / match["name"]
        try:
            if match["kind"] == "old":
                if match["uid"] in living:
                    continue
                if not os.path.lexists(final):
                    fs.rename(path, final)
                    fs.sync_directory(directory)
                    warnings.warn(
                        f"{final} was missing after an interrupted save; the previous one is back", stacklevel=2
                    )
                else:
                    _discard(path, sibling(final, "trash", match["uid"]), fs)
            else:
                with _abandoned(path, fs) as abandoned:
                    if not abandoned:
                        living.add(match["uid"])
                        continue
                    _discard(path, sibling(final, "trash", match["uid"]), fs)
            touched.append(path)
        except FileNotFoundError:
            continue  # another process was faster
        except OSError as error:
            warnings.warn(f"could not clean up {path}: {describe(error)[0]}", stacklevel=2)
    return touched


@contextmanager
def _abandoned(path: Path, fs: FileSystem) -> Iterator[bool]:
    """Whether nobody uses a leftover. It stays locked meanwhile, so that nobody can begin to."""
    lock: int | None = None
    try:
        if path.is_symlink() or not path.is_dir():
            yield True  # a file or link that was exchanged against a directory
            return
        try:
            lock = fs.lock(path)
        except FileNotFoundError:
            raise
        except OSError:
            yield time.time() - path.lstat().st_mtime > STALE_SECONDS
        else:
            yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)
