"""Published folders are untrusted: 2,000 broken ones are refused in words, and tables notice any error in them."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from published_case import RECORDED, arrays_of, config_in, folder_of, model_of
from safetensors.torch import load_file, save_file

from moebius.distributed.checkpoint.pieces import PublishedFolder, cut
from moebius.model.config.model_config import ModelConfig
from moebius.model.transformer import Transformer
from moebius.train.families import table
from moebius.train.families.family import Arrangement, Family, Rule
from moebius.train.families.import_run import import_source
from moebius.train.families.keys import ConfigKey, Only
from moebius.train.families.mixtral import MIXTRAL
from moebius.train.families.table import FAMILY, open_family, pieces_of

INDEX = "model.safetensors.index.json"
FILES = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
NUM_FOLDERS, PART = 2000, 250


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral in two files with an index."""
    folder = tmp_path_factory.mktemp("sound")
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 12, "num_local_experts": 3}
    model, _ = MIXTRAL.read(sizes | {"head_dim": 4})
    (folder / "config.json").write_text(json.dumps(MIXTRAL.write(model, 64)))
    state = {name: torch.rand(each.shape) for name, each in Transformer(model).state_dict().items()}
    pieces = pieces_of(MIXTRAL, model)
    tensors = {piece.key: cut(state[piece.name], piece).contiguous() for piece in pieces}
    halves = [dict(list(tensors.items())[n::2]) for n in range(2)]
    for file, half in zip(FILES, halves, strict=True):
        save_file(half, folder / file, metadata={"format": "pt"})
    weight_map = {key: file for file, half in zip(FILES, halves, strict=True) for key in half}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def write(file: Path, header: bytes, values: bytes) -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header + values)


ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 3, 2**31, 2**70, 1.5, float("nan"), float("inf"), 1e400),
    *("", "x", "F32", "../x", [], [1], [None] * 3, {}, {"a": 1}, [[[]]], "💥" * 300),
)

Breaking = Callable[[Path, random.Random], None]


def any_of(values: Any, rng: random.Random) -> Any:
    return rng.choice(sorted(values))


Edit = Callable[[dict[str, Any], str, random.Random], Any]


def edited_index(edit: Edit) -> Breaking:
    def breaks(folder: Path, rng: random.Random) -> None:
        index = json.loads((folder / INDEX).read_text())
        edit(index["weight_map"], any_of(index["weight_map"], rng), rng)
        (folder / INDEX).write_text(json.dumps(index))

    return breaks


def edited_header(edit: Edit) -> Breaking:
    def breaks(folder: Path, rng: random.Random) -> None:
        file = folder / rng.choice(FILES)
        header, values = header_of(file)
        edit(header, any_of(header.keys() - {"__metadata__"}, rng), rng)
        write(file, json.dumps(header).encode(), values)

    return breaks


def edited_file(edit: Callable[[Path, random.Random], Any], *, weights: bool = False) -> Breaking:
    files = FILES if weights else [*FILES, INDEX, "config.json"]
    return lambda folder, rng: edit(folder / rng.choice(files), rng)


OUTSIDE = ("../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", ".", "\0", "gone", 7)
INDEX_EDITS: tuple[Edit, ...] = (
    lambda weights, key, rng: weights.pop(key),
    lambda weights, key, rng: weights.update({key: FILES[weights[key] == FILES[0]]}),
    lambda weights, key, rng: weights.update({"model.layers.7.x": FILES[0]}),
    lambda weights, key, rng: weights.update({key: rng.choice(OUTSIDE)}),
)
DTYPES = ("I32", "F16", "F8_E4M3", "BOOL", "F64", "F4", 3, None)
SHAPES = ([2, 2], [2**40, 2**40], [-1], [True], "x", None, [1.5], [])


def other_offsets(header: dict[str, Any], key: str, rng: random.Random) -> None:
    a, b = header[key]["data_offsets"]
    others = [[a + 1, b], [b, a], [a, 2**62], [-4, b], [0], None, [a, b + 4]]
    header[key]["data_offsets"] = rng.choice(others)


HEADER_EDITS: tuple[Edit, ...] = (
    lambda header, key, rng: header.pop(key),
    lambda header, key, rng: header[key].update(dtype=rng.choice(DTYPES)),
    lambda header, key, rng: header[key].update(shape=rng.choice(SHAPES)),
    lambda header, key, rng: header.update({key + rng.choice("_b💥"): header.pop(key)}),
    lambda header, key, rng: header.update({key: rng.choice(ODD)}),
    other_offsets,
)


