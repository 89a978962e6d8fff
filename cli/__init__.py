"""The command `moebius`: one module per command group; they parse, call and print."""
