"""Mode `auto` against every fixed mode, in virtual time on committed workloads."""
