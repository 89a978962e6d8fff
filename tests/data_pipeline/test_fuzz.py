"""Reading a damaged prepared folder gives the right tokens or one clear error: never wrong tokens,
another exception, a hang or unbounded memory.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from made_folder import MadeFolder, documents

from moebius.data_pipeline.errors import ShardError
from moebius.data_pipeline.manifest import read_manifest
from moebius.data_pipeline.read.token_store import TokenStore, verify_shard

CHILD = Path(__file__).parent / "fuzz_folder.py"


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    """Two sources, one with prompts; three segments, a few batches per shard."""
    made = MadeFolder(tmp_path_factory.mktemp("made"), ("a", "b"), frozenset({"b"}))
    made.seal("a", documents(0, 8), documents(8, 3), shards=2).seal("a", documents(1, 4))
    made.seal("b", documents(2, 6, prompts=True)).complete()
    return made.folder


def _run(folder: Path, first: int, count: int) -> dict[str, int]:
    """Runs cases in a process with limits; counts the outcomes."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, str(CHILD), str(folder), str(first), str(count)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert not [line for line in lines if "wrong" in line]
    assert ended.returncode == 0, f"{lines[-1:]} ended the process: {ended.stderr[-2000:]}"
    return lines[-1]["outcomes"]


def _check_outcomes(outcomes: dict[str, int], count: int) -> None:
    """Checks that the cases can fail: most damage matters, and some of each kind."""
    assert sum(outcomes.values()) == count
    for kind in ("shard", "index", "manifest", "JSON", "numbers", "signed"):
        assert outcomes.get(f"{kind}: refused", 0) > count // 100
    assert outcomes.get("signed: read", 0) > 0, "none that only a checksum could have told"


def test_damaged_folders_are_refused_or_read_rightly(intact, tmp_path):
    shutil.copytree(intact, tmp_path / "d")
    _check_outcomes(_run(tmp_path / "d", 0, 150), 150)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 10_000, 2500))
def test_ten_thousand_damaged_folders_are_refused_or_read_rightly(intact, tmp_path, first):
    shutil.copytree(intact, tmp_path / "d")
    _check_outcomes(_run(tmp_path / "d", first, 2500), 2500)


def test_each_of_a_thousand_flipped_bits_is_found(intact, tmp_path):
    """The file's blake2b notices it anywhere, the CRC inside a batch."""
    folder = Path(shutil.copytree(intact, tmp_path / "d"))
    manifest = read_manifest(folder)
    rng = random.Random(3)
    for segment in manifest.sealed:
        store = TokenStore(folder, segment.source, segment.number, "train", manifest)
        for number, entry in enumerate(segment.of("train")):
            path = folder / entry.name
            data = bytearray(path.read_bytes())
            batches = range(*store._first_batches[number : number + 2].tolist())
            starts = store._index["offset"][batches]
            ends = starts + store._index["length"][batches]
            for _ in range(1000 // 4):
                place = rng.randrange(len(data))
                data[place] ^= (bit := 1 << rng.randrange(8))
                path.write_bytes(data)
                with pytest.raises(ShardError, match="blake2b"):
                    verify_shard(folder, entry)
                for batch in np.flatnonzero((starts <= place) & (place < ends)).tolist():
                    with pytest.raises(ShardError, match="CRC32"):
                        store.read(batches[batch])
                data[place] ^= bit
            path.write_bytes(data)
            verify_shard(folder, entry)
