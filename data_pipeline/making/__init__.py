"""From documents to a prepared folder: what is dropped, what stays, and how shards are made."""
