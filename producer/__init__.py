"""Plans runs, feeds the queue and watches the result; never imports torch."""
