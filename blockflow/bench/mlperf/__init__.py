"""``blockflow bench``: MLCommons' LoadGen drives a running system, its verdict is the result."""
