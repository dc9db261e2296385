"""Finds the settings that suit a training on this machine: measured, decided, written as overrides."""
