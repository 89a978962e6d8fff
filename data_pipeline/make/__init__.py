"""Makes prepared folders: documents are chosen, tokenised and committed as token shards."""
