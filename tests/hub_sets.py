"""The published evaluation sets as on the Hugging Face hub, a few records each.

Paths, configurations, splits, fields and types are the hub's; the records are made up. Some splits
and configurations that no task reads are present too.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from moebius.evaluation.tasks.hub import BLIMP_PHENOMENA
from moebius.evaluation.tasks.table import TASKS

Record = Mapping[str, Any]
_TEXTS = ["a stone", "a gate", "the sea", "rain"]
_PIQA = {"goal": "Boil it.", "sol1": "Use fire.", "sol2": "Use ice."}
_WINOGRANDE = {"sentence": "A _ met it.", "option1": "gate", "option2": "sea"}
_SIQA = {"context": "It rained.", "question": "Why?", "answerA": "fog", "answerB": "no"}
_BOOLQ = {"question": "is it wet", "passage": "It rained.", "idx": 0}
_COPA = {"premise": "It rained.", "choice1": "It is wet.", "choice2": "It is dry.", "idx": 0}
_BLIMP = {"sentence_good": "Who left?", "sentence_bad": "Who leave?", "field": "syntax"}
_CBT = {
    "sentences": [f"It was the {n} th day , and `` she '' did n't go ." for n in range(20)],
    "question": "She saw the XXXXX and ran .",
}
_HELLASWAG = {
    "activity_label": "Removing ice",
    "ctx_a": "[header] How to wait [title] Sit. [step] The man sits.",
    "ctx_b": "then",
    "ctx": "[header] How to wait [title] Sit. [step] The man sits. then",
    "endings": [", he waits.", ", he [substeps] goes.", ", it rains.", ", all end."],
}


def _science(question: str, answer: str, *, asked_as: str = "question") -> Record:
    labels = list("ABCD" if answer.isalpha() else "1234")
    choices = {"text": _TEXTS, "label": labels}
    return {"id": "8-1", asked_as: question, "choices": choices, "answerKey": answer}


def _schema(start: str, pronoun: str, end: str) -> Record:
    place = {"pronoun": pronoun, "pronoun_loc": len(start), "options": ["The gate", "The sea"]}
    return {"text": f"{start}{pronoun}{end}", **place, "label": 1, "source": "(Hirst 1981)"}


def _cbt(answer: str) -> Record:
    options = ["sea", "sun", "day", "dog", "cat", "hat", "man", "bed", "cup", answer]
    return {**_CBT, "answer": answer, "options": options}


# repository -> configuration (`data` is that without a name) and split -> records
_SETS: dict[str, dict[str, Sequence[Record]]] = {
    "EleutherAI/lambada_openai": {
        "default/test": [
            {"text": "He saw the hat and took the hat"},
            {"text": "She shut the door and\nleft by the door"},
        ],
        "de/test": [{"text": "ein Hut"}],
    },
    "Rowan/hellaswag": {
        "data/validation": [{**_HELLASWAG, "label": label} for label in ("3", "0")],
        "data/test": [{**_HELLASWAG, "label": ""}],
    },
    "baber/piqa": {"data/validation": [{**_PIQA, "label": label} for label in (0, 1)]},
    "allenai/ai2_arc": {
        "ARC-Easy/test": [_science("Which?", "B"), _science("What?", "4")],
        "ARC-Easy/validation": [_science("Who?", "A")],
        "ARC-Challenge/test": [_science("Which one?", "C")],
    },
    "allenai/winogrande": {"winogrande_xl/validation": [{**_WINOGRANDE, "answer": "2"}]},
    "aps/super_glue": {
        "copa/validation": [{**_COPA, "question": "effect", "label": 0}],
        "boolq/validation": [{**_BOOLQ, "label": label} for label in (0, 1)],
    },
    "allenai/openbookqa": {"main/test": [_science("Fog is at", "C", asked_as="question_stem")]},
    "lighteval/siqa": {"data/validation": [{**_SIQA, "answerC": "rain", "label": "3"}]},
    "lighteval/winograd_wsc": {
        "wsc273/test": [
            _schema("The gate met the sea when ", "it", " rose."),
            _schema("I saw ", "his", "  end."),
        ],
        "wsc285/test": [_schema("See ", "it", ".")],
    },
    "cam-cst/cbt": {f"{kind}/test": [_cbt(kind)] for kind in ("V", "P", "NE", "CN")},
    "nyu-mll/blimp": {f"{name}/train": [{**_BLIMP, "UID": name}] for name in BLIMP_PHENOMENA},
}


def hub_repositories() -> dict[str, dict[str, bytes]]:
    """Returns all files of the sets, for the fake hub."""
    return {f"datasets/{name}": _repository(splits) for name, splits in _SETS.items()}


def task_files() -> dict[str, list[Record]]:
    """Returns the records of each task's file, converted from the sets."""
    files: dict[str, list[Record]] = {}
    for name, task in TASKS.items():
        if (hub := task.hub) is None:
            continue
        for configuration in hub.configurations or ("",):
            folders = (configuration,) if configuration else ("data", "default")
            for folder in folders:
                records = _SETS[hub.repository].get(f"{folder}/{hub.split}", ())
                converted = (hub.convert(dict(each), configuration) for each in records)
                files.setdefault(name, []).extend(converted)
    return files


def _repository(splits: Mapping[str, Sequence[Record]]) -> dict[str, bytes]:
    """Returns a file for each split, and a card that names them by configuration."""
    files: dict[str, bytes] = {}
    listed: dict[str, list[dict[str, str]]] = {}
    for place, records in splits.items():
        folder, _, split = place.partition("/")
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist([dict(record) for record in records]), buffer)
        files[f"{place}-00000-of-00001.parquet"] = buffer.getvalue()
        name = "default" if folder == "data" else folder
        listed.setdefault(name, []).append({"split": split, "path": f"{place}-*"})
    configs = [{"config_name": name, "data_files": each} for name, each in listed.items()]
    return {**files, "README.md": f"---\n{yaml.safe_dump({'configs': configs})}---\n".encode()}
