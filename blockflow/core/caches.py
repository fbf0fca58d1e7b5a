"""Caches: where compilers may keep what they have made. Pure."""

from __future__ import annotations

from collections.abc import MutableMapping

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


def private_compiler_cache(env: MutableMapping[str, str]) -> None:
    """Have torch's compiler keep its libraries, which are loaded again, in the user's own cache.

    By default they lie in the machine's folder for temporary files, under a name that anybody can
    take first: who has made that folder says what code is loaded. Nothing is set where nothing is
    known of the user's own.
    """
    cache = env.get("XDG_CACHE_HOME") or env.get("HOME", "") + "/.cache"
    if cache.startswith("/") and cache != "/.cache":
        env.setdefault(INDUCTOR, f"{cache}/blockflow/inductor")
