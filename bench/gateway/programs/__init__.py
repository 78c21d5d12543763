"""Programs of many calls before engines that are full: who waits for whom."""
