"""The frozen model: loaded, packed or padded, its layers captured."""
