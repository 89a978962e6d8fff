"""Documents that tests can afford: a few kB, the same for the same seed, with more than ASCII in them."""

import json
import random
from pathlib import Path

WORDS = ["router", "expert", "token", "gate", "naïve", "Zürich", "日本語", "😀", "depth", "step", "17", "2048", "the"]


def sentences(seed: int, count: int) -> list[str]:
    """Documents of a few to a few hundred words, the same for the same seed."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.choice([3, 20, 60, 200]))) + f" ({seed}-{n})." for n in range(count)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "source": path.stem}) + "\n" for text in texts))
    return path
