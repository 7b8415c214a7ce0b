"""What `fastbert bench` runs: contestants, peers, ceilings, the report and its chart."""
