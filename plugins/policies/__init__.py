"""Small plugins that answer one hook."""
