"""What is decided: pure rules over values, with no I/O, no clock and no chance."""
