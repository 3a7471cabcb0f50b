"""The user's data set: found, checked, and read as blocks of samples with every bad row named.

``row`` is a row's 0-based place in the data set, files in sorted path order, before anything is rejected.
Tokenized columns never become Python objects: a block is made of numpy views of Arrow's buffers. Everything is read
in batches of a few megabytes, so memory does not grow with the data set, with a file or with a row group.
"""

from swathe.dataset.checks import Limits
from swathe.dataset.columns import Columns
from swathe.dataset.files import InputFile, for_each, unreadable
from swathe.dataset.reading import SampleStep, read_samples
from swathe.dataset.source import Dataset, open_dataset

__all__ = [
    "Columns",
    "Dataset",
    "InputFile",
    "Limits",
    "SampleStep",
    "for_each",
    "open_dataset",
    "read_samples",
    "unreadable",
]
