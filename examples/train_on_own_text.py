"""A small MoEUT on your own text: trained on this machine, then asked to write.

    python examples/train_on_own_text.py "texts/*.txt" --steps 300 --run-dir runs/mine

Text files, JSON lines (.jsonl, .jsonl.zst: the field "text") and Parquet are read. The recipe
`own_text` has 7 million parameters; three hundred steps take some minutes on two CPU cores. Started
again with the same run folder and more steps, it goes on where it was.
"""

import argparse
from pathlib import Path

import moebius


def main() -> None:
    """Trains on the text that the command line names, and prints what the model makes of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("text", nargs="+", help="files, globs or URLs")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/own_text"))
    parser.add_argument("--prompt", default="The ")
    options = parser.parse_args()

    config = moebius.recipe(
        "own_text",
        prepare={"input": options.text, "validation_fraction": 0.05},
        train={"steps": options.steps, "eval_every": 100},
        optim={"warmup_steps": 20},
        job={"ranks_per_node": 1},
    )
    status = moebius.fit(config, options.run_dir)

    trained = moebius.load(options.run_dir)
    print(f"\nafter {trained.step} steps (training loss {status.loss:.3f}) the model writes:\n")
    print(trained.generate(options.prompt, num_tokens=60))
    print(f"\nand of its prompt it says: {trained.score(options.prompt + 'end')}")


if __name__ == "__main__":
    main()
