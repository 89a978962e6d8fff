"""Reads published folders of weights, block by block, as regions of moebius' tensors.

A folder holds config.json and model.safetensors, or several files and an index. A `Piece` maps one
of its tensors to a region of one of ours. Ranks read the overlap of a piece with their own slices,
and need no knowledge of the model's family.

Folders are untrusted. Opening one reads only JSON and the headers of safetensors files, before any
tensor exists. The library refuses a header that does not cover its file exactly. Nothing is unpickled.

Two packed formats appear under the key and with the shape of their values:

    MXFP4     X_blocks, X_scales                     bfloat16 values, exact (gpt-oss)
    fp8       X.weight e4m3, X.weight_scale_inv      float32 values: fp8 · scale of its block (DeepSeek)
"""

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from ...data_pipeline.files import json_object, read_regular
from ..local_shard import block_of
from .format import CheckpointError, blake2b

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
DTYPES_FILE = ".moebius_dtypes.json"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # that weights are read as
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
_MOST_SMALL_BYTES = 2**28  # of a file that is copied along, and of all of them
_MAPPED_BYTES = 2**26  # read through one mapping of a file before it is opened anew
_METHODS = ("mxfp4", "fp8")  # of quantization_config
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SHOWN = 200  # characters of a foreign value in a message


# Pieces ------------------------------------------------------------------------------------------

_Row = TypeVar("_Row")
Whole = Annotated[int, Field(strict=True, ge=0)]


