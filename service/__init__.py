"""Builds kernels and serves them over REST."""
