"""`python -m moebius.data_pipeline.serve`: the data server's process, for `start` alone."""

from .server import main

if __name__ == "__main__":
    main()
