"""Runs the frozen model on a device and stores what its layers put out."""
