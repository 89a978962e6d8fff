"""Which rank holds which expert: balancing measured load, moving experts, copies of hot ones."""
