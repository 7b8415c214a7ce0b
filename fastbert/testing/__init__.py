"""What the tests are made of, shipped so that users can check their own machine: oracle, cases, error rule, timer."""
