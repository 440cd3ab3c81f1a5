"""The commands of `bascule`: clients of the service's API, one file a noun, and those of this machine."""
