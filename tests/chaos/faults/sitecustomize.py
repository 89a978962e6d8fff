"""Injects disk faults into every Python process of a job under test, whose PYTHONPATH leads here.

The file `order` in the folder $MOEBIUS_TEST_FAULTS says "hold WHERE" or "full WHERE". WHERE is a part of a
file's path when it is synced, or "commit" when a checkpoint is renamed. A held process writes its pid into
the file `held` and waits while the order exists; otherwise it finds the disk full. Only system calls are
patched, no product code.
"""

import errno
import os
import pathlib
import time

_fsync, _rename = os.fsync, pathlib.Path.rename


def _obey(where):
    folder = pathlib.Path(os.environ["MOEBIUS_TEST_FAULTS"])
    try:
        what, place = (folder / "order").read_text().split()
    except (OSError, ValueError):
        return
    if place not in where:
        return
    if what == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), where)
    (folder / "held").write_text(str(os.getpid()))
    while (folder / "order").exists():
        time.sleep(0.02)


def _slow_fsync(descriptor):
    _obey(os.readlink(f"/proc/self/fd/{descriptor}"))
    _fsync(descriptor)


def _slow_rename(self, target):
    if pathlib.Path(target).suffix == "" and ".g" in self.name and self.name.startswith("step_"):
        _obey("commit")
    return _rename(self, target)


if "MOEBIUS_TEST_FAULTS" in os.environ:
    os.fsync, pathlib.Path.rename = _slow_fsync, _slow_rename
