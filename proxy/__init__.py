"""``engine proxy``: an OpenAI-compatible front for engines that share the work, prompts here and outputs there.

It stands on ``engine.core`` and on what the HTTP frontends share (bounded bodies, errors, signals). Nothing but the
command line imports it.
"""
