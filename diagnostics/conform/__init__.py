"""The doctor: is an op a first-class citizen? One check a file; ``lab`` holds what the checks work with."""
