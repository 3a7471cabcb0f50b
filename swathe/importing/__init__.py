"""From folders that other tools made to a sealed run, verified on the way in."""

from swathe.importing.speculators import (
    ImportOptions,
    ImportProgress,
    ImportReport,
    import_speculators,
)

__all__ = ["ImportOptions", "ImportProgress", "ImportReport", "import_speculators"]
