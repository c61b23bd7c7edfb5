"""Death at a chosen operation on the disk: of the process, or of the power.

Counts every call that changes files. At the chosen one the process kills itself, or, much faster,
`Death` is raised, and nothing changes the disk from then on. A power failure takes back what was
not synced: contents go back to their last sync or to anything between, names to theirs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

COUNTED = ("write", "ftruncate", "replace", "unlink", "fsync", "open")
_SIZES = {
    "cbgen.io.formats.compressed.FRAME_BYTES": 300,
    "cbgen.io.formats.parquet.ROW_GROUP_BYTES": 2000,
    "cbgen.io.output.writer.COMPACT_BYTES": 400,
    "cbgen.io.output.writer.DRAIN_BYTES": 500,
}


class Death(BaseException):
    """The process is no more."""


@contextlib.contextmanager
def small_sizes(*, syncs: bool = True) -> Iterator[None]:
    """Let frames and journals be so small that a few rows make everything happen to them.

    Files are synced after each row, or, with `syncs` False, only where they must be.
    """
    sizes = {**_SIZES, "cbgen.io.output.writer.SYNC_SECONDS": 0 if syncs else 10**9}
    with contextlib.ExitStack() as stack:
        for name, value in sizes.items():
            stack.enter_context(mock.patch(name, value))
        yield


class DyingDisk:
    """Stands between `os` and the disk.

    Args:
        dies_at: number of the operation, from 0, before which death comes.
        half: a write then writes half of its bytes first.
        kills: the process is killed; else Death is raised.
        folder: the only folder whose files a power failure may change.
    """

    def __init__(
        self, dies_at: int, *, half: bool = False, kills: bool = False, folder: Path | None = None
    ) -> None:
        self.count = 0
        self._dies_at = dies_at
        self._half = half
        self._kills = kills
        self._folder = folder
        self._is_dead = False
        self._real = {name: getattr(os, name) for name in (*COUNTED, "close")}
        self._descriptors: set[int] = set()
        self._synced: dict[int, bytes] = {}
        self._latest: dict[int, bytes] = {}
        self._names: dict[str, int] = {}

    def __enter__(self) -> DyingDisk:
        """Take the place of the disk."""
        self._patches = contextlib.ExitStack()
        for name in (*COUNTED, "close"):
            self._patches.enter_context(mock.patch.object(os, name, getattr(self, f"_{name}")))
        if self._folder is not None:
            self._sync_names()
            self._synced = {inode: self._content(name) for name, inode in self._names.items()}
        return self

    def __exit__(self, *error: object) -> bool:
        """Give the disk back; a dead process's files are closed."""
        self._patches.close()
        for descriptor in self._descriptors:
            self._real["close"](descriptor)
        return error[0] is Death

    @property
    def has_died(self) -> bool:
        """Whether the operation was reached."""
        return self._is_dead

    def fail_power(self, chance: random.Random) -> None:
        """Leave of the folder what a failure of power at the moment of death may leave."""
        assert self._folder is not None
        current = {path.name: path.stat().st_ino for path in self._folder.iterdir()}
        for name, inode in current.items():
            self._latest[inode] = self._content(name)
        kept = chance.choice([self._names, current])
        for path in self._folder.iterdir():
            path.unlink()
        for name, inode in kept.items():
            synced, latest = self._synced.get(inode, b""), self._latest[inode]
            torn = latest[: chance.randint(0, len(latest))]
            holed = synced + bytes(max(0, len(latest) - len(synced)))
            if not torn.startswith(synced):
                torn = synced
            (self._folder / name).write_bytes(chance.choice([synced, latest, torn, holed]))

    def _next(self) -> bool:
        """Count an operation; return whether it is the last one, done by half."""
        if self._is_dead:
            raise Death
        self.count += 1
        if self.count <= self._dies_at:
            return False
        if not self._half:
            self._die()
        return True

    def _die(self) -> None:
        if self._kills:
            os.kill(os.getpid(), signal.SIGKILL)
        self._is_dead = True
        raise Death

    def _write(self, descriptor: int, data: bytes) -> int:
        if self._next():
            self._real["write"](descriptor, data[: len(data) // 2])
            self._die()
        return self._real["write"](descriptor, data)

    def _ftruncate(self, descriptor: int, size: int) -> None:
        if self._next():
            self._die()
        self._real["ftruncate"](descriptor, size)

    def _replace(self, source: str, target: str) -> None:
        if self._next():
            self._die()
        self._remember(target)
        self._real["replace"](source, target)

    def _unlink(self, path: str | Path) -> None:
        if self._next():
            self._die()
        self._remember(path)
        self._real["unlink"](path)

    def _fsync(self, descriptor: int) -> None:
        if self._next():
            self._die()
        if self._folder is None:
            return
        inode = os.fstat(descriptor).st_ino
        if inode == self._folder.stat().st_ino:
            self._sync_names()
        else:
            size = os.fstat(descriptor).st_size
            self._synced[inode] = os.pread(descriptor, size, 0) if size else b""

    def _open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and self._next():
            self._die()
        descriptor = self._real["open"](path, flags, mode)
        self._descriptors.add(descriptor)
        return descriptor

    def _close(self, descriptor: int) -> None:
        self._descriptors.discard(descriptor)
        self._real["close"](descriptor)

    def _sync_names(self) -> None:
        assert self._folder is not None
        self._names = {path.name: path.stat().st_ino for path in self._folder.iterdir()}
        for name, inode in self._names.items():
            self._latest[inode] = self._content(name)

    def _remember(self, path: str | Path) -> None:
        if self._folder is not None and os.path.exists(path):
            self._latest[os.stat(path).st_ino] = Path(path).read_bytes()

    def _content(self, name: str) -> bytes:
        assert self._folder is not None
        return (self._folder / name).read_bytes()


class FullDisk:
    """Stands in for os.write: takes some bytes into files, then has no room for more."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._write = os.write

    def __call__(self, descriptor: int, data: bytes) -> int:
        """Write what there is room for."""
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return self._write(descriptor, data)
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(descriptor, data[: self.room])
        self.room -= written
        return written
