"""Reads documents from files, globs, URLs and functions.

`formats` lists what can be read, expands the configured names into splits and reads one of them, `files`
opens it, and `records` checks records. Every error names the file and, inside it, the byte and the line.
"""
