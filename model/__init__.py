"""The models in plain PyTorch; they run on one CPU and know no rank."""
