"""What a program needs to run what was compiled: devices, choice of artifact, loading."""
