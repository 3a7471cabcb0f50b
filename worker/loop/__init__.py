"""The queue's other end: ranges claimed, brought through the pipeline and settled, through outages and stops."""
