"""Where the example of an external agent is."""

from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "agent" / "agent.toml"
