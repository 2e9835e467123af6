"""What adapters must pass, as tests to inherit: for our own, and for those of third parties."""
