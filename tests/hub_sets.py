"""The published evaluation sets as on the Hugging Face hub, a few records each.

Paths, configurations, splits, fields and types are the hub's; the records are made up. Unused
configurations, splits and fields are present too.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from moebius.evaluation.tasks.hub import BLIMP_PHENOMENA

Record = Mapping[str, Any]
_TWO = {"class_label": {"names": {"0": "0", "1": "1"}}}
_CHOICES = {"text": ["a stone", "a gate", "the sea", "rain"], "label": ["A", "B", "C", "D"]}


def _hellaswag(label: str) -> Record:
    return {
        "ind": 4,
        "activity_label": "Removing ice",
        "ctx_a": "[header] How to wait [title] Sit. [step] The man sits.",
        "ctx_b": "then",
        "ctx": "[header] How to wait [title] Sit. [step] The man sits. then",
        "endings": [", he waits.", ", he [substeps] goes.", ", it rains.", ", all end."],
        "source_id": "activitynet~v_1",
        "split": "val",
        "split_type": "indomain",
        "label": label,
    }


def _science(question: str, answer: str) -> Record:
    choices = _CHOICES if answer.isalpha() else {**_CHOICES, "label": ["1", "2", "3", "4"]}
    return {
        "id": f"Mercury_{answer}",
        "question": question,
        "choices": choices,
        "answerKey": answer,
    }


def _book(word: str) -> Record:
    return {
        "sentences": [f"It was the {n} th day , and `` she '' did n't go ." for n in range(20)],
        "question": "She saw the XXXXX and ran .",
        "answer": word,
        "options": ["sea", "sun", "day", "dog", "cat", "hat", "man", "bed", "cup", word],
    }


def _pair(phenomenon: str) -> Record:
    return {
        "sentence_good": "Who left?",
        "sentence_bad": "Who leave?",
        "field": "syntax",
        "linguistics_term": "agreement",
        "UID": phenomenon,
        "simple_LM_method": True,
        "one_prefix_method": False,
        "two_prefix_method": False,
        "lexically_identical": False,
        "pair_id": 0,
    }


def _schema(start: str, pronoun: str, end: str) -> Record:
    return {
        "text": f"{start}{pronoun}{end}",
        "pronoun": pronoun,
        "pronoun_loc": len(start),
        "quote": f"{pronoun}{end}",
        "quote_loc": len(start),
        "options": ["The gate", "The sea"],
        "label": 1,
        "source": "(Hirst 1981)",
    }


_PIQA = {"goal": "Boil it.", "sol1": "Use fire.", "sol2": "Use ice.", "label": 0}
# repository -> file -> records. Where the card names classes, _CLASSES says so.
_FILES: dict[str, dict[str, Sequence[Record]]] = {
    "EleutherAI/lambada_openai": {
        "default/test-00000-of-00001.parquet": [
            {"text": "He saw the hat and took the hat"},
            {"text": "She shut the door and\nleft by the door"},
        ],
        "de/test-00000-of-00001.parquet": [{"text": "ein Hut"}],
    },
    "Rowan/hellaswag": {
        "data/train-00000-of-00001.parquet": [_hellaswag("1")],
        "data/validation-00000-of-00001.parquet": [_hellaswag("3"), _hellaswag("0")],
        "data/test-00000-of-00001.parquet": [_hellaswag("")],
    },
    "baber/piqa": {
        "data/train-00000-of-00001.parquet": [_PIQA],
        "data/validation-00000-of-00001.parquet": [_PIQA, {**_PIQA, "label": 1}],
    },
    "allenai/ai2_arc": {
        "ARC-Easy/test-00000-of-00001.parquet": [_science("Which?", "B"), _science("What?", "4")],
        "ARC-Easy/validation-00000-of-00001.parquet": [_science("Who?", "A")],
        "ARC-Challenge/test-00000-of-00001.parquet": [_science("Which one?", "C")],
    },
    "allenai/winogrande": {
        "winogrande_xl/validation-00000-of-00001.parquet": [
            {"sentence": "A _ met it.", "option1": "gate", "option2": "sea", "answer": "2"}
        ],
        "winogrande_xl/test-00000-of-00001.parquet": [
            {"sentence": "A _ met it.", "option1": "gate", "option2": "sea", "answer": ""}
        ],
    },
    "aps/super_glue": {
        "copa/validation-00000-of-00001.parquet": [
            {"premise": "It rained.", "choice1": "It is wet.", "choice2": "It is dry."}
            | {"question": "effect", "idx": 0, "label": 0}
        ],
        "boolq/validation-00000-of-00001.parquet": [
            {"question": "is it wet", "passage": "It rained.", "idx": 0, "label": label}
            for label in (0, 1)
        ],
    },
    "allenai/openbookqa": {
        "main/test-00000-of-00001.parquet": [
            {"id": "8-1", "question_stem": "Fog is at", "choices": _CHOICES, "answerKey": "C"}
        ],
        "additional/test-00000-of-00001.parquet": [
            {"id": "8-1", "question_stem": "Fog is", "choices": _CHOICES, "answerKey": "A"}
        ],
    },
    "lighteval/siqa": {
        "data/validation-00000-of-00001.parquet": [
            {"context": "It rained.", "question": "Why?", "label": "3"}
            | {"answerA": "fog", "answerB": "no", "answerC": "rain"}
        ],
    },
    "lighteval/winograd_wsc": {
        "wsc273/test-00000-of-00001.parquet": [
            _schema("The gate met the sea when ", "it", " rose."),
            _schema("I saw ", "his", "  end."),
        ],
        "wsc285/test-00000-of-00001.parquet": [_schema("See ", "it", ".")],
    },
    "cam-cst/cbt": {
        **{f"{kind}/test-00000-of-00001.parquet": [_book(kind)] for kind in ("V", "P", "NE", "CN")},
        "raw/test-00000-of-00001.parquet": [{"title": "A book", "content": "All of it."}],
    },
    "nyu-mll/blimp": {
        f"{phenomenon}/train-00000-of-00001.parquet": [_pair(phenomenon)]
        for phenomenon in BLIMP_PHENOMENA
    },
}
_KINDS = {bool: "bool", int: "int64", str: "string"}
_CLASSES: dict[str, object] = dict.fromkeys(
    ("baber/piqa", "aps/super_glue", "lighteval/winograd_wsc"), _TWO
)


def hub_repositories() -> dict[str, dict[str, bytes]]:
    """Returns all files of the sets, for the fake hub."""
    return {f"datasets/{name}": _repository(name, files) for name, files in _FILES.items()}


def _repository(name: str, files: Mapping[str, Sequence[Record]]) -> dict[str, bytes]:
    found = {path: _parquet(records) for path, records in files.items()}
    return {**found, "README.md": _card(name, files).encode()}


def _parquet(records: Sequence[Record]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([dict(record) for record in records]), buffer)
    return buffer.getvalue()


def _card(name: str, files: Mapping[str, Sequence[Record]]) -> str:
    """Returns the card's head: features and files of each configuration."""
    infos, configurations = [], []
    for folder in dict.fromkeys(path.partition("/")[0] for path in files):
        named = "default" if folder == "data" else folder
        own = {path: records for path, records in files.items() if path.startswith(f"{folder}/")}
        [record, *_] = next(iter(own.values()))
        features = [_feature(key, record[key], _CLASSES.get(name)) for key in record]
        splits = sorted({path.partition("/")[2].partition("-")[0] for path in own})
        infos.append({"config_name": named, "features": features})
        data_files = [{"split": split, "path": f"{folder}/{split}-*"} for split in splits]
        configurations.append({"config_name": named, "data_files": data_files})
    head = yaml.safe_dump({"dataset_info": infos, "configs": configurations}, sort_keys=False)
    return f"---\n{head}---\n# {name}\n"


def _feature(key: str, value: object, classes: object) -> dict[str, object]:
    """Returns one feature as a card describes it."""
    if key == "label" and classes and isinstance(value, int):
        return {"name": key, "dtype": classes}
    if isinstance(value, dict):
        return {
            "name": key,
            "sequence": [{"name": name, "dtype": "string"} for name in value],
        }
    if isinstance(value, list):
        return {"name": key, "sequence": "string"}
    return {"name": key, "dtype": _KINDS[type(value)]}
