"""Terminal monitor: the REST client, pure views of its documents, and the live screen."""
