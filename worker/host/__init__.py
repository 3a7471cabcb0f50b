"""One node: its devices, a process for each, and the page that all of them answer on."""
