"""Version of the plugin contract (hooks, protocols and the types that they exchange)."""

from __future__ import annotations

API_VERSION = "1.0"
