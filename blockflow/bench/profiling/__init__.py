"""The profiler: what a block's batches cost on this machine, run as a worker would run them."""
