"""Samples in, states out, and the proof that they are right."""
