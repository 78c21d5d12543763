"""The Model Service: gateway, dialects, recording, trajectories, and a replay engine."""
