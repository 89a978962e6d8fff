"""Makes prepared folders: scans, chooses and tokenises documents, and commits token shards."""
