"""The shortest prompt starts first."""

from engine.core import Policy, hookimpl


class ShortestFirst(Policy):
    """Orders the queue by prompt length; arrival decides between equals."""

    name = "shortest-first"

    @hookimpl
    def order(self, waiting):
        return sorted(waiting, key=lambda request: request.num_prompt)
