"""A stand-in for the training loop that keeps its promises: what a rank of a run folder must do,
without a model.

    python fake_rank.py RUN_DIR [name=value ...]

Every step is an all-reduce over gloo; rank 0 writes metrics, a checkpoint every `every` steps and
the result; all ranks agree on a stop at a step boundary. `steps`, `step_s` and `every` shape the
run, `plain=1` leaves out torch and the other ranks, and `fail="RANK:STEP:GENERATION:how,…"` breaks
it (how: raise or stuck; generation "*": every time, step "*": the first).
`hold="STEP:GENERATION"` stops all ranks before a step until a test has done what it wants and calls
`jobs.let_go`.
"""

import datetime
import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    run_dir = Path(sys.argv[1])
    options = dict(argument.split("=", 1) for argument in sys.argv[2:])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    generation = int(os.environ.get("MOEBIUS_GENERATION", "0"))
    steps, every = int(options.get("steps", 20)), int(options.get("every", 5))
    step_s = float(options.get("step_s", 0.02))
    print(f"rank {rank} of {world_size}, generation {generation}", flush=True)
    add_up = plain_sum if options.get("plain") else gloo_sum()
    checkpoint, state = run_dir / "checkpoint.json", {"step": 0, "loss": 100.0}
    if checkpoint.exists():
        state = json.loads(checkpoint.read_text())
    first = state["step"] + 1
    metrics = open(run_dir / "metrics.jsonl", "a") if rank == 0 else None  # noqa: SIM115 - open as long as the process
    write(
        metrics,
        {
            "kind": "start",
            "generation": generation,
            "world_size": world_size,
            "resumed_from_step": first - 1,
        },
    )
    for step in range(first, steps + 1):
        for order in filter(None, options.get("fail", "").split(",")):
            fail_if_told(order, rank, step, generation)
        if options.get("hold") == f"{step}:{generation}":
            hold(run_dir)
        total = add_up(float(rank + 1))
        state = {"step": step, "loss": state["loss"] * 0.9 + total / 1000 + step % 7}
        asked = (run_dir / "stop").exists() or (run_dir / "pause").exists()
        sees_flag = (rank == 0 or "plain" in options) and asked
        stop = add_up(float(sees_flag)) > 0
        write(
            metrics,
            {
                "kind": "train",
                "step": step,
                "loss": state["loss"],
                "tokens": step * 100,
                "tokens_per_s": 5.0,
            },
        )
        if rank == 0 and (stop or step % every == 0 or step == steps):
            temporary = run_dir / "checkpoint.tmp"
            temporary.write_text(json.dumps(state))
            temporary.replace(checkpoint)
            write(metrics, {"kind": "checkpoint", "step": step, "seconds": 0.1, "bytes": 10})
        if stop:
            return finish(run_dir, metrics, "stopped", step)
        time.sleep(step_s)
    return finish(run_dir, metrics, "finished", steps)


def finish(run_dir: Path, metrics, state: str, step: int) -> None:
    write(metrics, {"kind": "end", "state": state, "step": step})
    if metrics:
        (run_dir / "result.json").write_text(json.dumps({"state": state, "step": step}))


def write(metrics, line: dict) -> None:
    if metrics:
        metrics.write(json.dumps(line) + "\n")
        metrics.flush()


def fail_if_told(order: str, rank: int, step: int, generation: int) -> None:
    who, when, which, how = order.split(":")
    if rank != int(who) or when not in ("*", str(step)) or which not in ("*", str(generation)):
        return
    if how == "raise":
        raise ArithmeticError(f"bad batch at step {step}")
    sys.path.append(str(Path(__file__).parents[1]))
    import stuck

    stuck.hang(Path(sys.argv[1]) / "hung")


def hold(run_dir: Path) -> None:
    while not (run_dir / "go-on").exists():
        time.sleep(0.02)


def plain_sum(value: float) -> float:
    return value


def gloo_sum():
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))

    def add_up(value: float) -> float:
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.item()

    return add_up


if __name__ == "__main__":
    main()
