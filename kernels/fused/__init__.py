"""Fused operations beside the experts: norms, rotary embeddings, routers and their scores."""
