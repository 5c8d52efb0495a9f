"""Serving an engine core: in a thread of this process or in a process of its own, with one asynchronous client."""
