"""What torchrun's agent really starts: binds the rank to the agent, gives it its log file, and
becomes the rank (exec).

    python -m moebius.cluster.nodes.rank LOG_DIR COMMAND...

Standard output and error go together, in order, into LOG_DIR/rank<RANK>.log. Cost: one bare Python
start, about 0.05 s.
"""

import os
import sys
from pathlib import Path

from . import processes


def main() -> None:
    """Binds this process to the agent, opens its log and becomes the rank."""
    log_dir, *command = sys.argv[1:]
    processes.bind_to_parent()
    log = os.open(
        Path(log_dir) / f"rank{os.environ['RANK']}.log",
        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        0o644,
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
