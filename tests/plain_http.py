"""HTTP to this machine. ``httpx.get`` reads all certificates that the machine trusts before each
request, which takes longer than most of the answers: who polls with it keeps a core busy."""

import httpx

_NONE_KEPT = httpx.Limits(max_keepalive_connections=0)
_client = httpx.Client(verify=False, limits=_NONE_KEPT)  # a server may be another one each time

get, post = _client.get, _client.post
