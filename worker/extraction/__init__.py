"""What is done with one range: read, computed, committed; cut down to the guilty sample where it must be."""
