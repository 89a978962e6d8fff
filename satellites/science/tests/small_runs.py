"""The smallest run, and its text."""

import json
from pathlib import Path

TINY = (
    *("model.vocab_size=257", "model.d_model=16", "model.num_layers=2", "model.layers_per_group=1"),
    *("model.attention.num_heads=2", "model.attention.d_head=8", "model.attention.num_experts=2"),
    *("model.feed_forward.num_experts=4", "model.feed_forward.d_expert=8"),
    "model.feed_forward.router.top_k=2",
    *("prepare.tokenizer=bytes", "prepare.vocab_size=257", "data.seq_len=16"),
    *("mesh.ep=1", "mesh.dp_replicate=none", "job.num_nodes=1", "job.ranks_per_node=1"),
    *("job.rehearse_failure_at_step=none", "train.device=cpu", "train.threads=1"),
)


def write_texts(file: Path, count: int) -> Path:
    """Writes documents of about ninety characters."""
    lines = [json.dumps({"text": f"document {n}: " + "one two three " * 9}) for n in range(count)]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file
