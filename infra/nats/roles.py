"""Who may say what to whom. One NATS user per role; the user is named after the role.

Every role has an inbox prefix of its own, `_INBOX_<role>`, so that no role can read the answers another one gets.
`client` may use the libraries' default `_INBOX` as well: a ten-line client then needs no option.
"""

from __future__ import annotations

from dataclasses import dataclass

ACTORS = ("gateway", "prefill", "decode", "block_manager", "offload")
ROLES = (*ACTORS, "client", "admin")
DEFAULT_INBOX = "_INBOX"


@dataclass(frozen=True)
class Permissions:
    """Subjects a role may publish to and subscribe to; NATS wildcards allowed."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def inbox_prefix(role: str) -> str:
    """Where the answers to this role's requests arrive."""
    return f"{DEFAULT_INBOX}_{role}"


# verbs an actor may call, without the namespace; `>` covers the `<verb>.<instance>` forms
_CALLS: dict[str, tuple[str, ...]] = {
    "gateway": ("prefill.>", "decode.>", "block_manager.>"),
    "prefill": ("gateway.tokens.>", "decode.>", "block_manager.>"),
    "decode": ("gateway.tokens.>", "prefill.cancel.>", "block_manager.>"),
    "block_manager": ("decode.preempt.>", "prefill.preempt.>", "offload.>"),
    "offload": ("block_manager.>",),
}
_JETSTREAM = ("$JS.API.>", "$JS.ACK.>")
_SERVICE_REQUESTS = "$SRV.>"


def permissions(role: str, namespace: str) -> Permissions:
    """What `role` needs and nothing more. `admin` belongs to the operator: the supervisor, `kvrelay stats`, tests."""
    if role == "admin":
        return Permissions(publish=(">",), subscribe=(">",))
    if role == "client":
        verbs = ("gateway.generate", "gateway.cancel", "gateway.model", "block_manager.stats")
        return Permissions(
            publish=(*(f"{namespace}.{verb}" for verb in verbs), _SERVICE_REQUESTS),
            subscribe=(f"{DEFAULT_INBOX}.>", f"{inbox_prefix(role)}.>", f"{namespace}.event.>"),
        )
    answers = (f"{DEFAULT_INBOX}.>", *(f"{inbox_prefix(other)}.>" for other in ROLES))
    return Permissions(
        publish=(
            *(f"{namespace}.{subject}" for subject in _CALLS[role]),
            f"{namespace}.event.>",
            *answers,
            *(_JETSTREAM if role == "gateway" else ()),
        ),
        subscribe=(f"{namespace}.{role}.>", f"{namespace}.event.>", _SERVICE_REQUESTS, f"{inbox_prefix(role)}.>"),
    )
