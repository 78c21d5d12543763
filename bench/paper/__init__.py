"""The paper's figures 3, 4 and 5, on the real control plane with simulated instances, and beyond."""
