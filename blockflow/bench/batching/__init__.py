"""``make bench-batching``: batching policies in a real system, beside their papers' figures."""
