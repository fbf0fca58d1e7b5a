"""What a client has sent and received."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What a connection's core has seen since it was made."""

    submitted: int = 0
    answered: int = 0
    failed: int = 0
    late_replies: int = 0
    malformed: int = 0
    connects: int = 0
    disconnects: int = 0
    retries: int = 0
    slot_uploads: int = 0
    slot_upload_bytes: int = 0
    message_uploads: int = 0
    message_upload_bytes: int = 0
    slot_results: int = 0
    slot_result_bytes: int = 0
    message_results: int = 0
    message_result_bytes: int = 0
