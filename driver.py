"""One build, phase by phase."""
