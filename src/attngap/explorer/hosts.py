"""Which names a request may call this server by: a page elsewhere can make its own name point here, not an address."""

import ipaddress
import socket
from typing import Any

LOCAL = ("127.0.0.1", "localhost")


class HostCheck:
    """Refuses requests whose Host is not ours (DNS rebinding). `open_to` is the address that was bound to."""

    def __init__(self, app: Any, open_to: str = LOCAL[0]):
        self.app = app
        self.remote = open_to not in LOCAL
        self.names = {*LOCAL, open_to.lower()}
        if self.remote:
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or self.allows(dict(scope["headers"]).get(b"host", b"").decode("latin-1")):
            await self.app(scope, receive, send)
            return
        from starlette.responses import PlainTextResponse

        line = "This host name is not the explorer's. Open it by the address that attngap serve printed.\n"
        await PlainTextResponse(line, status_code=400)(scope, receive, send)

    def allows(self, host: str) -> bool:
        """Our names; open to other machines, any plain address too, since no page can rebind one."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") and ":" in host else host
        name = name.strip("[]").lower()
        return name in self.names or (self.remote and _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
