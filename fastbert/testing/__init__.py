"""The oracle, the cases and the error rule of the tests, shipped so that users can check their own machine."""
