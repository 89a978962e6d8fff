"""Damages a prepared folder in random ways and reads it: the child process of test_fuzz.py.

    python fuzz_folder.py FOLDER FIRST COUNT

FOLDER belongs to this process alone. A case's number determines its damage; the case reads everything
that is left and repairs the folder. Each forbidden outcome is printed as a JSON line; the last line
counts the others. The system limits memory, and a case that hangs ends the process.
"""

import hashlib
import json
import random
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
from breaking import broken_text, broken_value

from moebius.data_pipeline.errors import DataError
from moebius.data_pipeline.manifest import encoded, read_manifest
from moebius.data_pipeline.read.token_store import INDEX_SCHEMA, TokenStore

MEMORY_BYTES = 2**31
CASE_S = 20

Content = dict[str, tuple[list[bytes], list[bytes]]]
"""Of every shard, by name: tokens (as uint16) and documents' ends of each of its batches."""

ABSURD = [0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53, 2**53 + 1, 2**62, 2**63 - 1]


class WrongError(Exception):
    """Says that reading returned wrong tokens."""


# ---- reading


def read_everything(folder: Path) -> Content:
    """Reads all shards of all segments."""
    found: Content = {}
    manifest = read_manifest(folder)
    for source in manifest.sources:
        for segment in range(len(manifest.segments(source.name))):
            for split in ("train", "validation"):
                store = TokenStore(folder, source.name, segment, split, manifest)
                found |= dict(_read(store))
    return found


def _read(store: TokenStore) -> Iterator[tuple[str, tuple[list[bytes], list[bytes]]]]:
    starts = store._first_batches.tolist()
    for number, entry in enumerate(store.entries):
        tokens, ends = [], []
        for batch in range(starts[number], starts[number + 1]):
            one = store.read(batch)
            tokens.append(one.tokens.tobytes())
            ends.append(one.document_ends.tobytes())
        yield entry.name, (tokens, ends)


# ---- damage of bytes


