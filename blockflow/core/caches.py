"""Caches: where compilers may keep what they have made. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, MutableMapping

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
_SHARED = "torchinductor_"
"""What torch calls the folder that it makes for a user among the machine's temporary files."""


def private_compiler_cache(env: MutableMapping[str, str]) -> bool:
    """Have torch's compiler keep its libraries, which are loaded again, in the user's own cache.

    By default they lie in the machine's folder for temporary files, under a name that anybody can
    take first: who has made that folder says what code is loaded. Torch writes that choice of its
    own into the environment as soon as a part of it is imported, so it counts for none. Nothing is
    set where nothing is known of the user's own.

    Returns:
        Whether ``env`` names another folder than that of torch's own choice now.
    """
    cache = env.get("XDG_CACHE_HOME") or env.get("HOME", "") + "/.cache"
    own = cache.startswith("/") and cache != "/.cache"
    if own and (INDUCTOR not in env or _is_shared(env)):
        env[INDUCTOR] = f"{cache}/blockflow/inductor"
    return INDUCTOR in env and not _is_shared(env)


def _is_shared(env: Mapping[str, str]) -> bool:
    folder, name = posixpath.split(posixpath.normpath(env[INDUCTOR]))
    temporary = {"/tmp", "/var/tmp", *(env.get(n, "") for n in ("TMPDIR", "TEMP", "TMP"))}
    return name.startswith(_SHARED) and folder in {posixpath.normpath(t) for t in temporary if t}
