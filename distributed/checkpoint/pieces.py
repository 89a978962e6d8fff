"""Reads published folders of weights, block by block, as regions of moebius' tensors.

A folder holds config.json and model.safetensors, or several files and an index. A `Piece` maps one
of its tensors to a region of one of ours. Ranks read the overlap of a piece with their own slices,
and need no knowledge of the model's family.

Folders are untrusted. Opening one reads only JSON and the headers of safetensors files, and checks
names, sizes and offsets before any tensor exists. Nothing is unpickled.

Two packed formats appear under the key and with the shape of their values:

    MXFP4     X_blocks, X_scales                     bfloat16 values, exact (gpt-oss)
    fp8       X.weight e4m3, X.weight_scale_inv      float32 values: fp8 · scale of its block (DeepSeek)
"""

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..local_shard import block_of
from .format import CheckpointError, blake2b

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
DTYPES_FILE = ".moebius_dtypes.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
_MOST_HEADER_BYTES = 10**8  # safetensors' own limit
_MOST_SMALL_BYTES = 2**28  # of a file that is copied along
_MAPPED_BYTES = 2**26  # read through one mapping of a file before it is opened anew
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SHOWN = 200  # characters of a foreign value in a message


# Pieces ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Maps a published tensor to a region of one of our tensors."""

    key: str  # published
    name: str  # ours, without "model."
    start: tuple[int, ...]  # of the region, per dim of ours
    sizes: tuple[int, ...]
    # Our dim of every published dim; -1 for a published dim of size 1 that we lack, as of Ernie's
    # (1, E) bias. Dims of ours that are missing here have size 1 in the region.
    axes: tuple[int, ...]
    step: int = 1  # entry i along the last published dim of this piece lies at step·i + phase
    phase: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the published tensor."""
        sizes = [1 if axis < 0 else self.sizes[axis] for axis in self.axes]
        return (*sizes[:-1], sizes[-1] * self.step)

    def spans(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[slice]:
        """Returns where a block of our tensor lies in the published one, per published dim.

        The last one covers the entries between the block's own if `step` is above 1.
        """
        spans = []
        for axis in self.axes:
            first = 0 if axis < 0 else offsets[axis] - self.start[axis]
            spans.append(slice(first, first + (1 if axis < 0 else sizes[axis])))
        last = spans.pop()
        return [*spans, slice(last.start * self.step, last.stop * self.step)]

    def ours(self, block: Tensor) -> Tensor:
        """Returns a published block that `spans` describes as a view in our order of dims."""
        block = block[..., self.phase :: self.step]
        kept = [axis for axis in self.axes if axis >= 0]
        block = block.reshape(
            [n for n, axis in zip(block.shape, self.axes, strict=True) if axis >= 0]
        )
        block = block.permute(sorted(range(len(kept)), key=kept.__getitem__))
        for dim in range(len(self.sizes)):
            block = block if dim in kept else block.unsqueeze(dim)
        return block


def cut(tensor: Tensor, piece: Piece) -> Tensor:
    """Returns the region of our whole tensor, as a view in the published order of dims.

    With `step` above 1 it is every step-th entry along the last dim of the published tensor.
    """
    region = block_of(tensor, piece.start, piece.sizes)
    kept = sorted(axis for axis in piece.axes if axis >= 0)
    region = region.reshape([piece.sizes[axis] for axis in kept])
    region = region.permute([kept.index(axis) for axis in piece.axes if axis >= 0])
    for dim, axis in enumerate(piece.axes):
        region = region.unsqueeze(dim) if axis < 0 else region
    return region


def pieces_to_json(pieces: Sequence[Piece]) -> list[list[Any]]:
    """Returns pieces as JSON values, one short list each."""
    return [
        [p.key, p.name, p.start, p.sizes, p.axes, *([p.step, p.phase] if p.step > 1 else [])]
        for p in pieces
    ]


def pieces_from_json(rows: Sequence[Sequence[Any]]) -> list[Piece]:
    """Returns the pieces that `pieces_to_json` described."""
    return [
        Piece(key, name, tuple(start), tuple(sizes), tuple(axes), *steps)
        for key, name, start, sizes, axes, *steps in rows
    ]


# Folders -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredKey:
    """Locates a published tensor; dtype and shape are those of the values that are read."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    packed: str = ""  # "mxfp4", "fp8"