def _flip(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _number(rng: random.Random, data: bytes) -> bytes:
    """Writes a number, such as a length, at an aligned place."""
    width = rng.choice([2, 4, 8])
    at = rng.randrange(max(1, len(data) - width)) & ~(width - 1)
    value = rng.choice(ABSURD) % 2 ** (8 * width)
    return data[:at] + value.to_bytes(width, "little") + data[at + width :]


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Returns damaged bytes."""
    return rng.choice([_flip, _number, broken_text])(rng, data)


# ---- damage of meaning: every checksum is right again


def _blake2b(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def resign(bodies: list[dict[str, Any]]) -> list[bytes]:
    """Returns manifests with correct hashes and links."""
    files, parent = [], ""
    for body in bodies:
        files.append(encoded(body | {"parent": parent} if "parent" in body else body))
        parent = json.loads(files[-1])["sha256"]
    return files


def mutate_index(rng: random.Random, data: bytes) -> bytes:
    """Changes one or two numbers of an index, or moves its rows."""
    columns = {
        name: column.to_pylist()
        for name, column in zip(INDEX_SCHEMA.names, pa.ipc.open_file(data).read_all(), strict=True)
    }
    for _ in range(rng.choice([1, 2])):
        if rng.random() < 0.25:
            for column in filter(None, columns.values()):
                rng.choice([column.reverse, lambda c=column: c.append(c[0]), column.pop])()
            continue
        column = columns[name := rng.choice(INDEX_SCHEMA.names)]
        if not column:  # an earlier damage removed all its rows
            continue
        row, width = rng.randrange(len(column)), INDEX_SCHEMA.field(name).type.bit_width
        value = rng.choice([column[row] + 1, column[row] - 1, column[row] * 2, *ABSURD])
        column[row] = value % 2**width
    shortest = min(map(len, columns.values()))
    arrays = [
        pa.array(columns[field.name][:shortest], type=field.type, from_pandas=True)
        for field in INDEX_SCHEMA
    ]
    return _index_bytes(arrays)


def _index_bytes(arrays: list[pa.Array]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, INDEX_SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=INDEX_SCHEMA))
    return sink.getvalue().to_pybytes()


# ---- cases


class Folder:
    """Holds an intact folder in memory, and its copy on disk to damage and repair."""

    def __init__(self, path: Path):
        self.path = path
        self.files = {one.name: one.read_bytes() for one in path.iterdir() if one.is_file()}
        self.expected = read_everything(path)
        self.manifests = sorted(name for name in self.files if name.startswith("manifest-"))
        self.shards = sorted(self.expected)

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(self.files[name])["manifest"] for name in self.manifests]

    def with_shard(self, shard: str, data: bytes | None, index: bytes) -> dict[str, bytes]:
        """Returns a folder's files with hashes that match these bytes of a shard and its index."""
        changed = {shard.replace(".tok.", ".idx."): index}
        bodies = self.bodies()
        for body in bodies:
            for entry in body.get("shards", ()):
                if entry["name"] == shard:
                    entry["index_blake2b"] = _blake2b(index)
                    if data is not None:
                        entry |= {"num_bytes": len(data), "blake2b": _blake2b(data)}
                        changed[shard] = data
        return changed | dict(zip(self.manifests, resign(bodies), strict=True))

    def case(self, number: int) -> tuple[str, dict[str, bytes]]:
        """Returns the kind of damage, and the files that differ."""
        rng = random.Random(number)
        kind = rng.choice(
            ["shard", "shard", "index", "manifest", "JSON", "JSON", "numbers", "signed"]
        )
        shard = rng.choice(self.shards)
        index = shard.replace(".tok.", ".idx.")
        if kind in ("shard", "index", "manifest"):
            name = {"shard": shard, "index": index, "manifest": rng.choice(self.manifests)}[kind]
            return kind, {name: damaged(rng, self.files[name])}
        if kind == "JSON":
            bodies = self.bodies()
            chosen = rng.randrange(len(bodies))
            bodies[chosen] = broken_value(rng, bodies[chosen])
            return kind, dict(zip(self.manifests, resign(bodies), strict=True))
        if kind == "numbers":
            return kind, self.with_shard(shard, None, mutate_index(rng, self.files[index]))
        return kind, self._signed(rng, shard, index)

    def _signed(self, rng: random.Random, shard: str, index: str) -> dict[str, bytes]:
        """Returns a shard damaged inside a batch, with matching checksums."""
        data = bytearray(self.files[shard])
        table = pa.ipc.open_file(self.files[index]).read_all()
        row = rng.randrange(table.num_rows)
        start, size = (table[name][row].as_py() for name in ("offset", "length"))
        message = damaged(rng, bytes(data[start : start + size]))[:size].ljust(size, b"\0")
        data[start : start + size] = message
        *columns, sums = (column.to_pylist() for column in table.columns)
        sums[row] = crc32(message)
        pairs = zip([*columns, sums], INDEX_SCHEMA, strict=True)
        arrays = [pa.array(column, type=field.type) for column, field in pairs]
        return self.with_shard(shard, bytes(data), _index_bytes(arrays))

    def run(self, number: int) -> str:
        """Damages, reads and repairs the folder; returns the kind of damage and the outcome.

        Raises:
            WrongError: reading returned wrong tokens.
        """
        kind, changed = self.case(number)
        changed = {name: data for name, data in changed.items() if data != self.files[name]}
        for name, data in changed.items():
            (self.path / name).write_bytes(data)
        try:
            found = read_everything(self.path)
        except DataError as error:
            if not str(error) or "\n" in str(error)[:80]:
                raise WrongError(f"an error that says nothing: {error!r}") from error
            return f"{kind}: refused"
        finally:
            for name in changed:
                (self.path / name).write_bytes(self.files[name])
        self._check(kind, found)
        return f"{kind}: read"

    def _check(self, kind: str, found: Content) -> None:
        for name, (tokens, ends) in found.items():
            expected_tokens, expected_ends = self.expected[name]
            if kind == "signed":  # its own bytes say so, within the limits
                if [len(one) for one in tokens] != [len(one) for one in expected_tokens]:
                    raise WrongError(f"{name}: another number of tokens")
                if max(np.frombuffer(b"".join(tokens), dtype="<u2")) > 256:
                    raise WrongError(f"{name}: a token that is none")
            elif (tokens, ends) != (expected_tokens, expected_ends):
                raise WrongError(f"{name}: wrong tokens")
        if kind in ("shard", "index", "manifest") and found.keys() != self.expected.keys():
            missing = self.expected.keys() - found.keys()
            if kind != "manifest" or not missing:
                raise WrongError(f"shards are missing: {missing}")


def main(path: str, first: str, count: str) -> None:
    """Runs the cases that the command line names."""
    folder = Folder(Path(path))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    outcomes: Counter[str] = Counter()
    for number in range(int(first), int(first) + int(count)):
        signal.alarm(CASE_S)  # nothing catches it, so the process ends
        print(json.dumps({"case": number}), flush=True)
        try:
            outcomes[folder.run(number)] += 1
        except Exception as error:  # noqa: BLE001 (told, and the next one)
            print(json.dumps({"case": number, "wrong": f"{type(error).__name__}: {error}"}))
    print(json.dumps({"outcomes": outcomes}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
