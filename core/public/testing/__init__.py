"""Kit for plugin authors."""