def longer(file: Path, rng: random.Random) -> None:
    file.write_bytes(file.read_bytes() + rng.randbytes(rng.randrange(1, 9)))


def huge_header(file: Path, rng: random.Random) -> None:
    size = rng.choice([2**63, 2**64 - 1, 10**8 + 1, 10**9, file.stat().st_size - 7])
    file.write_bytes(size.to_bytes(8, "little") + file.read_bytes()[8:])


def garbage(file: Path, rng: random.Random) -> None:
    made = [rng.randbytes(300), pickle.dumps([1]), b"", b"PK\3\4" + rng.randbytes(60)]
    file.write_bytes(rng.choice(made))


def other_header(file: Path, rng: random.Random) -> None:
    header, values = header_of(file)
    text = json.dumps(header)
    twice, deep = f"{text[:-1]}, {text[1:]}", "[" * 100_000
    write(file, rng.choice([twice, deep, "[]", "{}", text[:-1], "nan"]).encode(), values)


def in_two_files(folder: Path, rng: random.Random) -> None:
    one, other = (load_file(folder / file) for file in FILES)
    key = any_of(one, rng)
    save_file(other | {key: one[key]}, folder / FILES[1])


def link_out(file: Path, rng: random.Random) -> None:
    away = file.parent.with_name("away")
    shutil.move(file, away)
    file.symlink_to(rng.choice([away, Path("..") / "away", Path("/proc/self/environ"), file]))


def a_folder(file: Path, rng: random.Random) -> None:
    file.unlink()
    file.mkdir()


def odd_config(folder: Path, rng: random.Random) -> None:
    """May be sound: a value can be as good as the one before."""
    config = config_in(folder)
    for _ in range(rng.randrange(1, 4)):
        config[rng.choice([*config, "mystery"])] = rng.choice(ODD)
    (folder / "config.json").write_text(json.dumps(config))


def odd_rope(folder: Path, rng: random.Random) -> None:
    config = config_in(folder)
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    kind, more = rng.choice([("yarn", {"beta_fast": 32.0}), ("llama3", llama3)])
    key = rng.choice([*config["rope_parameters"], "factor", "type", *more])
    more |= {"rope_type": kind, "factor": 4.0, key: rng.choice(ODD)}
    config["rope_parameters"] |= more
    (folder / "config.json").write_text(json.dumps(config))


ALWAYS: tuple[Breaking, ...] = (
    *map(edited_index, INDEX_EDITS),
    *map(edited_header, HEADER_EDITS),
    *(edited_file(edit, weights=True) for edit in (longer, huge_header, other_header)),
    *map(edited_file, (garbage, link_out, a_folder)),
    edited_file(lambda file, rng: file.unlink()),
    edited_file(lambda file, rng: os.truncate(file, rng.randrange(file.stat().st_size))),
    in_two_files,
)
SOMETIMES: tuple[Breaking, ...] = (odd_config, odd_rope)


