"""Bytes in, batches out: text to Arrow token shards, shards to batches in a reproducible order."""

if __name__ == "data_pipeline":
    raise ImportError(
        "import moebius.data_pipeline: the repository root is the package `moebius` (pip install -e .)"
    )
