"""Which requests are samples of one prompt and end together when their parent is cancelled."""

from __future__ import annotations

from cbgen.engine.request import Request


class Families:
    """Unfinished requests that have a parent, by its id; the parent may be finished already."""

    def __init__(self) -> None:
        self._children: dict[str, dict[str, Request]] = {}

    def add(self, request: Request) -> None:
        """Take a request; one without a parent is nobody's child."""
        if request.parent_id is not None:
            self._children.setdefault(request.parent_id, {})[request.request_id] = request

    def children(self, parent_id: str) -> list[Request]:
        """Return the unfinished children of a request, in order of arrival."""
        return list(self._children.get(parent_id, {}).values())

    def remove(self, request: Request) -> None:
        """Forget a request that has ended."""
        if request.parent_id is not None:
            children = self._children[request.parent_id]
            del children[request.request_id]
            if not children:
                del self._children[request.parent_id]
