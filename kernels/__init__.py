"""Expert-layer operations as functions of tensors, each with several backends."""

if __name__ == "kernels":
    raise ImportError(
        "import moebius.kernels: the repository root is the package `moebius` (pip install -e .)"
    )
