"""The decision record: what was asked of an engine core, what it decided, what came of it. Never what was said."""
