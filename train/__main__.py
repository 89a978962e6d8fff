"""What torchrun starts on every rank: `python -m moebius.train RUN_DIR`."""

import logging
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from .config import Config
from .loop import train


@record
def main() -> None:
    """Trains the run whose folder is the only argument; torchrun's agent learns of any exception
    from its error file.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if len(sys.argv) != 2:
        raise SystemExit(
            "usage: python -m moebius.train RUN_DIR (the folder that holds config.json)"
        )
    run_dir = Path(sys.argv[1])
    state = train(Config.load(run_dir / "config.json"), run_dir)
    logging.getLogger(__name__).info("%s", state)


if __name__ == "__main__":
    main()
