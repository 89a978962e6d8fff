"""The model card: what the model is, what it was trained on, how that went, and what it is worth.

Everything is read from the checkpoint and from the run folder that it lies in. What is not there is
said to be absent. Paths of the machine stay out.
"""

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from ...data_pipeline.errors import ShardError
from ...data_pipeline.manifest import DatasetManifest, read_manifest
from ...distributed.checkpoint.format import StoredCheckpoint
from ...model.config.model_config import ModelConfig
from ...model.cost import count_parameters
from ...train.config.run_config import Config
from ..safetensors import Precision

PICTURE = "loss.png"
_MOST_FIGURES = 8  # rows of the table of losses
_INK, _TRAIN, _VALIDATION = "#22313f", "#0072b2", "#d55e00"  # two of Okabe and Ito's colours

_USAGE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
inputs = tokenizer(["Once upon a time", "The band"], return_tensors="pt", padding=True)
print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=50)))
"""


@dataclass
class LossCurve:
    """Holds the losses of a run up to the exported step, in nats per token, by step."""

    training: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)


def card_files(
    stored: StoredCheckpoint, config: Config, dtype: Precision, *, has_tokenizer: bool
) -> dict[str, str | bytes]:
    """Returns README.md, and the picture that it shows if there is a loss to show."""
    run_dir = _run_dir_of(stored.path)
    curve = read_losses(run_dir, stored.meta.step)
    files: dict[str, str | bytes] = {}
    if len(curve.training) > 1:
        files[PICTURE] = draw_losses(curve)
    parts = [
        _front_matter(),
        _title(stored, config),
        _usage(has_tokenizer=has_tokenizer),
        _model(config.model, config.data.seq_len),
        _data(config),
        _training(stored, config, curve, dtype),
        _scores(run_dir, stored.meta.step),
        _origin(stored),
    ]
    return {**files, "README.md": "\n".join(parts)}


# Reading the run -----------------------------------------------------------------------------------


def _run_dir_of(checkpoint: Path) -> Path | None:
    """Returns the run folder that a checkpoint lies in, if it lies in one."""
    run_dir = checkpoint.absolute().parent.parent
    return run_dir if (run_dir / "config.json").is_file() else None


def read_losses(run_dir: Path | None, last_step: int) -> LossCurve:
    """Reads the losses that a run has logged, up to a step; the later of two lines of one step."""
    curve = LossCurve()
    for line in _lines_of(run_dir):
        step, loss = line.get("step"), line.get("loss")
        if not isinstance(step, int) or step > last_step or not _is_number(loss):
            continue
        if line.get("kind") == "train":
            curve.training[step] = loss
            curve.tokens[step] = line.get("tokens", 0)
        elif line.get("kind") == "eval":
            curve.validation[step] = loss
    return curve


def _lines_of(run_dir: Path | None) -> Iterable[dict[str, Any]]:
    if run_dir is None or not (run_dir / "metrics.jsonl").is_file():
        return
    with open(run_dir / "metrics.jsonl", encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue  # the line that a run was writing when it ended
            if isinstance(line, dict):
                yield line


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def draw_losses(curve: LossCurve) -> bytes:
    """Draws training and validation loss over the steps; returns a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(7.5, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state
    axes = figure.add_subplot()
    steps = sorted(curve.training)
    losses = [curve.training[step] for step in steps]
    axes.plot(steps, losses, color=_TRAIN, linewidth=1.2, label="training")
    if curve.validation:
        points = sorted(curve.validation)
        values = [curve.validation[step] for step in points]
        axes.plot(points, values, "o--", color=_VALIDATION, linewidth=1.6, label="validation")
    axes.set_xlabel("training step", fontsize=12, color=_INK)
    axes.set_ylabel("loss in nats per token", fontsize=12, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, fontsize=12)
    written = io.BytesIO()
    figure.savefig(written, format="png")
    return written.getvalue()


# Sections ------------------------------------------------------------------------------------------


def _front_matter() -> str:
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags:", "- moebius"]
    return "\n".join(["---", *lines, "---", ""])


def _title(stored: StoredCheckpoint, config: Config) -> str:
    model, tokens = config.model, stored.meta.meta["progress"]["tokens"]
    count = count_parameters(model, config.data.seq_len)
    shared = (
        f"{model.layers_per_group} distinct layers, applied {model.num_repeats} times each"
        if model.num_repeats > 1
        else f"{model.num_layers} layers"
    )
    return (
        f"# {config.job.name}\n\n"
        f"A language model of {count.total:,} parameters, of which {count.active:,} serve a token: "
        f"{shared}. Trained with moebius on {tokens:,} tokens; step {stored.meta.step:,}.\n"
    )


def _usage(*, has_tokenizer: bool) -> str:
    lines = _USAGE.splitlines()
    if not has_tokenizer:
        lines = [*lines[:3], "# this folder holds no tokenizer: encode with the run's own"]
    return "\n".join(
        [
            "## Use",
            "",
            "```python",
            *lines,
            "```",
            "",
            "`trust_remote_code` runs the four `*_moebius.py` files of this folder; they need torch "
            "and transformers (5 or later) alone. Weights are safetensors: nothing here is a pickle.",
            "",
        ]
    )


def _model(model: ModelConfig, seq_len: int) -> str:
    count = count_parameters(model, seq_len)
    rows = [
        ("depth steps", f"{model.num_layers}"),
        ("distinct layers", f"{model.layers_per_group}"),
        ("width", f"{model.d_model}"),
        ("norm", model.norm),
        ("attention", _flat(model.attention.model_dump(mode="json"))),
        ("feed-forward", _flat(model.feed_forward.model_dump(mode="json"))),
        ("halting", "none" if model.halting is None else _flat(model.halting.model_dump())),
        ("vocabulary", f"{model.vocab_size:,}"),
        ("context in training", f"{seq_len:,} tokens"),
        ("parameters", f"{count.total:,}"),
        ("parameters of one token's experts and all that is dense", f"{count.active:,}"),
    ]
    return "## Model\n\n" + _table(("what", "value"), rows)


def _flat(values: Mapping[str, Any], prefix: str = "") -> str:
    """Spells a section of the configuration in one line."""
    parts = []
    for key, value in values.items():
        if isinstance(value, dict):
            parts.append(_flat(value, f"{prefix}{key}."))
        else:
            parts.append(f"{prefix}{key} {value}")
    return ", ".join(parts)


def _data(config: Config) -> str:
    head = "## Data\n\n"
    try:
        manifest = read_manifest(config.data.directory)
    except ShardError:
        return head + "The prepared data was not at hand when this card was written.\n"
    total = max(1, manifest.num_tokens("train"))
    rows = []
    for source in manifest.sources:
        tokens = _tokens_of(manifest, source.name)
        rows.append(
            (
                source.name,
                source.licence or "not stated",
                f"{tokens:,}",
                f"{100 * tokens / total:.1f} %",
            )
        )
    table = _table(("source", "licence", "training tokens", "of all"), rows)
    return (
        f"{head}{table}\n"
        f"Tokenizer: {manifest.header.tokenizer.kind}, "
        f"{manifest.header.tokenizer.vocab_size:,} ids. Documents are joined; after each stands the "
        f"end of document, id {manifest.header.tokenizer.end_of_document_id}.\n"
    )


def _tokens_of(manifest: DatasetManifest, source: str) -> int:
    return sum(era.num_tokens("train") for era in manifest.eras(source))


def _training(stored: StoredCheckpoint, config: Config, curve: LossCurve, dtype: Precision) -> str:
    train, optim, progress = config.train, config.optim, stored.meta.meta["progress"]
    rows = [
        ("steps", f"{stored.meta.step:,} of {train.steps:,}"),
        ("tokens", f"{progress['tokens']:,}"),
        ("batch", f"{train.global_batch} sequences of {config.data.seq_len} tokens"),
        ("optimizer", _flat(optim.model_dump(mode="json"))),
        ("precision", train.precision),
        ("weights here", "bfloat16 where they enter products" if dtype == "bf16" else "float32"),
    ]
    parts = ["## Training", "", _table(("what", "value"), rows)]
    if not curve.training and not curve.validation:
        return "\n".join([*parts, "The run's losses were not at hand.", ""])
    if len(curve.training) > 1:
        parts += [f"![loss over training steps]({PICTURE})", ""]
    return "\n".join([*parts, _loss_table(curve)])


def _loss_table(curve: LossCurve) -> str:
    """Returns a table of some steps, evenly chosen; the steps of evaluations where there are any."""
    steps = sorted(curve.validation or curve.training)
    chosen = _spread(steps, _MOST_FIGURES)
    rows = []
    for step in chosen:
        nearest = max((one for one in curve.training if one <= step), default=None)
        training = None if nearest is None else curve.training[nearest]
        validation = curve.validation.get(step)
        rows.append(
            (
                f"{step:,}",
                "–" if training is None else f"{training:.4f}",
                "–" if validation is None else f"{validation:.4f}",
                "–" if validation is None else f"{math.exp(min(validation, 50)):,.2f}",
            )
        )
    columns = ("step", "training loss", "validation loss", "validation perplexity")
    return _table(columns, rows)


def _spread(values: Sequence[int], most: int) -> list[int]:
    """Returns at most so many values, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    places = {round(place * (len(values) - 1) / (most - 1)) for place in range(most)}
    return [values[place] for place in sorted(places)]


def _scores(run_dir: Path | None, step: int) -> str:
    rows = [] if run_dir is None else list(read_scores(run_dir, step))
    if not rows:
        return "## Evaluation\n\nNot evaluated.\n"
    table = _table(("score", "value", "standard error", "items"), rows)
    notes = [] if run_dir is None else list(read_score_notes(run_dir, step))
    return "## Evaluation\n\n" + table + "".join(f"\n{note}\n" for note in notes)


def read_scores(run_dir: Path, step: int) -> Iterable[tuple[str, str, str, str]]:
    """Yields (name, value, standard error, items) of the scores in the run folder's eval*.json.

    They are what `moebius eval --tasks … --json` prints; of other files those parts are read that
    look alike. A file that names another step is of another checkpoint.
    """
    for content in _score_files(run_dir, step):
        yield from _estimates(content, ())


def _score_files(run_dir: Path, step: int) -> Iterable[dict[str, Any]]:
    for file in sorted(run_dir.glob("eval*.json")):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and content.get("step", step) == step:
            yield content


def read_score_notes(run_dir: Path, step: int) -> Iterable[str]:
    """Yields what zero-shot scores must not be read without: stand-ins, parts of sets, long items."""
    for content in _score_files(run_dir, step):
        tasks = content.get("tasks")
        said = _about_all(content)
        for name, task in tasks.items() if isinstance(tasks, dict) else ():
            if isinstance(task, dict):
                said += _long_items(name, task)
        if said and isinstance(tasks, dict):
            yield f"Of {', '.join(tasks)}: {'; '.join(said)}."


def _about_all(content: Mapping[str, Any]) -> list[str]:
    said = []
    if _has(content, "context"):
        said.append(f"inputs have up to {content['context']:,} tokens")
    if content.get("is_subset") is True:
        said.append("the items are parts of the published sets")
    if _has(content, "draws"):
        said.append(f"means are over {content['draws']:,} draws of the other sequences of a group")
    others = content.get("paper_mean_with")
    for name, other in others.items() if isinstance(others, dict) else ():
        said.append(
            f"`paper_mean` has {other} in the place of {name}, and compares with no published figure"
        )
    return said


def _has(values: Mapping[str, Any], key: str) -> bool:
    """Returns whether there is a number above 0."""
    return isinstance(values.get(key), int) and values[key] > 0


def _long_items(name: str, task: Mapping[str, Any]) -> Iterable[str]:
    if _has(task, "skipped"):
        yield f"{name} is without {task['skipped']:,} items that are too long"
    if _has(task, "truncated"):
        yield f"{name} has {task['truncated']:,} items of which only the end is scored"


def _estimates(
    values: Mapping[str, Any], path: tuple[str, ...]
) -> Iterable[tuple[str, str, str, str]]:
    """Yields every score inside: a value with its standard error."""
    if {"value", "stderr"} <= values.keys() and _is_number(values["value"]):
        error, count = values["stderr"], values.get("count")
        name = ", ".join(part for part in path if part not in ("tasks", "metrics"))
        shown = f"{error:.4f}" if _is_number(error) else "–"
        yield name, f"{values['value']:,.4f}", shown, f"{count:,}" if _is_number(count) else "–"
        return
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _estimates(value, (*path, key))


def _origin(stored: StoredCheckpoint) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in stored.meta.versions.items())
    rows = [("checkpoint digest", stored.manifest.digest), ("written by", versions)]
    return "## Origin\n\n" + _table(("what", "value"), rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; bars in cells are text."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )
