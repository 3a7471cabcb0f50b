"""The contract that producer, workers, readers and trainers share."""
