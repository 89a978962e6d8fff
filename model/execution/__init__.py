"""How a pass runs: precision, recomputation, compilation, depth losses."""
