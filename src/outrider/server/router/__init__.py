"""One address in front of several replicas of a server."""
