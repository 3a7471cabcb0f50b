"""Where time goes and what was done, on its way from the threads of a worker to its supervisor."""
