"""A process that SIGKILL cannot end: it waits in state D for a FUSE file system that never answers.

Only the stuck process sees the mount (its own mount namespace). The server ends after `LIFE_S` at
the latest, or when `release` kills it; then the kernel releases the process, and pending signals
take effect.
"""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

LIFE_S = 240
_NEW_MOUNTS, _PRIVATE = 0x20000, 0x44000  # CLONE_NEWNS; MS_REC | MS_PRIVATE
_SERVER = """
import os, signal, struct, sys
signal.alarm(int(sys.argv[2]))
device = int(sys.argv[1])
asked = os.read(device, 1 << 17)
(unique,) = struct.unpack_from("Q", asked, 8)
answer = struct.pack("IIIIHHIIHHI7I", 7, 31, 0, 0, 1, 1, 4096, 1, 0, 0, 0, *[0] * 7)
os.write(device, struct.pack("IiQ", 16 + len(answer), 0, unique) + answer)
print("ready", flush=True)
while True:
    os.read(device, 1 << 17)  # taken, and never answered
"""


def why_not() -> str:
    """Returns why no process can be made to hang here, or ""."""
    if sys.platform != "linux" or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse that this user may open"
    program = "import stuck, sys; sys.exit(not stuck._own_mounts())"
    environment = {"PYTHONPATH": str(Path(__file__).parent)}
    tried = subprocess.run([sys.executable, "-S", "-c", program], env=environment, check=False)
    return "mounts are not permitted here" if tried.returncode else ""


def hang(folder: Path) -> None:
    """Hangs in the kernel, after writing the server's pid to `folder`.server."""
    folder.mkdir(parents=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    if not _own_mounts() or _mount("hung", str(folder), "fuse", 0, options):
        raise OSError(f"the file system could not be mounted on {folder}")
    server = subprocess.Popen(
        [sys.executable, "-S", "-c", _SERVER, str(device), str(LIFE_S)],
        stdout=subprocess.PIPE,
        env={},  # no mark of the run by which it would be found
        pass_fds=[device],
        start_new_session=True,
    )
    os.close(device)
    assert server.stdout is not None
    server.stdout.readline()
    folder.with_suffix(".server").write_text(str(server.pid))
    os.stat(folder / "file")


def release(folder: Path) -> None:
    """Releases the hanging process, if there is one."""
    with suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int(folder.with_suffix(".server").read_text()), signal.SIGKILL)


def _own_mounts() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.unshare(_NEW_MOUNTS) == 0 and _mount("none", "/", "", _PRIVATE, "") == 0


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> int:
    texts = [text.encode() for text in (source, target, kind)]
    return ctypes.CDLL(None).mount(*texts, ctypes.c_ulong(flags), options.encode())
