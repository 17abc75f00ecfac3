"""The role of the message that answers a tool call, by format; apart from the formats, so that a dry run loads it."""

OBSERVATION = "Observation:"
ANSWERED = {"hermes": ("tool", ""), "react": ("user", f"{OBSERVATION} ")}  # multi_turn.format -> role, text before