def refusal_of(place: Path, *, whole: bool) -> str | None:
    """Returns what is said of a folder that is opened or, as a whole, imported; None: it is read."""
    try:
        if whole:
            import_source(place / "folder", place / "run", "smoke")
        else:
            open_family(place / "folder")
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("first", range(0, NUM_FOLDERS, PART))
def test_a_broken_folder_is_refused_in_words(
    first: int, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("unpickled")

    for module, name in ((pickle, "loads"), (pickle, "load"), (torch, "load")):
        monkeypatch.setattr(module, name, never)
    every, refused = (*ALWAYS, *SOMETIMES), 0
    for seed in range(first, first + PART):
        breaks = every[seed % len(every)]
        place = tmp_path / str(seed)
        shutil.copytree(sound, place / "folder")
        breaks(place / "folder", random.Random(seed))
        said = refusal_of(place, whole=seed % 5 == 0)
        if said is None:
            assert breaks in SOMETIMES, seed
            continue
        refused += 1
        assert 10 < len(said) < 3000, (seed, said)
        assert {path.name for path in place.iterdir()} <= {"folder", "away"}, seed
        shutil.rmtree(place)
    assert refused > PART * 0.8


def test_the_sound_folder_is_read(sound: Path) -> None:
    plan = open_family(sound)
    assert {piece.key for piece in plan.pieces} == {*PublishedFolder(sound).keys}
    state = model_of(plan).state_dict()
    assert all(tensor.isfinite().all() for tensor in state.values())


# Planted errors ----------------------------------------------------------------------------------


def planted_rules(family: Family) -> Iterator[tuple[str, Family]]:
    """Yields the family with one error in one rule."""
    for number, rule in enumerate(family.rules):
        others = (*family.rules[:number], *family.rules[number + 1 :])
        yield f"{rule.published} is lacking", replace(family, rules=others)
        layout, errors = rule.layout, dict[str, Rule]()
        errors["of another name"] = replace(rule, published=f"{rule.published}x")
        if layout.half is not None:
            errors["the other half"] = replace(rule, layout=replace(layout, half=1 - layout.half))
            errors["whole"] = replace(rule, layout=replace(layout, half=None))
        if layout.step > 1:
            errors["not interleaved"] = replace(rule, layout=replace(layout, step=1))
        if layout.axes is not None:
            errors["not turned"] = replace(rule, layout=replace(layout, axes=None))
        elif rule.ours.endswith(".weight") and "norm" not in rule.ours:
            errors["turned"] = replace(rule, layout=Arrangement((1, 0), layout.half, layout.dim))
        for what, wrong in errors.items():
            rules = (*family.rules[:number], wrong, *family.rules[number + 1 :])
            yield f"{rule.published} is {what}", replace(family, rules=rules)


@pytest.mark.needs_shared
@pytest.mark.parametrize("name", RECORDED)
def test_an_error_in_any_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, folder = arrays_of(name), folder_of(name)
    family = FAMILY.get(open_family(folder).family)
    planted, unseen = 0, []
    used = {rule.ours for rule in used_rules(family, open_family(folder).model)}
    for what, wrong in planted_rules(family):
        if not any(rule.ours in used for rule in {*family.rules} ^ {*wrong.rules}):
            continue  # a tensor that this model lacks
        planted += 1
        monkeypatch.setattr(table, "FAMILY", replace(FAMILY, known={family.model_types[0]: wrong}))
        try:
            plan = open_family(folder)
            with torch.no_grad():
                logits = model_of(plan)(recorded["ids"]).logits_BSV
        except (ValueError, RuntimeError):
            continue
        if (logits - recorded["logits"]).abs().max() < 1e-3:
            unseen.append(what)
    assert unseen == []
    assert planted > 25


def used_rules(family: Family, model: ModelConfig) -> list[Rule]:
    """Returns the rules of tensors that a model has."""
    keys = {piece.key for piece in pieces_of(family, model)}
    layers = [str(layer) for layer in range(model.num_layers)]
    return [
        rule
        for rule in family.rules
        if any(rule.published.replace("{L}", layer).replace("{E}", "0") in keys for layer in layers)
    ]


def outcome(family: Family, config: dict[str, Any]) -> Any:
    """Returns the model, or None if the config is refused."""
    try:
        return family.read(config)[0]
    except ValueError:
        return None


@pytest.mark.needs_shared
@pytest.mark.parametrize("name", RECORDED)
def test_an_error_in_any_key_is_noticed(name: str) -> None:
    config = config_in(folder_of(name))
    family = FAMILY.get(config["model_type"])
    right = outcome(family, config)
    for number, part in enumerate(family.parts):

        def notices(*instead: Any, number: int = number, part: Any = part) -> None:
            parts = (*family.parts[:number], *instead, *family.parts[number + 1 :])
            assert differs(replace(family, parts=parts), family, config, part), part

        if isinstance(part, Only) and not part.value:
            continue  # another value is refused as that of an unknown key, too
        notices()
        if not isinstance(part, ConfigKey):
            continue
        notices(replace(part, name=f"{part.name}x", also=()))
        if part.choices is not None:
            turned = dict(zip(part.choices, [*part.choices.values()][::-1], strict=True))
            notices(replace(part, choices=turned))
    for key in family.constants:
        fewer = {other: family.constants[other] for other in family.constants if other != key}
        assert outcome(replace(family, constants=fewer), config) != right, key


def differs(wrong: Family, family: Family, config: dict[str, Any], part: Any) -> bool:
    """Returns whether a family reads another model, also with other values of the part's key."""
    name = getattr(part, "name", "")
    values = [True, 3, 0.5, "no", getattr(part, "value", None)] if name else []
    awkward = [{}, {"use_sliding_window": True, "sliding_window": 5}, {"head_dim": 2}]
    configs = [config | changes for changes in (*awkward, *({name: value} for value in values))]
    return any(outcome(wrong, each) != outcome(family, each) for each in configs)
