"""Damage to files, as by a bad disk or a forger."""

from pathlib import Path

from moebius.distributed.checkpoint.format import (
    CheckpointManifest,
    FileSum,
    blake2b,
    digest_of_sums,
)


def flip(file: Path, place: int | None = None) -> None:
    """Flips one bit of a byte, by default of the one in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 0x20
    file.write_bytes(content)


def reseal(checkpoint: Path) -> None:
    """Makes the manifest fit the files, as a forger would."""
    sums = {
        file.name: FileSum(num_bytes=file.stat().st_size, blake2b=blake2b(file.read_bytes()))
        for file in checkpoint.iterdir()
        if file.name != "manifest.json"
    }
    manifest = CheckpointManifest(format=1, files=sums, digest=digest_of_sums(sums))
    (checkpoint / "manifest.json").write_text(manifest.model_dump_json())
