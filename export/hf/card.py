"""Writes the model card: model, data and last losses.

Everything comes from the checkpoint and its run folder; the card says what is missing.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ...data_pipeline.errors import ShardError
from ...data_pipeline.manifest import read_manifest
from ...distributed.checkpoint.format import StoredCheckpoint
from ...distributed.checkpoint.source import read_source
from ...model.cost import count_parameters
from ...train.config.run_config import Config

_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [moebius]
---
# {name}

A language model with {total:,} parameters, {active:,} of them active per token, trained with moebius.
`config.json` holds its configuration.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
inputs = tokenizer(["Once upon a time", "The band"], return_tensors="pt", padding=True)
print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=50)))
```

`trust_remote_code` runs the `*_moebius.py` files of this folder; they need only torch and
transformers 5. Tokenizer: {tokenizer}.

## Training

{training}
## Data

{data}"""


def make_card(stored: StoredCheckpoint, config: Config, tokenizer: str) -> str:
    """Returns the README.md of an exported model; `tokenizer` describes its tokenizer."""
    run_dir = stored.path.absolute().parent.parent
    count = count_parameters(config.model, config.data.seq_len)
    return _CARD.format(
        name=config.job.name,
        total=count.total,
        active=count.active,
        tokenizer=tokenizer,
        training=_table(("what", "value"), _training(stored, config, run_dir)),
        data=_data(config),
    )


def _training(stored: StoredCheckpoint, config: Config, run_dir: Path) -> Iterator[Sequence[str]]:
    losses = _last_losses(run_dir / "metrics.jsonl", stored.meta.step)
    yield "steps", f"{stored.meta.step:,} of {config.train.steps:,}"
    yield "tokens", f"{stored.meta.meta['progress']['tokens']:,}"
    yield "precision", config.train.precision
    validation = "eval", "validation loss"
    if stored.weights == "average":
        validation = "average_loss", "validation loss of these averaged weights"
    for kind, name in (("train", "training loss"), validation):
        loss = losses.get(kind, "unknown")
        yield name, loss if isinstance(loss, str) else f"{loss:.4f} nats per token"
    yield "checkpoint digest", stored.manifest.digest
    if (source := read_source(run_dir)) is not None and source.grown:
        yield "grown", source.public_words()


def _last_losses(log: Path, last_step: int) -> dict[str, float | str]:
    """Returns the last losses that a run logged up to a step, by kind of line, and "average_loss".

    Those that are not finite are strings, as in the log.
    """
    found: dict[str, float | str] = {}
    for text in log.open(encoding="utf-8") if log.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # the run was writing this line when it ended
        if line.get("loss") is not None and line["step"] <= last_step:
            found[line["kind"]] = line["loss"]
            found |= {"average_loss": line["average_loss"]} if "average_loss" in line else {}
    return found


def _data(config: Config) -> str:
    try:
        manifest = read_manifest(config.data.directory)
    except ShardError:
        return "The prepared data was not available when this card was written.\n"
    rows = []
    for source in manifest.sources:
        tokens = sum(segment.num_tokens("train") for segment in manifest.segments(source.name))
        rows.append((source.name, source.licence or "not stated", f"{tokens:,}"))
    return _table(("source", "licence", "training tokens"), rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = ([" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in (columns, ["---"] * len(columns), *rows))
