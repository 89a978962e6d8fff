"""Commands about data and checkpoints: prepare, data, ckpt."""
