"""What ``core.replay`` does. These are the phases of a step that are computed again, in their order."""

PHASES = ("batch", "log_probs", "advantages", "update")
