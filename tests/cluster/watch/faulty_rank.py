"""Runs a real rank with a fault in rank 1 of the first generation.

    python faulty_rank.py RUN_DIR [FAULT:STEP]

Every step takes at least 50 ms, so that a test can interfere. FAULT: hang (before the step's first
collective, ignoring SIGTERM), leave (exit code 0 before the step), data (the loader blocks for 8 s at
the step's batch), slow (forward and backward passes take 0.2 s longer from then on).
"""

import os
import signal
import sys
import time

from moebius.data_pipeline.read.loader import Loader
from moebius.train import __main__ as program
from moebius.train import loop


def hangs_here() -> None:
    time.sleep(3600)


def main() -> None:
    fault, _, number = (sys.argv.pop() if len(sys.argv) == 3 else "none:0").partition(":")
    faulty = os.environ["RANK"] == "1" and os.environ["MOEBIUS_GENERATION"] == "1"
    own_step, accumulate, ready = loop.step, loop.accumulate_gradients, Loader.wait_until_ready

    def step(run, *arguments, **values):
        time.sleep(0.05)
        if faulty and run.progress.step + 1 == int(number):
            if fault == "leave":
                os._exit(0)
            if fault == "hang":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                hangs_here()
        return own_step(run, *arguments, **values)

    def slow(run, *arguments, **values):
        if faulty and fault == "slow" and run.progress.step + 1 >= int(number):
            time.sleep(0.2)
        return accumulate(run, *arguments, **values)

    blocked_until = [0.0]

    def blocks(loader, timeout_s):
        if faulty and fault == "data":
            blocked_until[0] = blocked_until[0] or time.monotonic() + 8
            if time.monotonic() < blocked_until[0]:
                time.sleep(timeout_s)
                return False
        return ready(loader, timeout_s)

    loop.step, loop.accumulate_gradients = step, slow
    Loader.wait_until_ready = blocks  # type: ignore[method-assign]
    program.main()


if __name__ == "__main__":
    main()
