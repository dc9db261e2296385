"""Which settings suit a training on this machine: measured, decided, written as overrides."""
