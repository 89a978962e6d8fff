"""From file names, globs, URLs and functions to documents.

1. `splits.plan_splits` expands what the user gave into input splits.
2. `formats.read_documents` reads one split.

What can be read is the table in `formats`; `files` opens it, and `records` says what a record must
have. Every error names the file and, inside it, the byte and the line.
"""
