"""Which web pages may send requests that change something: none but this service's own. Pure.

A page of any site can make its visitor's browser send a POST to this machine: a form, or ``fetch``
in the mode ``no-cors``, asks nobody beforehand. It cannot read the answer, and need not. So what a
browser says about the sender is looked at, in two headers that no page can set or leave out:
``Origin``, with every POST since 2020, and ``Sec-Fetch-Site``. Who sends neither is no (such)
browser: curl, the SDK, a script. (OWASP, "Cross-Site Request Forgery Prevention"; Fetch Metadata.)
"""

from __future__ import annotations

from collections.abc import Collection

from blockflow.core.errors import SystemError_

SAFE_METHODS = frozenset({"GET", "HEAD"})
"""They change nothing; a page of another site may send them, and cannot read what comes back."""

_OWN_SITES = frozenset({"same-origin", "none"})
"""``none``: the user did it, no page. ``same-site`` is another port of this machine as well."""

SCHEMES = ("http", "https")

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def check_origin(host: str, origin: str | None, site: str | None, schemes: Collection[str]) -> None:
    """Refuse what a page of another site sent.

    Args:
        host: the ``Host`` header, accepted already: a page that comes under a name of its own
            (DNS rebinding) is not to get this far.
        origin: the ``Origin`` header; ``null`` is nobody's.
        site: the ``Sec-Fetch-Site`` header.
        schemes: that this service's URL may have.

    Raises:
        SystemError_: FOREIGN_ORIGIN.
    """
    if site is not None and site.strip().lower() not in _OWN_SITES:
        raise _foreign(f"Sec-Fetch-Site is {site[:40]!r}", "Sec-Fetch-Site")
    if origin is None:
        return
    scheme, _, place = origin.strip().lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme, "")
    own = host.strip().lower().removesuffix(port)
    if scheme not in schemes or place.removesuffix(port) != own:
        raise _foreign(f"Origin {origin[:100]!r} is not this service", "Origin")


def _foreign(why: str, header: str) -> SystemError_:
    return SystemError_(
        "FOREIGN_ORIGIN",
        f"a web page of another site sent the request: {why}",
        where=header,
        hint="only pages of this very address may change something; programs send neither Origin "
        "nor Sec-Fetch-Site",
    )
