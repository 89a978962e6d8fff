"""Reads documents from files, globs, URLs and functions.

`splits.plan_splits` expands the configured names into input splits, and `formats.read_documents` reads
one split. `formats` lists what can be read, `files` opens it, and `records` checks records. Every error
names the file and, inside it, the byte and the line.
"""