class PublishedFolder:
    """Opens a folder of safetensors, or one file, and reads blocks of its tensors.

    Args:
        path: a folder with config.json, or a file with config.json beside it.

    Raises:
        CheckpointError: a file is missing, damaged, lies outside of the folder, or contradicts
            another one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.parent if path.is_file() else path
        if not self.path.is_dir():
            raise CheckpointError(f"{path}: is neither a folder nor a file of weights")
        self.config, config_bytes = self._json(CONFIG_FILE)
        files, weight_map, index_bytes = self._files(path.name if path.is_file() else "")
        self._bytes: dict[str, bytes] = {CONFIG_FILE: config_bytes, INDEX_FILE: index_bytes}
        self.stored: dict[str, StoredKey] = {}
        for file in files:
            self._add(file)
        if weight_map is not None:
            self._check_index(weight_map)
        self.digest = blake2b(b"".join(name.encode() + b for name, b in self._bytes.items()))
        del self._bytes
        self.keys = self._unpacked()
        self._open: tuple[str, Any] = ("", None)
        self._mapped = 0

    def _json(self, name: str) -> tuple[dict[str, Any], bytes]:
        try:
            data = self.file(name).read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"{self.path / name}: cannot be read: {error.strerror}"
            ) from error
        return _parsed(data, f"{self.path / name}"), data

    def file(self, name: str) -> Path:
        """Returns the path of a file of the folder.

        A link may lead to a file of the folder or, as in Hugging Face's cache, of ../../blobs.

        Raises:
            CheckpointError: the name leads elsewhere, or is not a file.
        """
        path = self.path / name
        if not name or Path(name).name != name or "\\" in name or "\0" in name:
            raise CheckpointError(f"{self.path}: {name[:_SHOWN]!r} does not name a file in it")
        if not path.is_file():
            raise CheckpointError(f"{path}: is not a file")
        own = self.path.resolve()
        if path.resolve().parent not in (own, own.parent.parent / "blobs"):
            raise CheckpointError(f"{path}: is a link out of its folder; copy the file into it")
        return path

    def _files(self, one: str) -> tuple[list[str], dict[str, str] | None, bytes]:
        """Returns the names of the files of weights, and the index if there is one."""
        if one or (self.path / ONE_FILE).exists():
            return [one or ONE_FILE], None, b""
        if not (self.path / INDEX_FILE).exists():
            raise CheckpointError(
                f"{self.path}: has neither {ONE_FILE} nor {INDEX_FILE}; other formats of weights "
                "are not read"
            )
        index, data = self._json(INDEX_FILE)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) for name in weight_map.values()
        ):
            raise CheckpointError(
                f"{self.path / INDEX_FILE}: its weight_map gives no file per tensor"
            )
        return sorted(set(weight_map.values())), weight_map, data

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        for key in weight_map.keys() | self.stored.keys():
            said = weight_map.get(key, "no file")
            found = self.stored[key].file if key in self.stored else "no file"
            if said != found:
                raise CheckpointError(
                    f"{self.path / INDEX_FILE}: says that {said} has {_short(key)}, and {found} has it"
                )

    def _add(self, file: str) -> None:
        """Reads and checks the header of a file of weights."""
        path = self.file(file)
        header, data, num_bytes = _header_of(path)
        end = 0
        for key, dtype, shape, (start, stop) in sorted(
            _entries(header, path), key=lambda entry: entry[3]
        ):
            size = math.prod(shape) * dtype.itemsize
            if start != end or stop - start != size or stop > num_bytes:
                raise CheckpointError(
                    f"{path}: {_short(key)} of shape {list(shape)} has {size:,} bytes, and its "
                    f"offsets {start} to {stop} do not fit them, or the {num_bytes:,} bytes of the file"
                )
            if key in self.stored:
                raise CheckpointError(f"{path}: has {_short(key)}, as {self.stored[key].file} has")
            self.stored[key] = StoredKey(file, dtype, shape)
            end = stop
        if end != num_bytes:
            raise CheckpointError(f"{path}: its tensors have {end:,} of its {num_bytes:,} bytes")
        self._bytes[file] = data

    def _unpacked(self) -> dict[str, StoredKey]:
        """Returns the tensors under the keys of their values."""
        keys = dict(self.stored)
        for key, found in self.stored.items():
            scale = self.stored.get(f"{key}_scale_inv")
            if key.endswith("_blocks"):
                self._unpack_mxfp4(keys, key.removesuffix("_blocks"))
            elif found.dtype == torch.float8_e4m3fn and scale is not None:
                self._check_fp8(key, scale)
                del keys[f"{key}_scale_inv"]
                keys[key] = StoredKey(found.file, torch.float32, found.shape, "fp8")
        return keys

    def _unpack_mxfp4(self, keys: dict[str, StoredKey], key: str) -> None:
        blocks, scales = self.stored[f"{key}_blocks"], self.stored.get(f"{key}_scales")
        if scales is None:
            raise CheckpointError(f"{self.path / blocks.file}: {key}_blocks has no {key}_scales")
        fits = len(blocks.shape) == 4 and blocks.shape[3] == 16 and blocks.shape[:3] == scales.shape
        if not fits or {blocks.dtype, scales.dtype} != {torch.uint8} or key in keys:
            raise CheckpointError(
                f"{self.path / blocks.file}: {_short(key)}_blocks {list(blocks.shape)} and _scales "
                f"{list(scales.shape)} are not MXFP4: uint8 of (E, out, in/32, 16) and (E, out, in/32)"
            )
        del keys[f"{key}_blocks"], keys[f"{key}_scales"]
        experts, rows, columns, _ = blocks.shape
        keys[key] = StoredKey(blocks.file, torch.bfloat16, (experts, columns * 32, rows), "mxfp4")

    @property
    def _fp8_block(self) -> tuple[int, int]:
        asked = self.config.get("quantization_config")
        sizes = asked.get("weight_block_size") if isinstance(asked, dict) else None
        if sizes is None:
            return (128, 128)
        if not (
            isinstance(sizes, list) and len(sizes) == 2 and all(map(_is_size, sizes)) and all(sizes)
        ):
            raise CheckpointError(
                f"{self.path / CONFIG_FILE}: weight_block_size={sizes!r:.{_SHOWN}} is not two sizes"
            )
        return (sizes[0], sizes[1])

    def _check_fp8(self, key: str, scale: StoredKey) -> None:
        found = self.stored[key]
        wanted = [-(-n // b) for n, b in zip(found.shape, self._fp8_block, strict=False)]
        if len(found.shape) != 2 or [*scale.shape] != wanted or scale.dtype != torch.float32:
            raise CheckpointError(
                f"{self.path / scale.file}: {_short(key)}_scale_inv is {scale.dtype} of shape "
                f"{list(scale.shape)}; {list(found.shape)} needs float32 of {wanted}"
            )

    def check(self, pieces: Sequence[Piece]) -> None:
        """Checks that the folder has the tensors of all pieces, with their shapes and dtypes.

        Raises:
            CheckpointError: names the first one that is missing or differs.
        """
        for piece in pieces:
            found = self.keys.get(piece.key)
            if found is None:
                raise CheckpointError(f"{self.path}: has no {piece.key}, shape {list(piece.shape)}")
            where = f"{self.path / found.file}: {piece.key}"
            if found.shape != piece.shape:
                raise CheckpointError(
                    f"{where} has shape {list(found.shape)}, and the model of config.json needs "
                    f"{list(piece.shape)}"
                )
            if found.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise CheckpointError(
                    f"{where} is stored as {found.dtype}: weights are read as float32, bfloat16, "
                    "float16, MXFP4 with scales, or fp8 e4m3 with weight_scale_inv"
                )

    def read(self, piece: Piece, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Returns a block of our tensor, in our order of dims and the dtype of `keys`.

        Reads only the bytes that overlap the block.

        Args:
            piece: a piece that `check` accepted.
            offsets: of the block in our whole tensor, inside the piece's region.
            sizes: of the block.
        """
        spans, packed = piece.spans(offsets, sizes), self.keys[piece.key].packed
        read = {"": self._raw, "fp8": self._fp8, "mxfp4": self._mxfp4}[packed]
        return piece.ours(read(piece.key, spans))

    def _raw(self, key: str, spans: Sequence[slice]) -> Tensor:
        """Reads a block of a stored tensor as a copy, so that no mapping of the file survives."""
        file = self.stored[key].file
        if self._open[0] != file or self._mapped > _MAPPED_BYTES:
            library = require_safetensors()
            try:
                opened = library.safe_open(self.path / file, framework="pt")
            except (library.SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.path / file}: cannot be read: {error}") from error
            self._open, self._mapped = (file, opened), 0
        block = self._open[1].get_slice(key)[tuple(spans)].clone()
        self._mapped += block.nbytes
        return block

    def _fp8(self, key: str, spans: Sequence[slice]) -> Tensor:
        edges = list(zip(spans, self._fp8_block, strict=True))
        scales = self._raw(
            f"{key}_scale_inv", [slice(at.start // n, -(-at.stop // n)) for at, n in edges]
        )
        for dim, (at, n) in enumerate(edges):
            block = torch.arange(at.start, at.stop) // n - at.start // n
            scales = scales.index_select(dim, block)
        return self._raw(key, spans).float().mul_(scales)

    def _mxfp4(self, key: str, spans: Sequence[slice]) -> Tensor:
        experts, inner, outer = spans
        packs = slice(inner.start // 32, -(-inner.stop // 32))
        first = inner.start - 32 * packs.start
        sizes = [at.stop - at.start for at in (experts, outer, inner)]
        values = torch.empty(sizes, dtype=torch.bfloat16)
        for n in range(sizes[0]):  # one expert at a time, for unpacking takes 16 times its bytes
            expert = slice(experts.start + n, experts.start + n + 1)
            blocks = self._raw(f"{key}_blocks", (expert, outer, packs, slice(0, 16)))
            scales = self._raw(f"{key}_scales", (expert, outer, packs))
            whole = _values_of_mxfp4(blocks[0], scales[0])
            values[n] = whole[:, first : first + sizes[2]]
        return values.transpose(1, 2)

    def small_files(self) -> list[str]:
        """Returns the names of all files but weights and their index, for a copy.

        Raises:
            CheckpointError: one is a link out of the folder.
        """
        names = sorted(entry.name for entry in os.scandir(self.path) if entry.is_file())
        small = [
            name
            for name in names
            if not name.endswith((*_WEIGHTS, ".index.json"))
            and (self.path / name).stat().st_size <= _MOST_SMALL_BYTES
        ]
        for name in small:
            self.file(name)
        return small

    def copy_small_files(self, out: Path) -> None:
        """Copies `small_files` byte by byte into the new folder `out`, with a record of dtypes.

        DTYPES_FILE holds the dtype of most tensors and those of the others, for a later export.
        """
        out.mkdir()
        for name in self.small_files():
            shutil.copyfile(self.file(name), out / name)
        names = {
            key: "bfloat16" if found.packed else str(found.dtype).removeprefix("torch.")
            for key, found in self.keys.items()
        }
        most = Counter(names.values()).most_common(1)[0][0] if names else "float32"
        others = {key: name for key, name in names.items() if name != most}
        text = json.dumps({"most": most, "others": others}, indent=1)
        (out / DTYPES_FILE).write_text(text, encoding="utf-8")


def _values_of_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns the values, (out, in) bfloat16, of (out, in/32, 16) and (out, in/32) of uint8.

    The low half of a byte comes first; bit 3 of a half is the sign.
    """
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(2).int()
    factors = torch.exp2(scales.float() - 127)
    return (table[halves] * factors[..., None]).flatten(1).bfloat16()


# Untrusted JSON ----------------------------------------------------------------------------------


def _header_of(path: Path) -> tuple[dict[str, Any], bytes, int]:
    """Returns a file's header, its bytes, and the number of bytes that follow."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MOST_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"{path}: has {size:,} bytes, too few for a safetensors header of {length:,}; it is "
                "cut off or of another format"
            )
        data = file.read(length)
    return _parsed(data, f"{path}: its header"), data, size - 8 - length


def _entries(
    header: Mapping[str, Any], path: Path
) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], tuple[int, int]]]:
    """Yields key, dtype, shape and offsets of every tensor in a header."""
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        fields = entry if isinstance(entry, dict) else {}
        shape, offsets = fields.get("shape"), fields.get("data_offsets")
        dtype = fields.get("dtype")
        if (
            not (isinstance(dtype, str) and dtype in DTYPES)
            or not (isinstance(shape, list) and all(map(_is_size, shape)))
            or not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_size, offsets)))
        ):
            raise CheckpointError(
                f"{path}: its header describes {_short(key)} as {entry!r:.{_SHOWN}}, which is no tensor"
            )
        yield key, DTYPES[dtype], tuple(shape), (offsets[0], offsets[1])


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _parsed(data: bytes, where: str) -> dict[str, Any]:
    """Parses a JSON object, and refuses a key that it has twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{where}: has {_short(twice)} twice")
        return values

    try:
        values = json.loads(data, object_pairs_hook=once)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{where}: is a {type(values).__name__}, not a JSON object")
    return values


def _short(key: str) -> str:
    return key if len(key) <= _SHOWN else f"{key[:_SHOWN]}…"


def require_safetensors() -> Any:
    """Returns the safetensors library, which reads and writes published weights.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise CheckpointError(
            "published weights need safetensors, which is not installed: pip install "
            "'moebius[export]'"
        ) from error
    return safetensors
