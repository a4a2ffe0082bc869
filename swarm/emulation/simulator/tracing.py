"""How effects and messages read in a trace."""

from __future__ import annotations

from swarm.emulation.simulator.violation import short
from swarm.protocol.events import Apply, Effect, Fetch, Keep, Persist, Reason, Send, Sync
from swarm.protocol.manifest import Manifest
from swarm.protocol.messages import Message


def describe(thing: Effect | Message) -> str:
    """An effect or a message on one line; empty for what a reader need not see."""
    match thing:
        case Send(destination, _, message):
            return f"-> {destination} {describe(message)}"
        case Persist(record):
            accepted = record.accepted
            voted = f" accepted {accepted.ballot} {short(accepted.manifest)}" if accepted else ""
            return f"PERSIST tip {short(record.tip)} promised {record.promised}{voted}"
        case Apply(manifest, _):
            return f"APPLY {short(manifest)} members {sorted(manifest.members)}"
        case Sync(manifest):
            return f"sync {short(manifest)}"
        case Reason(topic, text):
            return f"# {topic.value}: {text}"
        case Fetch(purpose, wants):
            return f"fetch {purpose.value}: {[(w.unit, w.digest, w.sources) for w in wants]}"
        case Keep():
            return ""
    fields = []
    for name in ("ballot", "ask", "digest", "manifest", "missing", "leave", "accepted", "offer"):
        value = getattr(thing, name, None)
        if isinstance(value, Manifest):
            value = short(value)
        elif name == "accepted" and value is not None:
            value = f"({value.ballot} {short(value.manifest)})"
        elif name == "ballot" and value is not None:
            value = f"{value.attempt}/{value.convener}"
        elif name == "offer" and value is not None:
            value = "yes"
        if value:
            fields.append(f"{name}={value}")
    return f"{type(thing).__name__.upper()} {' '.join(fields)}".rstrip()
