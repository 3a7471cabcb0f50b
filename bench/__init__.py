"""Measurements against raw limits; each module is a command."""
