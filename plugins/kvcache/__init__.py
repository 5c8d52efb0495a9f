"""How cached prefixes are indexed and evicted."""
