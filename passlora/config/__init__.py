"""Every knob with its help, presets, YAML and command line; nothing heavy is imported."""

from passlora.config.knobs import *  # noqa: F403
