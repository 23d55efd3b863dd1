"""The chat page: three static files, and a policy that lets them load nothing else."""

from importlib import resources

from starlette.responses import Response
from starlette.routing import Route

# Scripts, styles and requests go to this server only; nothing inline, nothing framed.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FILES = {
    "/": ("index.html", "text/html"),
    "/page/chat.css": ("chat.css", "text/css"),
    "/page/chat.js": ("chat.js", "text/javascript"),
    "/page/markdown.js": ("markdown.js", "text/javascript"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}


def page_routes() -> list[Route]:
    """One route for each file. They are read once, so no request names a path on the disk."""
    return [_route(path, name, kind) for path, (name, kind) in _FILES.items()]


def _route(path: str, name: str, kind: str) -> Route:
    content = (resources.files("musespark.server") / "page" / name).read_bytes()
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}

    async def serve(_request: object) -> Response:
        return Response(content, headers=headers, media_type=kind)

    return Route(path, serve, methods=["GET"], include_in_schema=False)
