"""The environments measured: ours and others, taking turns on the same image and box."""
