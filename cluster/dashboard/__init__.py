"""A web page on this machine that compares runs, live: what `moebius dashboard` serves."""