class Piece(NamedTuple):
    """Maps a published tensor to a region of one of our tensors."""

    key: str  # published
    name: str  # ours, without "model."
    start: tuple[Whole, ...]  # of the region, per dim of ours
    sizes: tuple[Whole, ...]
    # Our dim of every published dim; -1 for a published dim of size 1 that we lack, as of Ernie's
    # (1, E) bias. Dims of ours that are missing here have size 1 in the region.
    axes: tuple[Annotated[int, Field(strict=True, ge=-1)], ...]
    # Entry i along the last published dim of this piece lies at step · i + phase.
    step: Annotated[int, Field(strict=True, ge=1)] = 1
    phase: Whole = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the published tensor."""
        *sizes, last = self.counts
        return (*sizes, last * self.step)

    @property
    def counts(self) -> list[int]:
        """Returns how many entries the piece has along every published dim."""
        return [1 if axis < 0 else self.sizes[axis] for axis in self.axes]

    @property
    def order(self) -> list[int]:
        """Returns our dims that the published tensor lacks, and those of its own dims."""
        return [dim for dim in range(len(self.sizes)) if dim not in self.axes] + [*self.axes]

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
        order = self.order
        block = block[(None,) * (len(order) - block.ndim)][..., self.phase :: self.step]
        block = block.permute(sorted(range(len(order)), key=order.__getitem__))
        return block.reshape(block.shape[-len(self.sizes) :])


def cut(tensor: Tensor, piece: Piece) -> Tensor:
    """Returns the region of our whole tensor, as a view in the published order of dims.

    With `step` above 1 it is every step-th entry along the last dim of the published tensor.
    """
    region = block_of(tensor, piece.start, piece.sizes)
    return region.permute([axis for axis in piece.order if axis >= 0]).reshape(piece.counts)


def pieces_to_json(pieces: Sequence[Piece]) -> list[list[Any]]:
    """Returns pieces as JSON values, one short list each."""
    return [
        [p.key, p.name, p.start, p.sizes, p.axes, *([p.step, p.phase] if p.step > 1 else [])]
        for p in pieces
    ]


def from_rows(kind: type[_Row], rows: Sequence[Any]) -> list[_Row]:
    """Returns the pieces, or other regions, whose fields JSON rows hold.

    Raises:
        CheckpointError: a row holds something else.
    """
    with contextlib.suppress(ValidationError):
        read = TypeAdapter(kind).validate_python
        found: list[Any] = [read(row) for row in rows]
        if all(len(each.sizes) == len(each.start) > max(each.axes, default=-1) for each in found):
            return found
    raise CheckpointError(
        "source.json: its table of parts of tensors is damaged: start again with --from"
    )


# Folders -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredKey:
    """Locates a published tensor; dtype and shape are those of the values that are read."""

    file: str
    dtype: str  # safetensors' name of it
    shape: tuple[int, ...]
    packed: str = ""  # "mxfp4", "fp8"


class PublishedFolder:
    """Opens a folder of safetensors with config.json, and reads blocks of its tensors.

    Raises:
        CheckpointError: a file is missing, damaged, lies outside of the folder, or contradicts
            another one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: tuple[str, Any] = ("", None)
        self._mapped = 0
        self._bytes: dict[str, bytes] = {}  # of all that the digest covers
        self.stored: dict[str, StoredKey] = {}
        self.config = self._json(CONFIG_FILE)
        self._fp8_block = self._block_of_fp8()
        if (path / ONE_FILE).exists():
            self._add(ONE_FILE)
        else:
            self._add_indexed()
        self.digest = blake2b(b"".join(name.encode() + b for name, b in self._bytes.items()))
        del self._bytes
        self.keys = self._unpacked()

    def _json(self, name: str) -> dict[str, Any]:
        try:
            self._bytes[name] = read_regular(file_in(self.path, name))
        except OSError as error:
            raise CheckpointError(
                f"{self.path / name}: cannot be read ({error.strerror})"
            ) from None
        return _parsed(self._bytes[name], f"{self.path / name}")

    def _add_indexed(self) -> None:
        """Adds the files of the index, which must say of every tensor in which of them it is."""
        if not (self.path / INDEX_FILE).exists():
            raise CheckpointError(
                f"{self.path}: has neither {ONE_FILE} nor {INDEX_FILE}; other formats of weights "
                "are not read"
            )
        said = self._json(INDEX_FILE).get("weight_map")
        if not isinstance(said, dict) or not all(isinstance(name, str) for name in said.values()):
            raise CheckpointError(
                f"{self.path / INDEX_FILE}: its weight_map gives no file per tensor"
            )
        for file in sorted({*said.values()}):
            self._add(file)
        found = {key: stored.file for key, stored in self.stored.items()}
        for key in said.keys() | found.keys():
            if said.get(key) != found.get(key):
                raise CheckpointError(
                    f"{self.path / INDEX_FILE}: says that {said.get(key, 'no file')} has "
                    f"{_short(key)}, and {found.get(key, 'no file')} has it"
                )

    def _add(self, file: str) -> None:
        """Adds the tensors in the header of a file of weights."""
        path = file_in(self.path, file)
        self._opened(file)  # checks the header
        with open(path, "rb") as stream:
            data = stream.read(int.from_bytes(stream.read(8), "little"))
        self._bytes[file] = data
        header = _parsed(data, f"{path}: its header")
        header.pop("__metadata__", None)
        for key, entry in header.items():
            if key in self.stored:
                raise CheckpointError(f"{path}: has {_short(key)}, as {self.stored[key].file} has")
            self.stored[key] = StoredKey(file, entry["dtype"], tuple(entry["shape"]))

    def _opened(self, file: str) -> Any:
        if self._open[0] != file or self._mapped > _MAPPED_BYTES:
            library = require_safetensors()
            try:
                opened = library.safe_open(self.path / file, framework="pt")
            except (library.SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{self.path / file}: cannot be read as safetensors: {error!s:.{_SHOWN}}"
                ) from error
            self._open, self._mapped = (file, opened), 0
        return self._open[1]

    def _unpacked(self) -> dict[str, StoredKey]:
        """Returns the tensors under the keys of their values."""
        keys = dict(self.stored)
        for key, found in self.stored.items():
            if key.endswith("_blocks"):
                self._unpack_mxfp4(keys, key.removesuffix("_blocks"))
            elif found.dtype == "F8_E4M3" and f"{key}_scale_inv" in keys:
                self._unpack_fp8(keys, key)
        return keys

    def _unpack_mxfp4(self, keys: dict[str, StoredKey], key: str) -> None:
        blocks, scales = keys.pop(f"{key}_blocks"), keys.pop(f"{key}_scales", None)
        where = f"{self.path / blocks.file}: {_short(key)}_blocks"
        if scales is None:
            raise CheckpointError(f"{where} has no {_short(key)}_scales")
        fits = len(blocks.shape) == 4 and blocks.shape[3] == 16 and blocks.shape[:3] == scales.shape
        if not fits or {blocks.dtype, scales.dtype} != {"U8"} or key in keys:
            raise CheckpointError(
                f"{where} {list(blocks.shape)} and _scales {list(scales.shape)} are not MXFP4: uint8 "
                "of (E, out, in/32, 16) and (E, out, in/32)"
            )
        experts, rows, columns, _ = blocks.shape
        keys[key] = StoredKey(blocks.file, "BF16", (experts, columns * 32, rows), "mxfp4")

    def _unpack_fp8(self, keys: dict[str, StoredKey], key: str) -> None:
        found, scale = keys[key], keys.pop(f"{key}_scale_inv")
        wanted = [-(-n // b) for n, b in zip(found.shape, self._fp8_block, strict=False)]
        if len(found.shape) != 2 or [*scale.shape] != wanted or scale.dtype != "F32":
            raise CheckpointError(
                f"{self.path / scale.file}: {_short(key)}_scale_inv is {scale.dtype} of shape "
                f"{list(scale.shape)}; {list(found.shape)} needs float32 of {wanted}"
            )
        keys[key] = StoredKey(found.file, "F32", found.shape, "fp8")

    def _block_of_fp8(self) -> list[int]:
        """Returns the sizes of the blocks with one scale, if the packed format is known."""
        asked = self.config.get("quantization_config") or {}
        asked = asked if isinstance(asked, dict) else {"quant_method": asked}
        method = asked.get("quant_method")
        if asked and method not in _METHODS:
            raise CheckpointError(
                f"{self.path / CONFIG_FILE}: quantization_config.quant_method={method!r:.{_SHOWN}} "
                f"is not read; only {' and '.join(_METHODS)} are"
            )
        block = asked.get("weight_block_size") or [128, 128]
        is_list = isinstance(block, list) and len(block) == 2
        if not is_list or any(type(n) is not int or n < 1 for n in block):
            raise CheckpointError(
                f"{self.path / CONFIG_FILE}: weight_block_size={block!r:.{_SHOWN}} is not two sizes"
            )
        return block

    def check(self, pieces: Sequence[Piece]) -> None:
        """Checks that the folder has the tensors of all pieces with a key, as they are described.

        Raises:
            CheckpointError: names the first one that is missing or differs.
        """
        for piece in (each for each in pieces if each.key):
            found = self.keys.get(piece.key)
            if found is None:
                raise CheckpointError(f"{self.path}: has no {piece.key}, shape {list(piece.shape)}")
            where = f"{self.path / found.file}: {piece.key}"
            if found.shape != piece.shape:
                raise CheckpointError(
                    f"{where} has shape {list(found.shape)}, and the model of config.json needs "
                    f"{list(piece.shape)}"
                )
            if found.dtype not in _DTYPES:
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
        opened = self._opened(self.stored[key].file)
        block = opened.get_slice(key)[tuple(spans)].clone()
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

    def copy_small_files(self, out: Path) -> None:
        """Copies all files but weights and their index into the new folder `out`, byte by byte.

        DTYPES_FILE holds the dtype of most tensors and those of the others, for a later export.

        Raises:
            CheckpointError: as for `small_files`.
        """
        out.mkdir()
        for path in small_files(self.path):
            shutil.copyfile(path, out / path.name)
        names = {
            key: "bfloat16" if found.packed else _DTYPES[found.dtype]
            for key, found in self.keys.items()
            if found.dtype in _DTYPES
        }
        most = Counter(names.values()).most_common(1)[0][0] if names else "float32"
        others = {key: name for key, name in names.items() if name != most}
        text = json.dumps({"most": most, "others": others}, indent=1)
        (out / DTYPES_FILE).write_text(text, encoding="utf-8")


def file_in(folder: Path, name: str) -> Path:
    """Returns the path of a file of a folder that somebody else may have written.

    A link may lead to a file of the folder or, as in Hugging Face's cache, of ../../blobs.

    Raises:
        CheckpointError: the name leads elsewhere, or is not a file.
    """
    path = folder / name
    if not name or Path(name).name != name or "\\" in name or "\0" in name:
        raise CheckpointError(f"{folder}: {name[:_SHOWN]!r} does not name a file in it")
    if not path.is_file():
        raise CheckpointError(f"{path}: is not a file")
    own = folder.resolve()
    if path.resolve().parent not in (own, own.parent.parent / "blobs"):
        raise CheckpointError(f"{path}: is a link out of its folder; copy the file into it")
    return path


def small_files(folder: Path) -> list[Path]:
    """Returns all files of a folder but weights, their index and what is as large as weights.

    Raises:
        CheckpointError: one is a link out of the folder, or together they are too large to copy.
    """
    names = [
        path.name
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.endswith((*_WEIGHTS, ".index.json"))
    ]
    sizes = {path: path.stat().st_size for path in (file_in(folder, name) for name in names)}
    found = [path for path, size in sizes.items() if size <= _MOST_SMALL_BYTES]
    if (size := sum(map(sizes.__getitem__, found))) > _MOST_SMALL_BYTES:
        raise CheckpointError(
            f"{folder}: its files beside the weights have {size / 2**20:,.0f} MiB, and a run keeps at most "
            f"{_MOST_SMALL_BYTES / 2**20:,.0f} MiB of them: move away what the model does not need"
        )
    return found


def _values_of_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns the values, (out, in) bfloat16, of (out, in/32, 16) and (out, in/32) of uint8.

    The low half of a byte comes first; bit 3 of a half is the sign.
    """
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(2).int()
    factors = torch.exp2(scales.float() - 127)
    return (table[halves] * factors[..., None]).flatten(1).bfloat16()


# Untrusted JSON ----------------------------------------------------------------------------------


def _parsed(data: bytes, where: str) -> dict[str, Any]:
    """Parses a JSON object, and refuses a key that it has twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"it has {_short(twice)} twice")
        return values

    try:
        return json_object(data, where, hook=once)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


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
