"""moebius: expert-parallel pretraining of Mixture-of-Experts Universal Transformers."""

__version__ = "0.1.0"
