"""The program of every rank, started by torchrun: `python -m moebius.train RUN_DIR [--dry-run]`."""

import logging
import os
import sys
import traceback
from pathlib import Path

from ..plugins import PluginError
from .config.errors import EXIT_MISTAKE, no_restart_mends
from .config.resize import CONFIG_VARIABLE, with_mesh_of
from .config.run_config import Config
from .loop import train
from .metrics.dry_run import dry_run
from .record.heartbeat import FOLDER
from .record.process_log import keep_log
from .record.redaction import RedactingFilter


def main() -> None:
    """Trains the run in the folder given as the first argument, or makes a dry run of it.

    On an error, the exit code says whether a restart could help.
    """
    if FOLDER in os.environ:  # an agent's rank, whose output is a file
        keep_log()
    try:
        _train()
    except Exception as error:
        if not no_restart_mends(error):
            raise
        # The message explains a mistake in values; one in a user's own code is at a line.
        in_code = isinstance(error, PluginError) or not isinstance(error, ValueError)
        traceback.print_exception(error, limit=None if in_code else 0)
        sys.exit(EXIT_MISTAKE)


def _train() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(RedactingFilter())
    is_dry = sys.argv[2:] == ["--dry-run"]
    if len(sys.argv) != 2 + is_dry:
        raise SystemExit(
            "usage: python -m moebius.train RUN_DIR [--dry-run] (the folder that holds config.json)"
        )
    run_dir = Path(sys.argv[1])
    stored = run_dir / os.environ.get(CONFIG_VARIABLE, "config.json")
    config = with_mesh_of(Config.load(stored), os.environ)
    examine = None
    if config.evaluate.every and not is_dry:
        from ..evaluation.while_training import Examiner  # a program joins the floors

        examine = Examiner()
    state = dry_run(config, run_dir) if is_dry else train(config, run_dir, examine=examine)
    logging.getLogger(__name__).info("%s", state)


if __name__ == "__main__":
    main()
