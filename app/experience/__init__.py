"""Training samples made from recorded model calls, kept in groups and handed out once."""
